use super::*;
use serde_json::json;

fn calls(memory: [u64; 3], launch: [u64; 3]) -> Value {
    let call = |[count, total_ns, blocked_ns]: [u64; 3]| json!({"count": count, "total_ns": total_ns, "blocked_ns": blocked_ns});
    json!({"mem_free": call(memory), "kernel_launch": call(launch)})
}

fn summary() -> Value {
    let epoch = |all, train| json!({"steps": 2, "wall_s": 0.001, "train_s": 0.0005, "val_accuracy": 0.9, "driver_calls": all, "train_driver_calls": train});
    let epoch = epoch(calls([10, 60_000, 40_000], [100, 200_000, 0]), calls([4, 30_000, 20_000], [60, 100_000, 0]));
    json!({
        "schema_version": 1, "status": "finished", "code_version": "0.1.0",
        "settings": {"alloc": "naive", "dataset": "digits", "hidden": 64, "layers": 4, "batch": 64, "seed": 42,
                     "init": "kaiming", "lr": 0.1, "sync": "step"},
        "device": {"kind": "sim", "name": "a device"}, "epochs": [epoch.clone(), epoch],
        "allocator_stats": {"reserved_bytes.all.peak": 4 << 20, "active_bytes.all.peak": 3 << 20, "num_ooms": -1},
        "latency": [{"operation": "allocate", "path": "hit", "count": 9, "p50_ns": 50, "p99_ns": 60},
                    {"operation": "allocate", "path": "driver_alloc", "count": 1, "p50_ns": 1000, "p99_ns": 1000}],
        "fragmentation": {"requested": 2, "soft": 1, "attribution": "blocks"}
    })
}

/// Writes directories with these records and the losses of four steps each.
fn write_runs(runs: &[(Value, f64)]) -> (tempfile::TempDir, Vec<PathBuf>) {
    let temp_dir = tempfile::tempdir().unwrap();
    let directory = |(number, (record, scale)): (usize, &(Value, f64))| {
        let directory = temp_dir.path().join(number.to_string());
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("summary.json"), record.to_string()).unwrap();
        let row = |step: u64| format!("{},{},{},{},4096\n", step / 3 + 1, step, scale / step as f64, 250_000 * step);
        let rows: String = (1..=4).map(row).collect();
        std::fs::write(directory.join("steps.csv"), format!("epoch,step,loss,host_ns,reserved_bytes\n{rows}")).unwrap();
        directory
    };
    let directories = runs.iter().enumerate().map(directory).collect();
    (temp_dir, directories)
}

#[test]
fn a_record_yields_the_expected_values() {
    let (_temp_dir, directories) = write_runs(&[(summary(), 1.0)]);
    let run = &read(&directories).unwrap()[0];
    assert_eq!((run.name.as_str(), run.step), ("naive", Some(250_000.0)), "train_s divided by the steps");
    assert_eq!(run.step_spread, Some([250_000.0; 2]), "without the step across the end of an epoch");
    let step = run.per_step.as_ref().unwrap();
    assert_eq!((step.calls, step.blocked), (32.0, 10_000.0), "training only");
    let epoch = run.per_epoch.as_ref().unwrap();
    assert_eq!((epoch.calls, epoch.blocked, epoch.by_call[0].call.as_str()), (110.0, 40_000.0, "kernel_launch"));
    assert_eq!(run.host, Some([40_000.0, 20_000.0, 0.0, 200_000.0, 740_000.0]));
    assert_eq!(run.allocate, Some([50.0, 60.0]), "the most frequent path");
    assert_eq!((run.free, run.peak_requested, run.utilisation), (None, None, Some(0.75)));
    assert_eq!(run.ledger, [("requested", 2), ("soft", 1)].into());
}

#[test]
fn values_missing_from_a_record_are_absent() {
    let mut old = summary();
    for epoch in old["epochs"].as_array_mut().unwrap() {
        epoch.as_object_mut().unwrap().remove("train_driver_calls");
        epoch.as_object_mut().unwrap().remove("train_s");
    }
    old["clock"] = "virtual".into();
    old["latency"][0]["p50_ns"] = 0.into();
    old["status"] = "running".into();
    let (_temp_dir, directories) = write_runs(&[(old, 1.0)]);
    std::fs::remove_file(directories[0].join("steps.csv")).unwrap();
    let run = &read(&directories).unwrap()[0];
    assert!(run.per_step.is_none() && run.per_epoch.is_some());
    assert_eq!((run.step, run.allocate), (None, None), "on a simulated device only driver calls take time");
    assert!(run.notes[0].contains("killed") && run.notes[1].contains("does not exist"), "{:?}", run.notes);
}

#[test]
fn runs_have_distinct_names_and_their_losses_are_compared() {
    let mut wide = summary();
    wide["settings"]["hidden"] = 128.into();
    let mut other = summary();
    other["settings"]["alloc"] = "caching".into();
    let (_temp_dir, directories) = write_runs(&[(summary(), 1.0), (wide, 1.0), (summary(), 1.0), (other, 2.0)]);
    let runs = read(&directories).unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names, ["naive, hidden 64", "naive, hidden 128", "naive, hidden 64 (2)", "caching"]);
    let losses: Vec<Option<&str>> = runs.iter().map(|run| run.losses.as_deref()).collect();
    assert_eq!(losses[..2], [None, None]);
    assert!(losses[2].unwrap().ends_with("losses of 4 steps are bit-identical."), "{losses:?}");
    assert!(losses[3].unwrap().ends_with("differ by at most 1.0e0 (relative)."), "{losses:?}");
}

#[test]
fn a_damaged_record_is_refused_in_one_line() {
    for (key, value, expected) in [
        ("schema_version", json!(3), "schema version 3"),
        ("step_losses", json!("../other"), "step_losses"),
        ("epochs", json!([1]), "summary.json"),
        ("device", json!({}), "name"),
    ] {
        let mut record = summary();
        record[key] = value;
        let (_temp_dir, directories) = write_runs(&[(record, 1.0)]);
        let error = format!("{:#}", read(&directories).unwrap_err());
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn an_experiment_yields_the_first_repetitions_of_its_runs() {
    let temp_dir = tempfile::tempdir().unwrap();
    assert_eq!(directories(temp_dir.path()).unwrap(), [temp_dir.path()]);
    std::fs::write(temp_dir.path().join("experiment.json"), "{}").unwrap();
    for (id, program, status, repeat) in [
        ("b", "trainer", "done", 0),
        ("a", "pytorch", "done", 0),
        ("c", "trainer", "done", 1),
        ("d", "replay", "done", 0),
        ("e", "trainer", "failed", 0),
    ] {
        let directory = temp_dir.path().join("runs").join(id);
        std::fs::create_dir_all(&directory).unwrap();
        let record = json!({"program": program, "status": status, "repeat": repeat});
        std::fs::write(directory.join("run.json"), record.to_string()).unwrap();
    }
    let runs = temp_dir.path().join("runs");
    assert_eq!(directories(temp_dir.path()).unwrap(), [runs.join("a"), runs.join("b")]);
}

#[test]
fn every_rank_of_a_run_has_a_lane_with_its_name() {
    let rank = |rank: u32| {
        let mut record = summary();
        record["rank"] = rank.into();
        record
    };
    let (temp_dir, written) = write_runs(&[(rank(0), 1.0), (rank(1), 1.0), (rank(2), 1.0)]);
    // The records of the other ranks are in the directory of the first; one that was killed early has none.
    std::fs::rename(&written[1], written[0].join("rank1")).unwrap();
    std::fs::rename(&written[2], written[0].join("rank2")).unwrap();
    std::fs::create_dir(written[0].join("rank3")).unwrap();
    let run = temp_dir.path().join("0");
    let lanes = directories(&run).unwrap();
    assert_eq!(lanes, [run.clone(), run.join("rank1"), run.join("rank2")]);
    let runs = read(&lanes).unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    assert_eq!(names, ["naive, rank 0", "naive, rank 1", "naive, rank 2"]);
}
