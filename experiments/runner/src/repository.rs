//! Paths of the directories of `experiments/`: specs, recordings, baselines, results.

use crate::study::record::{EXPERIMENT, read_json};
use anyhow::{Context, Result, bail};
use liblzma::read::XzDecoder;
use ring::digest::{SHA256, digest};
use serde::Serialize;
use std::cell::Cell;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use vramlab::output::{self, OutputFolder, remove_abandoned};
use vramlab::{Bytes, DeviceKind, DeviceName, input};

/// Size limit of an archive, and of its unpacked contents.
const MOST_PACKED: u64 = 1 << 30;
const MOST_UNPACKED: u64 = 16 << 30;
/// Size limit of what describes a member: its header and its long name. A reader holds it in memory.
const MOST_HEADERS: u64 = 64 << 10;

/// File ending of the archives of recorded results.
pub(crate) const ARCHIVE: &str = ".tar.xz";
/// File in an unpacked directory that names its archive, by the archive's SHA-256.
const STAMP: &str = ".unpacked";

/// A file or directory of `experiments/`, if it exists: below the current directory, else in the sources of this
/// build.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [Some(Path::new("experiments")), manifest.parent()];
    folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.exists())
}

/// A directory's entries, sorted.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = || format!("cannot read {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot)?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>().with_context(cannot)?;
    paths.sort();
    Ok(paths)
}

/// This program's executable, which is also the trainer and `vramlab`.
pub(crate) fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program's own file")
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The directory of recorded results, if it exists, with its archives unpacked ([`unpack_all`]).
pub(crate) fn results() -> Result<Option<PathBuf>> {
    let Some(folder) = find("results") else { return Ok(None) };
    unpack_all(&folder)?;
    Ok(Some(folder))
}

/// Unpacks each `LABEL.tar.xz` of a directory to the directory `LABEL` next to it.
///
/// # Errors
///
/// An archive cannot be unpacked, or the directory of its name has other contents, which may be new records.
pub(crate) fn unpack_all(folder: &Path) -> Result<()> {
    entries(folder)?.iter().filter(|path| is_archive(path)).try_for_each(|path| unpack_beside(path).map(drop))
}

/// Unpacks `LABEL.tar.xz` to the directory `LABEL` next to it, which is returned; errors as those of [`unpack_all`].
pub(crate) fn unpack_beside(archive: &Path) -> Result<PathBuf> {
    let name = archive.file_name().and_then(|name| name.to_str()?.strip_suffix(ARCHIVE)).unwrap_or_default();
    let folder = archive.parent().unwrap_or(Path::new(""));
    unpack(archive, folder, name).with_context(|| format!("cannot unpack {}", archive.display()))?;
    Ok(folder.join(name))
}

/// Whether a path has the file ending of an archive.
pub(crate) fn is_archive(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.len() > ARCHIVE.len() && name.ends_with(ARCHIVE))
}

/// The device of labels of real GPUs.
pub(crate) const GPU: &str = "gpu";

/// An entry of the directory of recorded results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Record {
    pub(crate) name: String,
    /// Absent for a file. For an experiment `sim` or `gpu`, the device of its runs. For another directory, whose name is a
    /// label: its last word if that ends in `sim`, which labels of simulated runs do, else `gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
}

/// The entries of a directory of results, oldest first: their names begin with their date. Archives and
/// directories that are being unpacked are left out.
pub(crate) fn records(results: &Path) -> Result<Vec<Record>> {
    let of = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let last = name.rsplit('-').next().unwrap_or_default();
        let of_name = || if last.ends_with("sim") { last } else { GPU };
        let device = path.is_dir().then(|| device_of(&path).unwrap_or_else(of_name).to_owned());
        (!name.starts_with('.') && !is_archive(&path)).then_some(Record { name, device })
    };
    Ok(entries(results)?.into_iter().filter_map(of).collect())
}

/// The device of an experiment's directory; `None` for another directory.
fn device_of(folder: &Path) -> Option<&'static str> {
    let path = folder.join(EXPERIMENT);
    let experiment = path.is_file().then(|| read_json(&path).ok())??;
    let device: DeviceName = experiment["device"].as_str()?.parse().ok()?;
    Some(if device.kind() == DeviceKind::Cuda { GPU } else { "sim" })
}

/// The newest record `LABEL/name` among the labels of a device ([`Record::device`]) that satisfies a condition, if any.
pub(crate) fn newest(
    results: &Path,
    device: &str,
    name: &Path,
    fits: impl Fn(&Path) -> bool,
) -> Result<Option<PathBuf>> {
    let labels = records(results)?.into_iter().filter(|record| record.device.as_deref() == Some(device));
    Ok(labels.map(|label| results.join(label.name).join(name)).rfind(|path| fits(path)))
}

/// Unpacks an archive to `results/label`, unless it is unpacked already.
fn unpack(archive: &Path, results: &Path, label: &str) -> Result<()> {
    let bytes = input::read_bytes(archive, MOST_PACKED)?;
    let (digest, folder) = (sha256(&bytes), results.join(label));
    remove_abandoned(&folder);
    if !folder.exists() {
        // A signal removes it.
        let partial = OutputFolder::create(&folder)?;
        unpack_into(XzDecoder::new(bytes.as_slice()), partial.part())?;
        let unpacked = partial.part().join(label);
        // An older version of the archive may have left one. Links were refused, so nothing outside is removed or
        // written.
        if unpacked.join(STAMP).is_file() {
            fs::remove_file(unpacked.join(STAMP))?;
        }
        let stamp = fs::OpenOptions::new().write(true).create_new(true).open(unpacked.join(STAMP));
        stamp
            .and_then(|mut stamp| stamp.write_all(digest.as_bytes()))
            .with_context(|| format!("it has no directory {label} of recorded results; pack it again"))?;
        let renamed = fs::rename(&unpacked, &folder);
        // Another process may have been faster.
        if !folder.exists() {
            renamed?;
        }
    }
    if input::read_text(&folder.join(STAMP), input::WRITTEN).ok() != Some(digest) {
        bail!("{} has other contents; pack it (CONTRIBUTING.md) or remove it", folder.display());
    }
    Ok(())
}

/// Unpacks an archive into a new directory. Writes nothing outside of it: members are files and directories only.
///
/// # Errors
///
/// The archive is damaged, a member is a link or a device or has a path outside, or the archive is too long.
pub(crate) fn unpack_into(archive: impl Read, folder: &Path) -> Result<()> {
    let (mut unpacked, left) = (0_u64, Rc::new(Cell::new(0)));
    let mut archive = tar::Archive::new(Bounded { archive, left: Rc::clone(&left) });
    let mut members = archive.entries()?;
    loop {
        left.set(MOST_HEADERS);
        let Some(member) = members.next() else { break };
        let mut member = member?;
        let name = member.path()?.to_string_lossy().into_owned();
        let kind = member.header().entry_type();
        if kind.is_pax_global_extensions() {
            // Its contents are skipped, within the limit of the next member's headers.
            continue;
        }
        left.set(u64::MAX);
        if !(kind.is_file() || kind.is_dir()) {
            bail!("{name} in it is neither a file nor a directory; pack it again without it");
        }
        unpacked = unpacked.saturating_add(member.size());
        if unpacked > MOST_UNPACKED {
            bail!("it unpacks to more than {}, which no results do", Bytes(MOST_UNPACKED));
        }
        if !output::add(|| member.unpack_in(folder))? {
            bail!("{name} in it would be outside of its directory; pack it again");
        }
    }
    Ok(())
}

/// An archive of which a limited number of bytes is read at a time.
struct Bounded<R> {
    archive: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left.get() == 0 && !buffer.is_empty() {
            return Err(std::io::Error::other(format!(
                "the name of a member is longer than {}, which no results have",
                Bytes(MOST_HEADERS)
            )));
        }
        let most = usize::try_from(self.left.get()).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.archive.read(&mut buffer[..most])?;
        self.left.set(self.left.get().saturating_sub(read as u64));
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    /// An archive of members by kind, name, and text or target.
    fn packed(members: &[(tar::EntryType, &str, &str)]) -> Vec<u8> {
        let mut tar = tar::Builder::new(liblzma::write::XzEncoder::new(Vec::new(), 1));
        for &(kind, name, text) in members {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_mode(0o755);
            // The builder refuses names that lead outside.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            let content = if kind.is_file() { text } else { "" };
            if kind.is_symlink() || kind.is_hard_link() {
                header.set_link_name(text).unwrap();
            }
            header.set_size(content.len() as u64);
            header.set_cksum();
            tar.append(&header, content.as_bytes()).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }

    #[test]
    fn an_archive_writes_nothing_outside_of_its_folder() {
        use tar::EntryType::{Directory, Link, Regular, Symlink};
        let temp_dir = tempfile::tempdir().unwrap();
        let (results, outside) = (temp_dir.path().join("results"), temp_dir.path().join("outside"));
        fs::create_dir(&results).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "kept").unwrap();
        let (folder, file) = (outside.to_str().unwrap(), outside.join("file"));
        let file = file.to_str().unwrap();
        let cases: [&[(tar::EntryType, &str, &str)]; 7] = [
            &[(Symlink, "label", folder)],
            &[(Symlink, "label", folder), (Regular, "label/new", "text")],
            &[(Directory, "label", ""), (Symlink, "label/.unpacked", file)],
            &[(Directory, "label", ""), (Link, "label/hard", file)],
            &[(Directory, "label", ""), (Symlink, "label/soft", "../../outside"), (Regular, "label/soft/new", "text")],
            &[(Directory, "label", ""), (Regular, "../outside/new", "text")],
            &[(tar::EntryType::Fifo, "label", "")],
        ];
        for members in cases {
            let archive = results.join("label.tar.xz");
            fs::write(&archive, packed(members)).unwrap();
            let error = unpack(&archive, &results, "label").unwrap_err();
            assert!(!format!("{error:#}").contains('\n'), "{members:?}: {error:#}");
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "{members:?}");
            assert_eq!(fs::read_to_string(file).unwrap(), "kept", "{members:?}");
            assert_eq!(fs::read_dir(&results).unwrap().count(), 1, "{members:?}: only the archive is left");
        }
    }

    /// Long names are held in memory, and a short archive can have very long ones.
    #[test]
    fn names_have_a_limit_and_usual_ones_are_within_it() {
        let archive = |kind: tar::EntryType, name: &[u8]| {
            let mut tar = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(kind);
            header.set_size(name.len() as u64);
            header.set_cksum();
            tar.append(&header, name).unwrap();
            let mut header = tar::Header::new_gnu();
            header.set_size(4);
            header.set_mode(0o644);
            tar.append_data(&mut header, "label/file", b"text".as_slice()).unwrap();
            tar.into_inner().unwrap()
        };
        use tar::EntryType::{GNULongLink, GNULongName, XGlobalHeader, XHeader};
        for kind in [GNULongName, GNULongLink, XHeader, XGlobalHeader] {
            let temp_dir = tempfile::tempdir().unwrap();
            let error = unpack_into(archive(kind, &vec![b'a'; 1 << 20]).as_slice(), temp_dir.path()).unwrap_err();
            assert!(format!("{error:#}").contains("is longer than 64 KiB"), "{kind:?}: {error:#}");
            assert_eq!(fs::read_dir(temp_dir.path()).unwrap().count(), 0);
        }
        let temp_dir = tempfile::tempdir().unwrap();
        let name = format!("label/{}", "a".repeat(180));
        unpack_into(archive(GNULongName, name.as_bytes()).as_slice(), temp_dir.path()).unwrap();
        assert_eq!(fs::read_to_string(temp_dir.path().join(name)).unwrap(), "text");
        let temp_dir = tempfile::tempdir().unwrap();
        unpack_into(archive(XGlobalHeader, b"19 comment=a commit\n").as_slice(), temp_dir.path()).unwrap();
        assert_eq!(fs::read_to_string(temp_dir.path().join("label/file")).unwrap(), "text");
    }

    #[test]
    fn an_experiment_has_the_device_of_its_runs() {
        let temp_dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("a", r#"{"schema_version": 1, "device": "sim"}"#),
            ("b", r#"{"schema_version": 1, "device": "sim:profile.json"}"#),
            ("c", r#"{"schema_version": 1, "device": "cuda:1"}"#),
            ("d-sim", "no JSON"),
        ] {
            fs::create_dir(temp_dir.path().join(name)).unwrap();
            fs::write(temp_dir.path().join(name).join(EXPERIMENT), text).unwrap();
        }
        let devices: Vec<String> =
            records(temp_dir.path()).unwrap().into_iter().filter_map(|record| record.device).collect();
        assert_eq!(devices, ["sim", "sim", GPU, "sim"]);
    }

    #[test]
    fn the_newest_record_is_the_last_label_of_its_device() {
        let temp_dir = tempfile::tempdir().unwrap();
        let labels = ["2026-01-01-sim", "2026-01-02-sim", "2026-01-03-h200", "2026-01-04-h100-resim", ".x.partial"];
        for label in labels {
            fs::create_dir_all(temp_dir.path().join(label).join("width")).unwrap();
        }
        fs::create_dir(temp_dir.path().join("2026-01-05-h200")).unwrap();
        fs::write(temp_dir.path().join("2026-01-03-h200.tar.xz"), "").unwrap();
        fs::write(temp_dir.path().join("2026-01-03-h200-a.jsonl"), "").unwrap();
        let newest = |device: &str| {
            let path = newest(temp_dir.path(), device, Path::new("width"), Path::exists).unwrap()?;
            path.parent()?.file_name()?.to_str().map(str::to_owned)
        };
        assert_eq!(newest("sim").as_deref(), Some(labels[1]));
        assert_eq!(newest(GPU).as_deref(), Some(labels[2]), "the newest label has no such record");
        assert_eq!(newest("resim").as_deref(), Some(labels[3]));
        let records = records(temp_dir.path()).unwrap();
        let files: Vec<&str> =
            records.iter().filter(|record| record.device.is_none()).map(|record| record.name.as_str()).collect();
        assert_eq!(files, ["2026-01-03-h200-a.jsonl"]);
        assert_eq!(records.len(), 6);
    }

    #[test]
    fn archives_are_unpacked_once_and_nothing_is_overwritten() {
        let temp_dir = tempfile::tempdir().unwrap();
        let mut tar = tar::Builder::new(liblzma::write::XzEncoder::new(Vec::new(), 1));
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        tar.append_data(&mut header, "label/width/runs", b"text".as_slice()).unwrap();
        let archive = temp_dir.path().join("label.tar.xz");
        fs::write(&archive, tar.into_inner().unwrap().finish().unwrap()).unwrap();
        let again = || unpack(&archive, temp_dir.path(), "label");
        std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(again));
            threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
        let folder = temp_dir.path().join("label");
        assert_eq!(fs::read_to_string(folder.join("width/runs")).unwrap(), "text");
        assert_eq!(fs::read_dir(temp_dir.path()).unwrap().count(), 2, "no temporary directory is left");
        fs::write(folder.join(STAMP), "another archive's").unwrap();
        assert!(again().unwrap_err().to_string().contains("has other contents"));
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&archive, "no archive").unwrap();
        assert!(again().is_err() && !folder.exists());
    }
}
