//! Paths of the directories of `experiments/`: specs, recordings, baselines, results.

use anyhow::{Context, Result, bail};
use liblzma::read::XzDecoder;
use ring::digest::{SHA256, digest};
use serde::Serialize;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use vramlab::{Bytes, input};

/// Size limit of an archive, and of its unpacked contents.
const MOST_PACKED: u64 = 1 << 30;
const MOST_UNPACKED: u64 = 16 << 30;

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
    /// Absent for a file. For a directory, whose name is a label: its last word if that ends in `sim`, which labels of
    /// simulated runs do, else `gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
}

/// The entries of a directory of results, oldest first: their names begin with their date. Archives and
/// directories that are being unpacked are left out.
pub(crate) fn records(results: &Path) -> Result<Vec<Record>> {
    let of = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let last = name.rsplit('-').next().unwrap_or_default();
        let device = if last.ends_with("sim") { last } else { GPU };
        let device = path.is_dir().then(|| device.to_owned());
        (!name.starts_with('.') && !is_archive(&path)).then_some(Record { name, device })
    };
    Ok(entries(results)?.into_iter().filter_map(of).collect())
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
    if !folder.exists() {
        let partial = tempfile::Builder::new().suffix(".partial").tempdir_in(results)?;
        unpack_into(XzDecoder::new(bytes.as_slice()), partial.path())?;
        let unpacked = partial.path().join(label);
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
    let mut unpacked: u64 = 0;
    for member in tar::Archive::new(archive).entries()? {
        let mut member = member?;
        let name = member.path()?.to_string_lossy().into_owned();
        let kind = member.header().entry_type();
        if kind.is_pax_global_extensions() {
            continue;
        }
        if !(kind.is_file() || kind.is_dir()) {
            bail!("{name} in it is neither a file nor a directory; pack it again without it");
        }
        unpacked = unpacked.saturating_add(member.size());
        if unpacked > MOST_UNPACKED {
            bail!("it unpacks to more than {}, which no results do", Bytes(MOST_UNPACKED));
        }
        if !member.unpack_in(folder)? {
            bail!("{name} in it would be outside of its directory; pack it again");
        }
    }
    Ok(())
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
