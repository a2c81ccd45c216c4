//! The committed header is what the sources say, and a C program that calls every function is built against it with the
//! machine's C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library. Cargo builds none for tests, which cannot link it. It is built of what the tests of the workspace are built of: alone
/// it would have features of its own, and nearly everything would be compiled again. An example is what asks for the features of tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test should know its file");
    // The test lies in `target/PROFILE/deps`.
    let folder = test.ancestors().nth(2).expect("a test should lie in target/PROFILE/deps");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--locked", "--workspace", "--lib", "--example", "time_kernels", "--target-dir"])
        .arg(folder.parent().expect("a profile should lie in a target folder"));
    // What Cargo tells a test of its package is none of another build's: `ring` is built anew where that differs.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_MANIFEST_", "CARGO_PKG_"].iter().any(|of| name.to_string_lossy().starts_with(of)) {
            cargo.env_remove(name);
        }
    }
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("Cargo should run").success());
    folder.join("libvramlab.so")
}

#[test]
fn a_c_program_calls_every_function() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("api");
    let library = library();
    assert!(library.exists(), "{} is missing", library.display());
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compiler.args(["-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    compiler.arg("-I").arg(folder.join("include")).arg(folder.join("tests/api.c"));
    compiler.arg(&library).arg("-o").arg(&program);
    assert!(compiler.status().expect("a C compiler should be there, as building needs one").success());
    let mut run = Command::new(&program);
    run.arg(scratch.path()).env("LD_LIBRARY_PATH", library.parent().unwrap());
    let output = run.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(said.contains("every function"), "{said}");
}

#[test]
fn the_header_declares_what_the_c_program_calls() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let (header, program) = (read("include/vramlab.h"), read("tests/api.c"));
    let functions: Vec<&str> = header
        .match_indices("vramlab_")
        .map(|(at, _)| header[at..].split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default())
        .filter(|name| header.contains(&format!(" {name}(")) || header.contains(&format!("*{name}(")))
        .collect();
    assert!(functions.len() > 30, "{functions:?}");
    for name in functions {
        assert!(program.contains(&format!("{name}(")), "the C program does not call {name}");
    }
}

#[test]
fn the_header_is_what_the_source_says() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = folder.join("include/vramlab.h");
    let mut made = Vec::new();
    cbindgen::generate(folder).expect("the sources should make a header").write(&mut made);
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&header, &made).unwrap();
    }
    let written = std::fs::read(&header).unwrap_or_default();
    assert!(written == made, "{} is not current: run UPDATE_HEADER=1 cargo test -p vramlab-capi", header.display());
}
