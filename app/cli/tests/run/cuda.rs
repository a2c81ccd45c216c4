//! Programs that use CUDA without PyTorch: over a stand-in for the driver in C, which the tests of the library between build too.

use super::{process, record};
use crate::common::{PROGRAM, Place, Ran};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the stand-in and the program there; `None`, with a line, where the library between is not built.
fn build(place: &Place) -> Option<PathBuf> {
    let library = Path::new(PROGRAM).parent().unwrap().join("libvramlab_inject.so");
    if !library.is_file() {
        println!("skipped: {} is not built", library.display());
        return None;
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inject/tests/c");
    let driver = place.at("libcuda.so.1");
    let compile = |source: &str, out: &Path, flags: &[&str]| {
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-std=gnu11", "-O1", "-o"]).arg(out).arg(sources.join(source)).args(flags);
        assert!(compiler.status().unwrap().success());
    };
    compile(
        "driver.c",
        &driver,
        &["-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"],
    );
    compile("program.c", &place.at("program"), &["-ldl", "-lpthread"]);
    Some(driver)
}

/// `vramlab run` with some options and the program, which finds functions in a way and does a test.
fn run(place: &Place, driver: &Path, options: &[&str], way: &str, test: &str) -> Ran {
    let words: Vec<&str> = ["run"].iter().chain(options).chain(&["--", "./program", way, test]).copied().collect();
    let mut command = process(place, &words);
    command.env("VRAMLAB_CUDA", driver).env("LD_LIBRARY_PATH", place.at(".")).env_remove("LD_PRELOAD");
    if !options.contains(&"--alloc") {
        command.env("PLAIN", "1");
    }
    Ran::of(command.output().unwrap())
}

#[test]
#[ignore = "needs a C compiler"]
fn memory_calls_of_a_c_program_are_recorded_and_its_history_is_read() {
    let place = Place::new();
    let Some(driver) = build(&place) else { return };
    let ran = run(&place, &driver, &["-o", "out"], "address2", "loop").ok();
    assert!(ran.stdout.contains("equal"), "{ran:?}");
    assert!(ran.stderr.contains("1 process used CUDA under the driver"), "{ran:?}");
    assert!(ran.stderr.contains("400 memory calls") && ran.stderr.contains("200 x cudaMalloc (cuMemAlloc)"), "{ran:?}");
    assert!(ran.stderr.contains("run --alloc caching -- ./program address2 loop"), "{ran:?}");
    let left = record(&place, "out");
    let process = &left["cuda"][0];
    assert_eq!((&process["count"], &process["incomplete"], &process["dropped"]), (&400.into(), &0.into(), &0.into()));
    // Both blocks of a step are held at once.
    assert_eq!(process["peak_bytes"], (1 << 20) + 3000);
    let history = process["histories"][0].as_str().unwrap();
    for command in ["explain", "replay", "capacity"] {
        place.run(&[command, history]).ok();
    }
    let names = crate::common::names(&place.at("out"));
    assert!(names.iter().all(|name| !name.ends_with(".bin") && !name.ends_with(".so")), "{names:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn every_way_in_is_served_also_the_name_without_a_version() {
    let place = Place::new();
    let Some(driver) = build(&place) else { return };
    std::os::unix::fs::symlink("libcuda.so.1", place.at("libcuda.so")).unwrap();
    for way in ["dlsym", "unversioned", "address1", "address2"] {
        let ran = run(&place, &driver, &["--alloc", "caching"], way, "loop").ok();
        assert!(ran.stdout.contains("driver: alloc 1 free 0") && ran.stdout.contains("equal"), "{way}: {ran:?}");
        assert!(ran.stderr.contains("used CUDA under caching") && ran.stderr.contains("made 1 driver call"), "{ran:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn a_crash_leaves_the_calls_before_it() {
    let place = Place::new();
    let Some(driver) = build(&place) else { return };
    let ran = run(&place, &driver, &["-o", "out"], "dlsym", "crash");
    assert_eq!(ran.code, None);
    let left = record(&place, "out");
    assert_eq!((&left["signal"], &left["cuda"][0]["count"]), (&libc::SIGABRT.into(), &40.into()));
}

#[test]
#[ignore = "needs a C compiler"]
fn a_static_program_runs_unchanged_and_the_reason_is_said() {
    let place = Place::new();
    let Some(driver) = build(&place) else { return };
    let source = place.file("static.c", "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 3; }\n");
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    if !compiler.args(["-static", "-o"]).arg(place.at("static")).arg(source).status().unwrap().success() {
        println!("skipped: this machine has no static C library");
        return;
    }
    let mut command = process(&place, &["run", "--", "./static"]);
    let ran = Ran::of(command.env("VRAMLAB_CUDA", driver).output().unwrap());
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), "ran\n"));
    assert!(ran.stderr.contains("./static is linked statically"), "{ran:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn libraries_that_are_loaded_in_front_already_stay() {
    let place = Place::new();
    let Some(driver) = build(&place) else { return };
    let mut command = process(&place, &["run", "--", "sh", "-c", "echo $LD_PRELOAD"]);
    command.env("VRAMLAB_CUDA", &driver).env("LD_PRELOAD", &driver);
    let ran = Ran::of(command.output().unwrap()).ok();
    let line = ran.stdout.lines().next().unwrap();
    assert!(line.contains("libvramlab_inject.so:") && line.ends_with(&format!(":{}", driver.display())), "{line}");
    assert!(ran.stderr.contains("LD_PRELOAD has libcuda, which takes CUDA's functions too"), "{ran:?}");
}

#[test]
fn an_option_for_the_driver_is_refused_where_there_is_none() {
    let place = Place::new();
    let missing = place.at("missing");
    for option in ["--at-driver", "--poison", "--free=waits"] {
        let mut command = process(&place, &["run", option, "--", "true"]);
        let ran = Ran::of(command.env("VRAMLAB_CUDA", &missing).output().unwrap());
        if ran.code == Some(0) {
            println!("skipped: this machine has a CUDA driver");
            return;
        }
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains("libcuda.so.1 was not found") || ran.stderr.contains("neither next to"), "{ran:?}");
    }
}
