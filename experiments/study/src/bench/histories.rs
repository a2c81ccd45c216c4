//! The recorded histories whose calls are timed.

use crate::repository;
use anyhow::{Context, Result, bail};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use vramlab::histories::workload::Recorded;

/// A history and what it is called.
#[derive(Debug)]
pub(crate) struct Named {
    /// The file's name up to its first dot.
    pub(crate) name: String,
    /// Its calls.
    pub(crate) calls: Recorded,
}

/// Reads the histories that were named, or those of the sources: all in `experiments/histories`.
///
/// Without a list and without the folder there are none.
pub(crate) fn read(named: &[PathBuf]) -> Result<Vec<Named>> {
    let files = if named.is_empty() { beside_the_sources() } else { named.to_vec() };
    let mut found: Vec<Named> = Vec::new();
    for file in &files {
        let name = name_of(file);
        if name.is_empty() {
            bail!("{}: has no name that a case could have", file.display());
        }
        if found.iter().any(|other| other.name == name) {
            bail!("{}: another history is called {name} too; rename one", file.display());
        }
        let calls = Recorded::new(&doctor::read_history(file)?);
        if calls.allocations() == 0 {
            bail!("{}: there is no allocation in it", file.display());
        }
        found.push(Named { name, calls });
    }
    Ok(found)
}

/// What a case can be called: letters, digits, `-` and `_` of the file's name up to its first dot.
fn name_of(file: &Path) -> String {
    let name = file.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let stem = name.split('.').next().unwrap_or_default();
    stem.chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || "-_".contains(letter) { letter } else { '_' })
        .collect()
}

fn beside_the_sources() -> Vec<PathBuf> {
    let entries = repository::find("histories").and_then(|folder| repository::entries(&folder).ok());
    let mut files = entries.unwrap_or_default();
    files.retain(|file| file.to_string_lossy().ends_with(".pickle.xz"));
    files
}

/// Writes a history for the baseline programs: slots and streams, then a line a call (slot, stream, bytes; 0 bytes free).
pub(crate) fn write(history: &Named, folder: &Path) -> Result<PathBuf> {
    let calls = &history.calls;
    let mut text = format!("{} {}\n", calls.slots(), calls.streams());
    for call in calls.calls() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} {} {}", call.slot, call.stream, call.bytes);
    }
    let path = folder.join(format!("{}.calls", history.name));
    std::fs::write(&path, text).with_context(|| format!("{}: cannot write it", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files() {
        assert_eq!(name_of(Path::new("/a/gpt2.pickle.xz")), "gpt2");
        assert_eq!(name_of(Path::new("my run,1.pickle")), "my_run_1");
    }

    #[test]
    fn the_histories_of_the_sources_are_read_and_written() {
        let histories = read(&[]).unwrap();
        let names: Vec<&str> = histories.iter().map(|history| history.name.as_str()).collect();
        assert_eq!(names, ["gpt2", "mlp", "resnet50", "streams"]);
        let folder = tempfile::tempdir().unwrap();
        for history in &histories {
            let text = std::fs::read_to_string(write(history, folder.path()).unwrap()).unwrap();
            assert_eq!(text.lines().count(), 1 + history.calls.calls().len());
            assert_eq!(history.calls.calls().len() as u64, 2 * history.calls.allocations());
        }
    }
}
