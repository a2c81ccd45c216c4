//! Where the folders of `experiments/` lie: specs, histories, baselines, results.

use anyhow::{Context, Result, bail};
use liblzma::read::XzDecoder;
use ring::digest::{SHA256, digest};
use std::fs;
use std::path::{Path, PathBuf};

/// How the archives of recorded results end.
pub(crate) const ARCHIVE: &str = ".tar.xz";
/// Says in an unpacked folder what it was unpacked from, by the archive's SHA-256. `vramlab_analysis` reads and writes it too.
const STAMP: &str = ".unpacked";

/// A file or folder of `experiments/`, if it is there: below the current directory, else where this program was built from.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [Some(Path::new("experiments")), own.parent()];
    folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.exists())
}

/// What lies in a folder, sorted.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = || format!("cannot read {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot)?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>().with_context(cannot)?;
    paths.sort();
    Ok(paths)
}

/// This program's own file, which is also the trainer and `vramlab`.
pub(crate) fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program's own file")
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folder of recorded results, if it is there. Each `LABEL.tar.xz` in it is unpacked to the folder `LABEL` beside it.
///
/// # Errors
/// An archive cannot be unpacked, or the folder of its name holds something else, which may be new records.
pub(crate) fn results() -> Result<Option<PathBuf>> {
    let Some(folder) = find("results") else { return Ok(None) };
    for path in entries(&folder)? {
        if let Some(label) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(ARCHIVE)) {
            unpack(&path, &folder, label).with_context(|| format!("cannot unpack {}", path.display()))?;
        }
    }
    Ok(Some(folder))
}

/// Unpacks an archive to `results/label`, unless that was done before.
fn unpack(archive: &Path, results: &Path, label: &str) -> Result<()> {
    let bytes = fs::read(archive)?;
    let (digest, folder) = (sha256(&bytes), results.join(label));
    if !folder.exists() {
        let partial = tempfile::Builder::new().suffix(".partial").tempdir_in(results)?;
        tar::Archive::new(XzDecoder::new(bytes.as_slice())).unpack(partial.path())?;
        let unpacked = partial.path().join(label);
        fs::write(unpacked.join(STAMP), &digest)?;
        let renamed = fs::rename(&unpacked, &folder);
        // Another process may have been first.
        if !folder.exists() {
            renamed?;
        }
    }
    if fs::read_to_string(folder.join(STAMP)).ok() != Some(digest) {
        bail!("{} holds something else; pack it (CONTRIBUTING.md) or remove it", folder.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn archives_are_unpacked_once_and_nothing_is_overwritten() {
        let place = tempfile::tempdir().unwrap();
        let mut tar = tar::Builder::new(liblzma::write::XzEncoder::new(Vec::new(), 1));
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        tar.append_data(&mut header, "label/width/runs", b"text".as_slice()).unwrap();
        let archive = place.path().join("label.tar.xz");
        fs::write(&archive, tar.into_inner().unwrap().finish().unwrap()).unwrap();
        let again = || unpack(&archive, place.path(), "label");
        std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(again));
            threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
        let folder = place.path().join("label");
        assert_eq!(fs::read_to_string(folder.join("width/runs")).unwrap(), "text");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2, "no temporary folder is left");
        fs::write(folder.join(STAMP), "another archive's").unwrap();
        assert!(again().unwrap_err().to_string().contains("holds something else"));
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&archive, "no archive").unwrap();
        assert!(again().is_err() && !folder.exists());
    }
}
