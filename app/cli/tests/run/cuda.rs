//! Programs that use CUDA without PyTorch: over a stand-in for the driver in C, which the tests of the library between build too.

use super::{Live, process, record};
use crate::common::{PROGRAM, Ran, TestDir};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Builds the stand-in and the program there; `None`, with a line, where the library between is not built.
fn build(test_dir: &TestDir) -> Option<PathBuf> {
    let library = Path::new(PROGRAM).parent().unwrap().join("libvramlab_inject.so");
    if !library.is_file() {
        println!("skipped: {} is not built", library.display());
        return None;
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inject/tests/c");
    let driver = test_dir.at("libcuda.so.1");
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
    compile("program.c", &test_dir.at("program"), &["-ldl", "-lpthread"]);
    Some(driver)
}

/// `vramlab run` with some options and the program, which finds functions in a way and does a test.
fn run(test_dir: &TestDir, driver: &Path, options: &[&str], way: &str, test: &str) -> Ran {
    let words: Vec<&str> = ["run"].iter().chain(options).chain(&["--", "./program", way, test]).copied().collect();
    let mut command = process(test_dir, &words);
    command.env("VRAMLAB_CUDA", driver).env("LD_LIBRARY_PATH", test_dir.at(".")).env_remove("LD_PRELOAD");
    if !options.contains(&"--alloc") {
        command.env("PLAIN", "1");
    }
    Ran::of(command.output().unwrap())
}

#[test]
#[ignore = "needs a C compiler"]
fn memory_calls_of_a_c_program_are_recorded_and_read() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let ran = run(&test_dir, &driver, &["-o", "out"], "address2", "loop").ok();
    assert!(ran.stdout.contains("equal"), "{ran:?}");
    assert!(ran.stderr.contains("1 process used CUDA under the driver"), "{ran:?}");
    assert!(ran.stderr.contains("400 memory calls") && ran.stderr.contains("200 x cudaMalloc (cuMemAlloc)"), "{ran:?}");
    assert!(ran.stderr.contains("run --alloc caching -- ./program address2 loop"), "{ran:?}");
    let left = record(&test_dir, "out");
    let process = &left["cuda"][0];
    assert_eq!((&process["count"], &process["incomplete"], &process["dropped"]), (&400.into(), &0.into(), &0.into()));
    // Both blocks of a step are held at once.
    assert_eq!(process["peak_bytes"], (1 << 20) + 3000);
    let history = process["histories"][0].as_str().unwrap();
    for command in ["explain", "replay", "capacity"] {
        test_dir.run(&[command, history]).ok();
    }
    let names = crate::common::names(&test_dir.at("out"));
    assert!(names.iter().all(|name| !name.ends_with(".bin") && !name.ends_with(".so")), "{names:?}");
}

/// The record of a program that has ended is the run's own until that ends.
#[test]
#[ignore = "needs a C compiler"]
fn runs_that_share_a_folder_read_their_own_calls() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let script = "./program dlsym loop; echo ready; read line";
    let mut first = process(&test_dir, &["run", "-o", "out", "--", "sh", "-c", script]);
    first.env("VRAMLAB_CUDA", &driver).env("LD_LIBRARY_PATH", test_dir.at(".")).env("PLAIN", "1").stdin(Stdio::piped());
    let mut first = Live::start(first);
    while first.line() != "ready" {}
    run(&test_dir, &driver, &["-o", "out"], "dlsym", "loop").ok();
    drop(first.child.stdin.take());
    assert_eq!(first.end().0.code(), Some(1), "of `read`, whose input ends");
    for name in ["program.json", "program-2.json"] {
        let left: Value =
            serde_json::from_str(&std::fs::read_to_string(test_dir.at("out").join(name)).unwrap()).unwrap();
        assert_eq!((left["cuda"].as_array().unwrap().len(), &left["cuda"][0]["count"]), (1, &json!(400)), "{name}");
    }
    let names = crate::common::names(&test_dir.at("out"));
    assert!(names.iter().all(|name| name.ends_with(".json") || name.ends_with(".jsonl")), "{names:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn any_folder_can_be_named() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    for name in ["a space", "a:colon", "a\nnewline"] {
        run(&test_dir, &driver, &["-o", name], "unversioned", "loop").ok();
        assert_eq!(record(&test_dir, name)["cuda"][0]["count"], 400, "{name:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn every_way_in_is_served_also_the_name_without_a_version() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    std::os::unix::fs::symlink("libcuda.so.1", test_dir.at("libcuda.so")).unwrap();
    for way in ["dlsym", "unversioned", "address1", "address2"] {
        let ran = run(&test_dir, &driver, &["--alloc", "caching"], way, "loop").ok();
        assert!(ran.stdout.contains("driver: alloc 1 free 0") && ran.stdout.contains("equal"), "{way}: {ran:?}");
        assert!(ran.stderr.contains("used CUDA under caching") && ran.stderr.contains("made 1 driver call"), "{ran:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn a_crash_leaves_the_calls_before_it() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let ran = run(&test_dir, &driver, &["-o", "out"], "dlsym", "crash");
    assert_eq!(ran.code, None);
    let left = record(&test_dir, "out");
    assert_eq!((&left["signal"], &left["cuda"][0]["count"]), (&libc::SIGABRT.into(), &40.into()));
}

#[test]
#[ignore = "needs a C compiler"]
fn a_static_program_runs_unchanged_and_the_reason_is_said() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let source = test_dir.file("static.c", "#include <stdio.h>\nint main(void) { puts(\"ran\"); return 3; }\n");
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    if !compiler.args(["-static", "-o"]).arg(test_dir.at("static")).arg(source).status().unwrap().success() {
        println!("skipped: this machine has no static C library");
        return;
    }
    let mut command = process(&test_dir, &["run", "--", "./static"]);
    let ran = Ran::of(command.env("VRAMLAB_CUDA", driver).output().unwrap());
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), "ran\n"));
    assert!(ran.stderr.contains("./static is linked statically"), "{ran:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn managed_and_pinned_memory_is_kept_on_request() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let words = [
        "run",
        "--alloc",
        "caching",
        "--free",
        "waits",
        "--pool",
        "managed,pinned",
        "--",
        "./program",
        "dlsym",
        "kinds",
    ];
    let mut command = process(&test_dir, &words);
    command
        .env("VRAMLAB_CUDA", &driver)
        .env("LD_LIBRARY_PATH", test_dir.at("."))
        .env("POOLED", "1")
        .env_remove("LD_PRELOAD");
    let ran = Ran::of(command.output().unwrap()).ok();
    assert!(ran.stdout.contains("equal") && ran.stdout.contains("managed 2 pinned 2"), "{ran:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn pinned_calls_are_recorded_and_replayed() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let ran = run(&test_dir, &driver, &["-o", "out"], "dlsym", "kinds").ok();
    assert!(ran.stderr.contains("host memory: 8 KiB pinned at most"), "{ran:?}");
    let left = record(&test_dir, "out");
    let pinned = &left["cuda"][0]["pinned"];
    assert_eq!((&pinned["peak_bytes"], &pinned["left_bytes"]), (&8192.into(), &0.into()), "{pinned}");
    let allocations = pinned["allocations"].as_u64().unwrap();
    assert!(left["host"]["samples"].as_u64().unwrap() > 0, "{}", left["host"]);
    let history = pinned["history"].as_str().unwrap();
    let replayed = test_dir.run(&["replay", "--host", "--json", history]).ok().stdout;
    let rows: serde_json::Value = serde_json::from_str(&replayed).unwrap();
    let [pytorch, exact, ..] = rows.as_array().unwrap().as_slice() else { panic!("{rows}") };
    assert_eq!((&pytorch["allocations"], &pytorch["pin_calls"]), (&allocations.into(), &2.into()));
    assert_eq!((&pytorch["peak_live_bytes"], &exact["failed_allocations"]), (&8192.into(), &0.into()));
}

#[test]
#[ignore = "needs a C compiler"]
fn memory_that_nccl_allocates_has_a_line_of_its_own() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let shared: &[&str] = &["-shared", "-fPIC"];
    for (source, out, flags) in [("nccl.c", "libnccl.so.2", shared), ("rank.c", "rank", &[])] {
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-std=gnu11", "-O1", "-Wall", "-o"]).arg(test_dir.at(out)).arg(sources.join(source)).args(flags);
        assert!(compiler.arg("-ldl").status().unwrap().success());
    }
    for (mapped, stacks, expected) in [("1", "on", Some(())), ("0", "on", Some(())), ("1", "off", None)] {
        let out = format!("out-{mapped}-{stacks}");
        let mut command = process(&test_dir, &["run", "-o", &out, "--stacks", stacks, "--", "./rank"]);
        command.env("VRAMLAB_CUDA", &driver).env("LD_LIBRARY_PATH", test_dir.at("."));
        command.env("NCCL_CUMEM_ENABLE", mapped).env_remove("LD_PRELOAD");
        let ran = Ran::of(command.output().unwrap()).ok();
        assert!(ran.stdout.contains("joined"), "{ran:?}");
        let nccl = &record(&test_dir, &out)["cuda"][0]["nccl"];
        let line = ran.stderr.contains("NCCL: 16 MiB of device memory at most, in 4 allocations");
        assert_eq!(line, expected.is_some(), "{ran:?}");
        // Neither the program's memory, nor that of ncclMemAlloc, nor pages of the host.
        let counted = json!({"peak_bytes": 16 << 20, "left_bytes": 8 << 20, "allocations": 4});
        assert_eq!(*nccl, expected.map_or(Value::Null, |()| counted));
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn scripts_and_pipelines_are_observed_through_their_programs() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    test_dir.program("script.sh", "#!/bin/sh\n./program dlsym loop\n");
    for command in [&["./script.sh"][..], &["sh", "-c", "./program dlsym loop | cat"]] {
        let words: Vec<&str> = ["run", "--alloc", "caching", "--"].iter().chain(command).copied().collect();
        let mut run = process(&test_dir, &words);
        run.env("VRAMLAB_CUDA", &driver).env("LD_LIBRARY_PATH", test_dir.at(".")).env_remove("LD_PRELOAD");
        let ran = Ran::of(run.output().unwrap()).ok();
        assert!(ran.stdout.contains("equal") && ran.stderr.contains("1 process used CUDA under caching"), "{ran:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn a_limit_on_addresses_shortens_the_record() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let mut command = process(&test_dir, &["run", "--", "sh", "-c", "ulimit -v 1000000; ./program dlsym loop"]);
    command
        .env("VRAMLAB_CUDA", &driver)
        .env("LD_LIBRARY_PATH", test_dir.at("."))
        .env("PLAIN", "1")
        .env_remove("LD_PRELOAD");
    let ran = Ran::of(command.output().unwrap()).ok();
    assert!(ran.stdout.contains("equal") && ran.stderr.contains("400 memory calls"), "{ran:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn the_place_of_a_wait_and_the_kernel_before_it_are_named() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    // With lines.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../inject/tests/c/program.c");
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    let compiler = compiler.args(["-std=gnu11", "-O0", "-g", "-o"]).arg(test_dir.at("program")).arg(&source);
    assert!(compiler.args(["-ldl", "-lpthread"]).status().unwrap().success());
    let text = std::fs::read_to_string(&source).unwrap();
    let line = 1 + text.lines().position(|line| line.contains("CHECK(cuMemFree(y) == 0);")).unwrap();
    let words = ["run", "--no-advise", "-o", "out", "--", "./program", "dlsym", "loop"];
    let mut command = process(&test_dir, &words);
    command
        .env("VRAMLAB_CUDA", &driver)
        .env("LD_LIBRARY_PATH", test_dir.at("."))
        .env("PLAIN", "1")
        .env_remove("LD_PRELOAD");
    command.env("DRIVER_WORK", "1").env("DRIVER_NAP", "300");
    let ran = Ran::of(command.output().unwrap()).ok();
    let wait = format!("most in cudaFree (cuMemFree) at program.c:{line}, behind gemm;");
    assert!(ran.stderr.contains(&wait), "{wait}: {ran:?}");
    let left = record(&test_dir, "out");
    let site = &left["cuda"][0]["sites"][0];
    assert_eq!((&site["site"], &site["behind"]), (&format!("program.c:{line}").into(), &"gemm".into()));
    // The history has the frames once for each stack, without what starts a program.
    let history = left["cuda"][0]["histories"][0].as_str().unwrap();
    let text = std::fs::read_to_string(test_dir.at(history)).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let with_frames: Vec<_> = lines.iter().filter(|line| line.get("frames").is_some()).collect();
    assert_eq!(with_frames.len(), 4, "{with_frames:?}");
    for line in with_frames {
        let names: Vec<_> = line["frames"].as_array().unwrap().iter().map(|frame| frame["name"].as_str()).collect();
        assert_eq!(names, [Some("loop"), Some("main")]);
    }
    let free = lines.iter().find(|line| line["action"] == "free_requested").unwrap();
    assert_eq!((&free["behind"], free["stack"].is_u64()), (&"_Z4gemmPfi".into(), true));
    test_dir.run(&["explain", history]).ok();
    let off = ["run", "--no-advise", "--stacks", "off", "-o", "off", "--", "./program", "dlsym", "loop"];
    let mut command = process(&test_dir, &off);
    command
        .env("VRAMLAB_CUDA", &driver)
        .env("LD_LIBRARY_PATH", test_dir.at("."))
        .env("PLAIN", "1")
        .env_remove("LD_PRELOAD");
    Ran::of(command.output().unwrap()).ok();
    assert_eq!(record(&test_dir, "off")["cuda"][0]["sites"][0]["site"], serde_json::Value::Null);
}

#[test]
#[ignore = "needs a C compiler"]
fn libraries_that_are_loaded_in_front_already_stay() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let mut command = process(&test_dir, &["run", "--", "sh", "-c", "echo $LD_PRELOAD"]);
    command.env("VRAMLAB_CUDA", &driver).env("LD_PRELOAD", &driver);
    let ran = Ran::of(command.output().unwrap()).ok();
    let line = ran.stdout.lines().next().unwrap();
    assert!(line.contains("libvramlab_inject.so:") && line.ends_with(&format!(":{}", driver.display())), "{line}");
    assert!(ran.stderr.contains("LD_PRELOAD has libcuda, which takes CUDA's functions too"), "{ran:?}");
}

#[test]
fn an_option_for_the_driver_is_refused_where_there_is_none() {
    let test_dir = TestDir::new();
    let missing = test_dir.at("missing");
    for option in ["--at-driver", "--poison", "--free=waits", "--pool=managed,pinned", "--host-alloc=host-exact"] {
        let mut command = process(&test_dir, &["run", option, "--", "true"]);
        let ran = Ran::of(command.env("VRAMLAB_CUDA", &missing).output().unwrap());
        if ran.code == Some(0) {
            println!("skipped: this machine has a CUDA driver");
            return;
        }
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains("libcuda.so.1 was not found") || ran.stderr.contains("neither next to"), "{ran:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn pinned_memory_is_served_and_its_bytes_are_said() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let ran = run(&test_dir, &driver, &["--host-alloc", "host-exact", "-o", "out"], "dlsym", "kinds").ok();
    assert!(ran.stdout.contains("equal") && ran.stdout.contains("pinned 2 unpinned 0"), "{ran:?}");
    let line =
        "8 KiB requested at most in 100 cudaMallocHost, 100 served from 4 MiB reserved at most in 2 driver calls";
    assert!(ran.stderr.contains(line), "{ran:?}");
    let process = &record(&test_dir, "out")["cuda"][0];
    assert!(process["allocator"].is_null(), "memory of the GPU is the driver's: {process}");
    let pinned = &process["pinned"];
    assert_eq!((&pinned["peak_bytes"], &pinned["allocator"]["reserved_peak_bytes"]), (&8192.into(), &(4 << 20).into()));
}

#[test]
fn wrong_allocators_of_pinned_memory_are_bad_input() {
    let test_dir = TestDir::new();
    let wrong: [(&[&str], &str); 6] = [
        (&["--host-alloc", "caching"], "caching"),
        (&["--host-alloc", "host-exacd"], "host-exact"),
        (&["--host-alloc", "host-exact:keep_idle=2"], "keep_idle"),
        (&["--host-alloc", "host-exact,host-cupy"], "name one allocator"),
        (&["--host-alloc", "host-exact", "--free", "driver"], "--free ordered"),
        (&["--host-alloc", "host-exact", "--pool", "pinned"], "leave one of them out"),
    ];
    for (options, why) in wrong {
        let words = [&["run"], options, &["--", "true"]].concat();
        let ran = Ran::of(process(&test_dir, &words).output().unwrap());
        assert_eq!(ran.code, Some(2), "{options:?}: {ran:?}");
        assert!(ran.stderr.contains(why), "{options:?}: {ran:?}");
    }
}

#[test]
#[ignore = "needs a C compiler"]
fn the_three_ways_to_free_are_compared() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    let tried = |options: &[&str], test: &str| {
        let words = [&["try"], options, &["--", "./program", "dlsym", test]].concat();
        let mut command = process(&test_dir, &words);
        command.env("VRAMLAB_CUDA", &driver).env("LD_LIBRARY_PATH", test_dir.at(".")).env_remove("LD_PRELOAD");
        Ran::of(command.env("QUIET", "1").output().unwrap())
    };
    let found = tried(&["--rounds", "2", "--json", "--alloc", "caching", "--alloc", "naive"], "loop").ok().json();
    let runs = found["runs"].as_array().unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run["name"].as_str().unwrap()).collect();
    let expected = ["unchanged", "driver", "caching waits", "caching ordered", "naive waits", "naive ordered"];
    assert_eq!(names, expected);
    for run in runs {
        assert_eq!((run["wall_s"].as_array().unwrap().len(), &run["equal"]), (2, &true.into()), "{run}");
    }
    let calls = |at: usize| runs[at]["memory"]["driver_calls"].as_u64();
    assert_eq!([calls(0), calls(1), calls(2), calls(3), calls(5)], [None, Some(400), Some(1), Some(1), Some(400)]);
    let parts = &found["parts"][0];
    let sum: f64 = ["driver_work_s", "waiting_s", "remainder_s"].iter().map(|part| parts[part].as_f64().unwrap()).sum();
    assert!((sum - runs[1]["median_s"].as_f64().unwrap()).abs() < 1e-9, "{found}");
    let page = tried(&["--rounds", "1", "--output", "out"], "loop").ok();
    for words in ["unchanged", "caching, waits", "caching, ordered", "of it waiting", "equal", "run --alloc caching"] {
        assert!(page.stdout.contains(words), "{words}: {page:?}");
    }
    assert!(!page.stdout.contains("DIFFERENT"), "{page:?}");
}

#[test]
#[ignore = "needs a C compiler"]
fn an_output_that_an_allocator_changes_is_said() {
    let test_dir = TestDir::new();
    let Some(driver) = build(&test_dir) else { return };
    // It prints how often it called the driver, which an allocator changes.
    let mut command = process(&test_dir, &["try", "--rounds", "2", "--", "./program", "dlsym", "loop"]);
    command.env("VRAMLAB_CUDA", &driver).env("LD_LIBRARY_PATH", test_dir.at(".")).env_remove("LD_PRELOAD");
    let ran = Ran::of(command.output().unwrap()).ok();
    assert!(
        ran.stdout.contains("caching, ordered differs from the unchanged program: line 1 of the output"),
        "{ran:?}"
    );
    assert!(ran.stdout.contains("DIFFERENT"), "{ran:?}");
}
