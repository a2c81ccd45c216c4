//! Where CUDA's driver is, for programs that cannot open it by its name because another library has that name.

use std::path::{Path, PathBuf};

/// The driver's file name.
pub const FILE: &str = "libcuda.so.1";

/// Directories of distributions, WSL, the container toolkit and NixOS.
const DIRECTORIES: [&str; 9] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/local/cuda/compat",
];

/// The files of that name in the order in which the dynamic linker would take them: `named` first, then `LD_LIBRARY_PATH`, the
/// linker's cache, and the usual directories. They may be for another machine. Empty where there is no driver.
#[must_use]
pub fn candidates(named: Option<&Path>) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = named.map(Path::to_owned).into_iter().collect();
    let listed = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    out.extend(
        std::env::split_paths(&listed)
            .filter(|directory| !directory.as_os_str().is_empty())
            .map(|directory| directory.join(FILE)),
    );
    out.extend(cached(&std::fs::read("/etc/ld.so.cache").unwrap_or_default()));
    out.extend(DIRECTORIES.map(|directory| Path::new(directory).join(FILE)));
    out.retain(|path| path.is_file());
    out
}

/// The paths of the driver in the dynamic linker's cache, which holds each as text with a zero byte behind it.
fn cached(cache: &[u8]) -> Vec<PathBuf> {
    let texts = cache.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    let paths =
        texts.filter(|text| text.starts_with('/') && text.strip_suffix(FILE).is_some_and(|at| at.ends_with('/')));
    paths.map(PathBuf::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_read_without_knowing_its_form() {
        let cache = b"glibc-ld.so.cache1.1\0\x01\x02\xff/lib/a/libcuda.so\0libcuda.so.1\0/lib/a/libcuda.so.1\0/lib/b/xlibcuda.so.1\0";
        assert_eq!(cached(cache), [PathBuf::from("/lib/a/libcuda.so.1")]);
    }

    #[test]
    fn a_named_file_comes_first_and_must_be_there() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(candidates(Some(file.path())).first().map(PathBuf::as_path), Some(file.path()));
        let missing = Path::new("/missing/libcuda.so.1");
        assert!(!candidates(Some(missing)).iter().any(|path| path == missing));
    }
}
