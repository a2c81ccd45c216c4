//! Parts that killed programs left.
//!
//! A program locks its part as long as it writes it, and the system unlocks it when the program ends, however it ends. On a file
//! system without locks no part is known to be abandoned.

use super::{END, RANDOM, folder, not_followed, prefix};
use fs4::{FileExt, TryLockError};
use std::fs::{self, File, OpenOptions};
use std::path::Path;

/// Removes the parts of files and directories of the name `path` that no program writes any more. Of long names only the first 32
/// characters count.
pub fn remove_abandoned(path: &Path) {
    let prefix = prefix(path);
    let is_part = |name: &str| {
        let random = name.strip_prefix(&*prefix).and_then(|name| name.strip_suffix(END));
        random.is_some_and(|random| random.len() == RANDOM && random.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    };
    for entry in fs::read_dir(folder(path)).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(is_part) {
            continue;
        }
        let (part, kind) = (entry.path(), entry.file_type());
        let Ok(open) = not_followed(OpenOptions::new().read(true)).open(&part) else { continue };
        if FileExt::try_lock(&open).is_err() {
            continue;
        }
        // If removing fails, the only effect is a leftover.
        let _ = match kind {
            Ok(kind) if kind.is_dir() => fs::remove_dir_all(&part),
            Ok(kind) if kind.is_file() => fs::remove_file(&part),
            _ => Ok(()),
        };
    }
}

/// Locks a new part, open as `file`; returns whether it may be written. If not, another program has just found it unlocked, and
/// removes it.
pub(super) fn claim(file: &File, part: &Path) -> bool {
    !matches!(FileExt::try_lock(file), Err(TryLockError::WouldBlock)) && part.exists()
}
