//! A build script that calls the library, in directories of several kinds.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use std::process::Command;

/// Runs the build script in several kinds of directories, and checks the lines that it prints for the compiler.
#[test]
fn build_script_reports_commit_and_changes() {
    let temp_dir = tempfile::tempdir().unwrap();
    let at = |name: &str| temp_dir.path().join(name);
    let script = at("script");
    let library = concat!(env!("CARGO_MANIFEST_DIR"), "/src/lib.rs");
    let source = at("script.rs");
    let main = "fn main() { library::emit(\"trainer\", &[\"trainer/Cargo.toml\", \"trainer/src\"]); }";
    std::fs::write(&source, format!("#[path = {library:?}]\nmod library;\n{main}\n")).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(&rustc).args(["--edition=2024", "-o"]).arg(&script).arg(&source).status();
    assert!(compiled.unwrap().success());
    let run = |package: &str, named: &str| {
        let mut command = Command::new(&script);
        command.env("CARGO_MANIFEST_DIR", at(package)).env("CARGO_PKG_NAME", "trainer");
        command.env("OUT_DIR", at("target/x86/tuned/build/trainer-1/out")).env("PROFILE", "release");
        command.env("VRAMLAB_COMMIT", named).env("GIT_CEILING_DIRECTORIES", temp_dir.path());
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("cargo::rustc-env={name}=")));
            line.unwrap().to_owned()
        };
        assert_eq!(of("BUILT_WITH_PROFILE"), "tuned");
        (of("BUILT_FROM_COMMIT"), of("BUILT_FROM_DIRTY"), text)
    };
    let known = |output: (String, String, String)| (output.0, output.1);
    let unknown = (String::new(), String::new());
    std::fs::create_dir_all(at("w/trainer/src")).unwrap();
    std::fs::write(at("w/trainer/Cargo.toml"), "").unwrap();
    assert_eq!(known(run("w/trainer", "")), unknown);

    // A commit in the environment variable has priority over git, and must be a hash.
    let hash = "0123456789abcdef0123456789abcdef01234567";
    assert_eq!(known(run("w/trainer", hash)), (hash.into(), "false".into()));
    assert_eq!(known(run("w/trainer", &format!("{hash}-dirty"))), (hash.into(), "true".into()));
    assert!(run("w/trainer", "main").2.contains("cargo::error="));

    // A packed crate.
    let info = at("w/trainer/.cargo_vcs_info.json");
    for (dirty, expected) in [("", "false"), (", \"dirty\": true", "true")] {
        std::fs::write(&info, format!("{{\"git\": {{\"sha1\": \"{hash}\"{dirty}}}, \"path_in_vcs\": \"trainer\"}}"))
            .unwrap();
        assert_eq!(known(run("w/trainer", "")), (hash.into(), expected.into()));
    }
    std::fs::remove_file(&info).unwrap();

    // A checkout that is clean, has a change elsewhere, or has a change in a source; and a checkout of another project.
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env_remove("GIT_DIR").env_remove("GIT_INDEX_FILE");
        command.args(["-c", "user.name=n", "-c", "user.email=e@e", "-C"]).arg(at("w")).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    std::fs::write(at("w/trainer/src/lib.rs"), "").unwrap();
    std::fs::write(at("w/README"), "").unwrap();
    git(&["init", "--quiet"]);
    assert_eq!(known(run("w/trainer", "")), unknown, "nothing is committed yet");
    git(&["add", "."]);
    git(&["commit", "--quiet", "-m", "first"]);
    let commit = git(&["rev-parse", "HEAD"]);
    let output = run("w/trainer", "");
    assert!(output.2.contains("logs/HEAD") && output.2.contains("trainer/src"), "{}", output.2);
    assert_eq!(known(output), (commit.clone(), "false".into()));
    std::fs::write(at("w/README"), "more").unwrap();
    assert_eq!(known(run("w/trainer", "")), (commit.clone(), "false".into()));
    std::fs::write(at("w/trainer/src/lib.rs"), "// more").unwrap();
    assert_eq!(known(run("w/trainer", "")), (commit, "true".into()));

    // A source that was moved without a change of the list.
    std::fs::rename(at("w/trainer/src"), at("w/trainer/sources")).unwrap();
    assert!(run("w/trainer", "").2.contains("cargo::error=trainer/build.rs lists trainer/src, which does not exist"));
    std::fs::rename(at("w/trainer/sources"), at("w/trainer/src")).unwrap();
    git(&["mv", "trainer", "vendored"]);
    git(&["commit", "--quiet", "-am", "second"]);
    assert_eq!(known(run("w/vendored", "")), unknown);
}
