//! `experiments register` over stand-ins for the CUDA driver and NCCL: each rank is a process, and how a registration ends is chosen.

use crate::common::{TestDir, json_at};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Compiles both stand-ins into a directory.
fn stand_ins(folder: &Path) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    for (source, file) in [("cuda.c", "libcuda.so.1"), ("nccl.c", "libnccl.so.2")] {
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-shared", "-fPIC", "-w", "-O1", "-o"]).arg(folder.join(file)).arg(sources.join(source));
        assert!(compiler.status().unwrap().success(), "{source}");
    }
    std::fs::copy(folder.join("libcuda.so.1"), folder.join("libcuda.so")).unwrap();
}

/// The record of a small measurement in which registration ends so, and what was printed.
fn register(test_dir: &TestDir, ends: &str, more: &[&str]) -> (Value, String) {
    let folder = test_dir.at("stand-ins");
    if !folder.exists() {
        std::fs::create_dir(&folder).unwrap();
        stand_ins(&folder);
    }
    let output = Command::new(env!("CARGO_BIN_EXE_experiments"))
        .args(["register", "--sizes", "4K,64K", "--source", "stand-ins", "-o"])
        .arg(test_dir.at("register.json"))
        .args(more)
        .env("LD_LIBRARY_PATH", &folder)
        .env("VRAMLAB_NCCL", folder.join("libnccl.so.2"))
        .env("STAND_IN_REGISTER", ends)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (json_at(&test_dir.at("register.json")), String::from_utf8_lossy(&output.stdout).into_owned())
}

fn registrations(record: &Value) -> &Vec<Value> {
    record["kinds"][0]["measurement"]["registrations"].as_array().unwrap()
}

#[test]
#[ignore = "needs a C compiler and Linux"]
fn every_kind_is_measured_eager_and_in_graphs() {
    let test_dir = TestDir::new();
    let (record, page) = register(&test_dir, "", &[]);
    let kinds = record["kinds"].as_array().unwrap();
    assert_eq!(kinds.len(), 8);
    for kind in kinds {
        let measured = &kind["measurement"];
        assert!(kind["error"].is_null() && measured["registrations"][1]["registered"] == true, "{kind}");
        assert_eq!(measured["registrations"][1]["correct"], true, "{kind}");
        // Two modes, three collectives, two sizes, two launches; this NCCL has no windows.
        let times = measured["times"].as_array().unwrap();
        assert_eq!(times.len(), 2 * 3 * 2 * 2, "{kind}");
        assert!(times.iter().all(|time| (time["launch"] == "graph") == (time["blocks"] == 24)), "{kind}");
    }
    let counts: Vec<&Value> =
        record["communicators"]["memory"].as_array().unwrap().iter().map(|row| &row["counted_bytes"]).collect();
    assert_eq!(counts, [1 << 20, 2 << 20, 4 << 20, 8 << 20]);
    assert!(page.contains("NCCL registers 8 of 8 kinds of memory, and 0 as a symmetric window"), "{page}");
}

#[test]
#[ignore = "needs a C compiler and Linux"]
fn memory_that_is_refused_hangs_or_faults_keeps_what_was_measured_before() {
    let test_dir = TestDir::new();
    // Long enough for what is measured before the registration, also on a busy machine.
    let kind = ["--kinds", "nccl", "--limit", "40"];
    let (record, page) = register(&test_dir, "refuse", &kind);
    assert_eq!(registrations(&record)[1]["error"], "ncclCommRegister: invalid usage; NCCL_DEBUG=WARN prints more");
    assert!(page.contains("refused"), "{page}");
    let (record, page) = register(&test_dir, "wrong", &kind);
    assert_eq!(registrations(&record)[1]["correct"], false);
    assert!(page.contains("wrong sums"), "{page}");
    for (ends, words) in [("hang", "no further result within 40 s"), ("crash", "rank 1: signal: 6")] {
        let (record, page) = register(&test_dir, ends, &kind);
        assert!(record["kinds"][0]["error"].as_str().unwrap().starts_with(words), "{record}");
        // Rank 0 of the stand-in does not wait for a rank that has faulted.
        let measured = registrations(&record).len();
        assert!(measured == 1 || ends == "crash" && measured > 0, "{record}");
        assert!(page.contains(words), "{page}");
    }
}

#[test]
fn more_gpus_than_there_are_or_none_is_one_line() {
    let test_dir = TestDir::new();
    test_dir
        .run(&["register", "--gpus", "99", "--source", "test", "-o", "register.json"])
        .refused(2, &["registration is measured on several GPUs"]);
    assert!(!test_dir.at("register.json").exists());
}
