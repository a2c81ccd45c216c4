//! The version that a program is built from: the commit, whether its sources differ from it, and the profile.
//!
//! A build script calls [`emit`], which sets environment variables that `terminal::built!` reads. An unknown value, for example
//! outside of a checkout, is empty and is omitted from the records.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Sources of all programs: the library and the terminal. A build script adds its own.
pub const SHARED: [&str; 8] = [
    "Cargo.toml",
    "Cargo.lock",
    "allocators/Cargo.toml",
    "allocators/src",
    "allocators/device",
    "allocators/policies",
    "allocators/histories",
    "app/terminal/src",
];

/// Environment variable with the commit of sources outside of a checkout: a hash, followed by `-dirty` if they differ from it.
const NAMED: &str = "VRAMLAB_COMMIT";

/// Commit, and whether the sources differ from it.
#[derive(Default)]
struct Version {
    commit: String,
    dirty: Option<bool>,
}

/// Sets `BUILT_FROM_COMMIT`, `BUILT_FROM_DIRTY` and `BUILT_WITH_PROFILE` for the crate whose build script calls it.
///
/// `package` is the directory of the crate and `sources` are the files and directories that the program is built from, all relative
/// to the workspace. In a checkout each of them must exist: a source that moved would otherwise count as unchanged.
pub fn emit(package: &str, sources: &[&str]) {
    let manifest_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let above = Path::new(package).components().count();
    let workspace = manifest_dir.ancestors().nth(above).unwrap_or(&manifest_dir).to_owned();
    // A path that does not exist would make Cargo run the script each time.
    let (existing, missing): (Vec<&str>, Vec<&str>) = sources.iter().partition(|name| workspace.join(name).exists());
    existing.iter().for_each(|name| println!("cargo::rerun-if-changed={}", workspace.join(name).display()));
    println!("cargo::rerun-if-env-changed={NAMED}");

    let version = match std::env::var(NAMED) {
        Ok(text) if !text.is_empty() => named(&text),
        _ => packaged(&manifest_dir)
            .or_else(|| of_checkout(&manifest_dir, package, &existing, &missing))
            .unwrap_or_default(),
    };
    println!("cargo::rustc-env=BUILT_FROM_COMMIT={}", version.commit);
    println!("cargo::rustc-env=BUILT_FROM_DIRTY={}", version.dirty.map_or(String::new(), |dirty| dirty.to_string()));
    println!("cargo::rustc-env=BUILT_WITH_PROFILE={}", profile());
}

/// The value of an environment variable that Cargo sets.
fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// The profile's name. `PROFILE` is only `debug` or `release`; the name is a directory in `OUT_DIR`.
fn profile() -> String {
    let out = PathBuf::from(variable("OUT_DIR"));
    let parts: Vec<String> = out.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let build = parts.iter().rposition(|part| part == "build");
    let name = build.and_then(|at| parts.get(at.checked_sub(1)?).cloned()).unwrap_or_else(|| variable("PROFILE"));
    if name == "debug" { "dev".to_owned() } else { name }
}

fn is_hash(text: &str) -> bool {
    [40, 64].contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn named(text: &str) -> Version {
    let (commit, dirty) = text.strip_suffix("-dirty").map_or((text, false), |commit| (commit, true));
    if !is_hash(commit) {
        println!("cargo::error={NAMED} is not a commit; set the full hash, followed by -dirty if the sources differ");
    }
    Version { commit: commit.to_owned(), dirty: Some(dirty) }
}

/// The version of a packed crate: Cargo records the commit in it.
fn packaged(manifest_dir: &Path) -> Option<Version> {
    let text = std::fs::read_to_string(manifest_dir.join(".cargo_vcs_info.json")).ok()?;
    let after = text.split_once("\"sha1\"")?.1;
    let commit = after.split('"').nth(1).filter(|commit| is_hash(commit))?;
    let dirty =
        text.split_once("\"dirty\"").is_some_and(|(_, after)| after.trim_start_matches([':', ' ']).starts_with("true"));
    Some(Version { commit: commit.to_owned(), dirty: Some(dirty) })
}

/// The version of a checkout of this project. A checkout of another project that contains these files gives none.
fn of_checkout(manifest_dir: &Path, package: &str, sources: &[&str], missing: &[&str]) -> Option<Version> {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        // A git hook sets these for another directory.
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
            command.env_remove(name);
        }
        let output = command.arg("--no-optional-locks").arg("-C").arg(manifest_dir).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    };
    let manifest = git(&["ls-files", "--full-name", "--error-unmatch", "Cargo.toml"])?;
    if manifest != format!("{package}/Cargo.toml") {
        return None;
    }
    for name in missing {
        println!("cargo::error={package}/build.rs lists {name}, which does not exist: correct the list");
    }
    // Another commit requires a new run; the last two paths do not exist without a branch.
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]).unwrap_or_default();
    for name in ["HEAD", "logs/HEAD", &branch] {
        let path = git(&["rev-parse", "--git-path", name]).map(|path| manifest_dir.join(path));
        if let Some(path) = path.filter(|path| !name.is_empty() && path.exists()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    let commit = git(&["rev-parse", "--verify", "HEAD"]).filter(|commit| is_hash(commit))?;
    let mut status = vec!["status", "--porcelain", "--untracked-files=no", "--"];
    let above: Vec<String> = sources.iter().map(|name| format!(":/{name}")).collect();
    status.extend(above.iter().map(String::as_str));
    Some(Version { commit, dirty: git(&status).map(|changed| !changed.is_empty()) })
}
