//! The committed header matches the sources, and programs in C and C++ that are built against it with the machine's compilers
//! behave as it promises.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The library. Cargo does not build it for tests, which cannot link it. It is built with the features of the workspace's tests:
/// with features of its own nearly everything would be compiled again. The example requests the features of tests.
/// `VRAMLAB_LIBRARY` names a library that is already built, as for the package for Python.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| std::env::var_os("VRAMLAB_LIBRARY").map_or_else(build_library, PathBuf::from))
}

fn build_library() -> PathBuf {
    let test = std::env::current_exe().expect("a test should know its file");
    // The test is in `target/PROFILE/deps`.
    let folder = test.ancestors().nth(2).expect("a test should lie in target/PROFILE/deps");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--locked", "--workspace", "--lib", "--example", "time_kernels", "--target-dir"])
        .arg(folder.parent().expect("a profile should lie in a target folder"));
    // Cargo sets these for a test's package only: `ring` is built again where they differ.
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

/// Every allocator that needs no file.
fn allocators() -> Vec<&'static str> {
    vramlab_policies::backends::all().into_iter().map(|backend| backend.name).filter(|name| *name != "plan").collect()
}

/// Builds a program of this folder and runs it with some arguments. It must succeed and print `last`.
fn run(source: &str, arguments: &[&str], last: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir().expect("a temporary folder should be there");
    let program = scratch.path().join("program");
    let library = library();
    assert!(library.exists(), "{} is missing", library.display());
    let is_cpp = source.ends_with(".cpp");
    let (variable, compiler, standard) = if is_cpp { ("CXX", "c++", "-std=c++17") } else { ("CC", "cc", "-std=c11") };
    let mut compiler = Command::new(std::env::var_os(variable).unwrap_or_else(|| compiler.into()));
    compiler.args([standard, "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    compiler.arg("-I").arg(folder.join("include")).arg(folder.join("tests").join(source));
    compiler.arg(library).arg("-o").arg(&program);
    assert!(compiler.status().expect("a compiler should be there, as building needs one").success());
    let mut run = Command::new(&program);
    let scratch = scratch.path().to_str().expect("a temporary folder should have a plain name");
    run.args(arguments.iter().map(|argument| if *argument == "SCRATCH" { scratch } else { argument }));
    let beside = library.parent().expect("the library should lie in a folder");
    let output = run.env("LD_LIBRARY_PATH", beside).output().expect("what was built should run");
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{source} {arguments:?}: {}: {printed}", output.status);
    assert!(printed.contains(last), "{source}: {printed}");
}

#[test]
fn a_c_program_calls_every_function() {
    run("api.c", &["SCRATCH"], "every function");
}

#[test]
fn segment_events_come_in_order_on_the_thread_that_causes_them() {
    run("events.c", &allocators(), "in order");
}

#[test]
fn a_restore_that_fails_changes_nothing() {
    run("restores.c", &allocators(), "changed nothing");
}

#[test]
fn no_free_fails_beside_a_stream_that_goes() {
    run("streams.c", &allocators(), "no free failed");
}

#[test]
fn calls_late_in_the_life_of_a_process_are_answered() {
    for allocator in ["caching", "remap"] {
        for moment in ["thread", "main", "first"] {
            run("late.c", &[moment, "SCRATCH", allocator], "late calls");
        }
    }
}

#[test]
fn callbacks_call_back_replace_each_other_and_leave() {
    run("callbacks.c", &allocators(), "what they may");
}

#[test]
#[ignore = "needs a C++ compiler"]
fn an_exception_of_a_callback_reaches_the_caller() {
    run("throws.cpp", &allocators(), "exceptions");
}

#[test]
fn limits_that_are_set_are_held() {
    run("limits.c", &allocators(), "held");
}

#[test]
fn readers_see_one_moment_and_lose_no_record() {
    let arguments: Vec<&str> = ["SCRATCH"].into_iter().chain(allocators()).collect();
    run("readers.c", &arguments, "one moment");
}

#[test]
fn the_header_declares_what_the_c_program_calls() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let header = read("include/vramlab.h");
    let program = read("tests/api.c") + &read("tests/check.h");
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
