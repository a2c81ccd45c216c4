//! Where the folders of `experiments/` lie: specs, histories, baselines, results.

use anyhow::{Context, Result};
use liblzma::read::XzDecoder;
use ring::digest::{SHA256, digest};
use std::path::{Path, PathBuf};

/// What a folder of results was unpacked from, by its SHA-256: `vramlab_analysis` looks whether that is still so.
const STAMP: &str = ".unpacked";

/// A file or folder of `experiments/`, if it is there: below the current directory, else where this program was built from.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [Some(Path::new("experiments")), own.parent()];
    folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.exists())
}

/// The folders of recorded results, by name. Their archives (`LABEL.tar.xz`) are unpacked beside themselves first, unless that
/// was done before.
///
/// # Errors
/// An archive cannot be read, or its folder not be written.
pub(crate) fn results() -> Result<Vec<PathBuf>> {
    let Some(folder) = find("results") else { return Ok(Vec::new()) };
    let entries = || -> Result<Vec<PathBuf>> {
        let found = std::fs::read_dir(&folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
        let mut found: Vec<PathBuf> = found.with_context(|| format!("cannot read {}", folder.display()))?;
        found.sort();
        Ok(found)
    };
    for archive in entries()? {
        let Some(label) = archive.file_name().and_then(|name| name.to_str()?.strip_suffix(".tar.xz")) else { continue };
        let folder = archive.with_file_name(label);
        if !folder.exists() {
            unpack(&archive, &folder).with_context(|| format!("cannot unpack {}", archive.display()))?;
        }
    }
    Ok(entries()?.into_iter().filter(|path| path.is_dir()).collect())
}

/// Makes the folder that an archive holds, whole by one rename.
fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    let bytes = std::fs::read(archive)?;
    let parent = folder.parent().context("it lies nowhere")?;
    let partial = tempfile::Builder::new().suffix(".partial").tempdir_in(parent)?;
    tar::Archive::new(XzDecoder::new(&bytes[..])).unpack(partial.path())?;
    let made = partial.path().join(folder.file_name().context("it has no name")?);
    let digest: String = digest(&SHA256, &bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(made.join(STAMP), digest)?;
    match std::fs::rename(&made, folder) {
        // Another process was first.
        Err(_) if folder.exists() => Ok(()),
        done => Ok(done?),
    }
}
