//! Where the folders of `experiments/` lie: specs, histories, baselines, results.

use std::path::{Path, PathBuf};

/// A file or folder of `experiments/`, if it is there: below the current directory, else where this program was built from.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [Some(Path::new("experiments")), own.parent()];
    folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.exists())
}
