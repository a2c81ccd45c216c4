//! `experiments pack`: retained data does not change, and readers of experiments can read the archive's contents.

use crate::common::{IDS, Ran, SMALL, TestDir, json_at, names, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainer::Settings;
use trainer::data::DatasetName;
use trainer::observer::{Observer, Silent};
use trainer::settings::DeviceChoice;
use vramlab::backends::{self, caching};
use vramlab::histories::formats::{Action, Export};

/// A small study with every kind of file, recorded on the simulated device.
fn recorded() -> TestDir {
    let test_dir = TestDir::new();
    let keep = r#"keep = ["summary.json", "steps.csv", "latency.hlog", "trace.jsonl"]"#;
    let spec = SMALL.replace(r#"keep = ["summary.json", "steps.csv"]"#, keep);
    test_dir.write("small.toml", spec.replace("[options]\n", "[options]\ntrace = true\n"));
    test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "out"]).ok();
    test_dir
}

/// The unpacked files of an experiment by path, without those that name it and the omitted data; documents and their
/// lines as values, because the order of keys has no meaning.
fn contents(folder: &Path) -> BTreeMap<String, Value> {
    let mut records = BTreeMap::new();
    let mut add = |name: String, path: &Path| {
        let mut text = String::new();
        let bytes = std::fs::read(path).unwrap();
        if name.ends_with(".gz") {
            flate2::read::GzDecoder::new(bytes.as_slice()).read_to_string(&mut text).unwrap();
        } else {
            text = String::from_utf8(bytes).unwrap();
        }
        let plain = name.trim_end_matches(".gz");
        let value = if plain.ends_with(".json") {
            let mut document: Value = serde_json::from_str(&text).unwrap();
            if let Some(files) = document.get_mut("files").and_then(Value::as_array_mut) {
                *files = files.iter().map(|name| json!(name.as_str().unwrap().trim_end_matches(".gz"))).collect();
                files.sort_by_key(Value::to_string);
            }
            document.as_object_mut().unwrap().remove("left_out");
            document
        } else if plain.ends_with(".jsonl") {
            text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect()
        } else {
            json!(text)
        };
        records.insert(plain.to_owned(), value);
    };
    add("experiment.json".into(), &folder.join("experiment.json"));
    for id in names(&folder.join("runs")) {
        for name in names(&folder.join("runs").join(&id)) {
            add(format!("{id}/{name}"), &folder.join("runs").join(&id).join(&name));
        }
    }
    records
}

#[test]
fn of_programs_that_pack_into_one_archive_one_does() {
    use std::process::Stdio;
    let test_dir = recorded();
    let start = || {
        let mut program = test_dir.process(&["pack", "out", "-o", "label.tar.xz"]);
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let programs: Vec<_> = (0..6).map(|_| start()).collect();
    let outputs = programs.into_iter().map(|program| Ran::of(program.wait_with_output().unwrap()));
    let (won, lost): (Vec<Ran>, Vec<Ran>) = outputs.partition(|output| output.code == Some(0));
    assert_eq!(won.len(), 1, "{lost:#?}");
    lost.iter().for_each(|lost| lost.refused(2, &["label.tar.xz: "]));
    assert_eq!(labels(&test_dir), ["label.tar.xz"]);
    unpack(&test_dir, "label.tar.xz");
    assert_eq!(contents(&test_dir.at("out/small")), contents(&test_dir.at("label/small")));
}

#[cfg(target_os = "linux")]
#[test]
fn a_pipe_among_the_files_of_a_run_is_refused_without_waiting() {
    let test_dir = recorded();
    let runs = test_dir.at("out/small/runs");
    let summary = runs.join(&names(&runs)[0]).join("summary.json");
    std::fs::remove_file(&summary).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&summary).status().unwrap().success());
    test_dir.run(&["pack", "out", "-o", "label.tar.xz"]).refused(2, &["it is a pipe; name a regular file"]);
    assert!(labels(&test_dir).is_empty());
}

/// Existing files of an archive, incomplete ones included.
fn labels(test_dir: &TestDir) -> Vec<String> {
    let mut labels = names(&test_dir.at("."));
    labels.retain(|name| name.contains("label"));
    labels
}

/// Unpacks an archive in its directory.
fn unpack(test_dir: &TestDir, archive: &str) {
    let file = std::fs::File::open(test_dir.at(archive)).unwrap();
    tar::Archive::new(liblzma::read::XzDecoder::new(file)).unpack(test_dir.at(".")).unwrap();
}

#[test]
fn what_is_packed_comes_back_and_gives_the_same_bytes() {
    let test_dir = recorded();
    // As a killed program leaves it.
    test_dir.write(".label.tar.xz.aBcDeF0123.part", "cut");
    test_dir.run(&["pack", "out", "-o", "label.tar.xz"]).ok();
    assert_eq!(labels(&test_dir), ["label.tar.xz"]);
    unpack(&test_dir, "label.tar.xz");
    let (before, after) = (contents(&test_dir.at("out/small")), contents(&test_dir.at("label/small")));
    assert!(before.len() > 4 * IDS.len(), "{:?}", before.keys());
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    before.iter().for_each(|(name, value)| assert_eq!(value, &after[name], "{name}"));
    let first = std::fs::read(test_dir.at("label.tar.xz")).unwrap();
    std::fs::remove_file(test_dir.at("label.tar.xz")).unwrap();
    test_dir.run(&["pack", "label/small", "-o", "label.tar.xz"]).ok();
    assert!(first == std::fs::read(test_dir.at("label.tar.xz")).unwrap(), "other bytes");
    // Readers of experiments can read it, and runs can resume in it.
    let of = |folder: &str| {
        let same = ["fidelity", "--measured", folder, "--against", folder, "--json"];
        let status = test_dir.run(&["status", folder, "--json"]).ok();
        (test_dir.run(&same).ok().json(), status.json())
    };
    assert_eq!(of("label/small"), of("out/small"));
    std::fs::remove_dir_all(test_dir.at("label/small/runs").join(IDS[0])).unwrap();
    test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "label"]).ok();
    assert_eq!(names(&test_dir.at("label/small/runs")), IDS);
}

#[test]
fn what_is_left_out_is_named_and_all_else_is_there() {
    let test_dir = recorded();
    let out = "latency.hlog,run.json:machine,steps.csv:host_ns,summary.json:command,summary.json:settings/seed,trace.jsonl:stream";
    test_dir.run(&["pack", "out", "-o", "label.tar.xz", "--leave-out", out]).ok();
    unpack(&test_dir, "label.tar.xz");
    let left_out = &json_at(&test_dir.at("label/small/experiment.json"))["left_out"];
    assert_eq!(left_out, &json!(out.split(',').collect::<Vec<_>>()), "{out}");
    let (before, after) = (contents(&test_dir.at("out/small")), contents(&test_dir.at("label/small")));
    let id = IDS[3];
    assert_eq!(
        names(&test_dir.at("label/small/runs").join(id)),
        ["run.json", "steps.csv", "summary.json", "trace.jsonl"]
    );
    let key = |name: &str| format!("{id}/{name}");
    let mut summary = before[&key("summary.json")].clone();
    summary.as_object_mut().unwrap().remove("command").unwrap();
    summary["settings"].as_object_mut().unwrap().remove("seed").unwrap();
    assert_eq!(after[&key("summary.json")], summary);
    let mut run = before[&key("run.json")].clone();
    run.as_object_mut().unwrap().remove("machine").unwrap();
    run["files"] = json!(["steps.csv", "summary.json", "trace.jsonl"]);
    assert_eq!(after[&key("run.json")], run);
    let mut trace = before[&key("trace.jsonl")].clone();
    let lines = trace.as_array_mut().unwrap().iter_mut();
    assert!(lines.filter_map(|line| line.as_object_mut().unwrap().remove("stream")).count() > 0);
    assert_eq!(after[&key("trace.jsonl")], trace);
    let column = |steps: &Value, name: &str| {
        let lines: Vec<Vec<String>> =
            steps.as_str().unwrap().lines().map(|line| line.split(',').map(str::to_owned).collect()).collect();
        let at = lines[0].iter().position(|column| column == name)?;
        Some(lines.into_iter().map(|line| line[at].clone()).collect::<Vec<String>>())
    };
    let (old, new) = (&before[&key("steps.csv")], &after[&key("steps.csv")]);
    assert_eq!(column(old, "loss"), column(new, "loss"));
    assert_eq!((column(old, "host_ns").is_some(), column(new, "host_ns")), (true, None));
}

#[test]
fn lines_are_left_out_by_a_word_in_a_value() {
    let test_dir = recorded();
    test_dir.run(&["pack", "out", "-o", "label.tar.xz", "--leave-out", "trace.jsonl:action=free"]).ok();
    unpack(&test_dir, "label.tar.xz");
    let (before, after) = (contents(&test_dir.at("out/small")), contents(&test_dir.at("label/small")));
    let name = format!("{}/trace.jsonl", IDS[3]);
    let is_free = |line: &Value| line["action"].as_str().is_some_and(|action| action.contains("free"));
    let (old, new) = (before[&name].as_array().unwrap(), after[&name].as_array().unwrap());
    assert!(old.iter().any(is_free) && !new.is_empty());
    assert_eq!(&old.iter().filter(|line| !is_free(line)).cloned().collect::<Vec<_>>(), new);
    let none = ["pack", "out", "-o", "none.tar.xz", "--leave-out", "trace.jsonl:action=nothing"];
    test_dir.run(&none).refused(2, &["--leave-out trace.jsonl:action=nothing: no run has that"]);
    let no_word = test_dir.run(&["pack", "out", "-o", "none.tar.xz", "--leave-out", "trace.jsonl:action="]);
    assert!(no_word.code == Some(2) && no_word.stderr.contains("a file and a part of it"), "{no_word:?}");
}

#[test]
fn what_cannot_be_packed_is_refused_and_nothing_is_left() {
    let test_dir = recorded();
    let pack = |more: &[&str]| test_dir.run(&[&["pack", "out", "-o", "label.tar.xz"], more].concat());
    pack(&["--leave-out", "perfetto.json"]).refused(2, &["--leave-out perfetto.json: no run has that"]);
    pack(&["--leave-out", "steps.csv:none"]).refused(2, &["--leave-out steps.csv:none: no run has that"]);
    pack(&["--leave-out", "latency.hlog:none"]).refused(2, &["--leave-out latency.hlog goes without"]);
    let needed = pack(&["--leave-out", "run.json:status"]);
    assert!(needed.code == Some(2) && needed.stderr.contains("runs could not be distinguished"), "{needed:?}");
    let needed = pack(&["--leave-out", "summary.json"]);
    assert!(needed.code == Some(2) && needed.stderr.contains("runs have no values"), "{needed:?}");
    test_dir
        .run(&["pack", "out", "-o", "label"])
        .refused(2, &["label is not the name of an archive; write LABEL.tar.xz"]);
    test_dir.run(&["pack", ".", "-o", "label.tar.xz"]).refused(2, &[". has no experiment.json"]);
    test_dir.run(&["pack", "out", "out", "-o", "label.tar.xz"]).refused(2, &["two experiments with the name small"]);
    std::fs::write(test_dir.at("out/small/runs").join(IDS[0]).join("notes.txt"), "mine").unwrap();
    pack(&[]).refused(2, &["notes.txt is not a file that run.json names"]);
    std::fs::remove_file(test_dir.at("out/small/runs").join(IDS[0]).join("notes.txt")).unwrap();
    std::fs::remove_file(test_dir.at("out/small/runs").join(IDS[0]).join("summary.json")).unwrap();
    pack(&[]).refused(2, &["run.json names summary.json, which is not there"]);
    std::fs::remove_dir_all(test_dir.at("out/small/runs").join(IDS[0])).unwrap();
    pack(&[]).refused(2, &["7 of 8 runs are done", "--incomplete"]);
    assert_eq!(labels(&test_dir), Vec::<String>::new());
    pack(&["--incomplete"]).ok();
    pack(&["--incomplete"]).refused(2, &["label.tar.xz: already exists"]);
    // The missing run is still planned.
    unpack(&test_dir, "label.tar.xz");
    assert_eq!(contents(&test_dir.at("out/small")), contents(&test_dir.at("label/small")));
}

// `replay` reads the exports of a run and the output of `convert`.

/// Settings for each allocator; some run out of memory.
fn arms() -> Vec<(&'static str, Settings)> {
    let base = Settings {
        device: DeviceChoice::Named(vramlab::DeviceName::Sim(None)),
        dataset: DatasetName::Digits,
        offline: true,
        hidden: 40,
        batch: 64,
        steps: Some(6),
        exports: Export::ALL.to_vec(),
        ..Settings::default()
    };
    let with = |text: &str| Settings { allocator: text.parse().unwrap(), ..base.clone() };
    let under =
        "caching:garbage_collection_threshold=0.1,max_split_size=20M,roundup_power2_divisions=4,memory_limit=64M";
    // Room for the weights, but not also for the gradients.
    let mut small = with("caching");
    small.hidden = 1500;
    small.memory_limit = Some(24 << 20);
    vec![
        ("naive", with("naive")),
        ("caching", with("caching")),
        ("caching under settings", with(under)),
        ("caching without memory", small),
        ("stream-ordered", with("stream-ordered")),
        ("stream-ordered that keeps nothing", with("stream-ordered:release_threshold=0")),
    ]
}

#[test]
fn every_export_of_every_allocator_is_replayed() {
    for (name, settings) in arms() {
        let observer: Arc<dyn Observer> = Arc::new(Silent);
        let test_dir = TestDir::new();
        let record = test_dir.at("record");
        let settings = Settings { out: Some(record.clone()), ..settings };
        let run = trainer::run(&settings, vec!["test".into()], Instant::now(), &AtomicBool::new(false), &observer);
        drop(run.unwrap());
        let summary: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(record.join("summary.json")).unwrap()).unwrap();
        let stats = &summary["allocator_stats"];
        for export in Export::ALL {
            let file = record.join(export.file_name());
            let file = file.to_str().unwrap();
            let output = test_dir.run(&["vramlab", "replay", file, "--alloc", "all", "--device", "null", "--json"]);
            if export == Export::Perfetto {
                assert_eq!(output.code, Some(2), "a timeline is no history: {output:#?}");
                continue;
            }
            let rows = output.rows();
            assert_eq!(rows.len(), backends::all().len(), "{name} as {}", export.name());
            for row in &rows {
                let tried = stats["allocation.all.allocated"].as_u64().unwrap();
                assert_eq!(row["allocations"].as_u64(), Some(tried), "{name} as {}: {row}", export.name());
                // Requests that fitted into a limit under PyTorch's rules may not fit under others.
                let alike = backends::find(row["allocator"].as_str().unwrap()).unwrap().capabilities.follows_pytorch;
                if alike || stats["num_ooms"] == 0 {
                    assert_eq!(row["failed_allocations"], 0, "{name} as {}: {row}", export.name());
                }
                if export.holds(Action::Oom) {
                    assert_eq!(row["refused_allocations"], stats["num_ooms"], "{name} as {}: {row}", export.name());
                }
            }
            // A snapshot contains enough data to reproduce the run address for address.
            if !matches!(export, Export::Snapshot | Export::SnapshotJson)
                || settings.allocator.backend() != &caching::BACKEND
            {
                continue;
            }
            let arguments = ["vramlab", "replay", file, "--alloc", "caching", "--addresses", "recorded", "--json"];
            let row = &test_dir.run(&arguments).rows()[0];
            assert_eq!(
                (&row["address_mismatches"], &row["segment_mismatches"]),
                (&0.into(), &0.into()),
                "{name}: {row}"
            );
            assert_eq!(row["peak_reserved_bytes"], stats["reserved_bytes.all.peak"], "{name}: {row}");
            assert_eq!(row["limit_bytes"], summary["settings"]["memory_limit"], "{name}");
            for (key, value) in summary["settings"]["allocator_settings"].as_object().unwrap() {
                assert_eq!(&row["allocator_settings"][key], value, "{name}: {key}");
            }
        }
    }
}

// `vramlab` commands on the trainer's own records: plans that a later run follows, and the owners of memory.

#[test]
fn a_training_run_follows_the_plan_of_an_earlier_one() {
    let test_dir = TestDir::new();
    let train = |alloc: &str, out: &str| {
        let arguments =
            ["trainer", "--alloc", alloc, "--device", "sim", "--dataset", "iris", "--epochs", "2", "--out", out];
        test_dir.run(&[&arguments[..], &["--export", "snapshot-json"]].concat()).ok();
        let path = test_dir.at(out).join("summary.json");
        let summary: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        summary["allocator_stats"].clone()
    };
    train("caching", "first");
    let made = test_dir.run(&["vramlab", "plan", "first/snapshot.json", "-o", "plan.json", "--json"]).ok().stdout;
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    let stats = train("plan:file=plan.json", "second");
    assert_eq!((&stats["num_planned"], &stats["num_unplanned"]), (&made["allocations"], &json!(0)));
    assert_eq!(stats["reserved_bytes.all.peak"], made["plan_bytes"]);
}

#[test]
fn a_run_of_ours_names_layers_and_roles() {
    let test_dir = TestDir::new();
    let run = ["trainer", "--device", "sim", "--dataset", "iris", "--epochs", "2", "--hidden", "256", "--layers", "3"];
    test_dir
        .run(&[&run[..], &["--alloc", "caching", "--export", "snapshot,snapshot-json", "--out", "run"]].concat())
        .ok();
    for file in ["run/snapshot.pickle", "run/snapshot.json"] {
        let explanation = test_dir
            .run(&["vramlab", "explain", "--json", file, "--between", "epoch 1 step 2", "epoch 2 step 1"])
            .ok()
            .json();
        let lines: Vec<&str> = explanation["who"][0]["lines"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["line"].as_str().unwrap())
            .collect();
        for owner in ["layer 3 weights gradient", "layer 2 weights gradient", "set-up parameters or data"] {
            assert!(lines.contains(&owner), "{owner}: {lines:?}");
        }
        let children = explanation["who"][0]["tree"]["children"].as_array().unwrap();
        assert!(children.iter().any(|child| child["name"] == "training backward"), "{children:?}");
        assert_eq!(
            explanation["peak_active"]["annotation"].as_str().map(|name| name.starts_with("epoch ")),
            Some(true)
        );
    }
}

/// `results` unpacks the archives of a directory, or one archive, and lists what is there; anything else is refused.
#[test]
fn results_are_unpacked_and_listed() {
    let test_dir = recorded();
    std::fs::create_dir(test_dir.at("kept")).unwrap();
    test_dir.run(&["pack", "out", "-o", "kept/2026-01-01-sim.tar.xz"]).ok();
    std::fs::write(test_dir.at("kept/2026-01-01-sim.md"), "text").unwrap();
    let listing = test_dir.run(&["results", "kept", "--json"]).ok().json();
    let records = json!([{"name": "2026-01-01-sim", "device": "sim"}, {"name": "2026-01-01-sim.md"}]);
    assert_eq!((&listing["folder"], &listing["records"]), (&"kept".into(), &records));
    assert!(test_dir.at("kept/2026-01-01-sim/small/experiment.json").is_file());
    let listing = test_dir.run(&["results", "kept/2026-01-01-sim.tar.xz", "--json"]).ok().json();
    assert_eq!(listing["folder"], "kept/2026-01-01-sim");
    assert_eq!(listing["records"], json!([{"name": "small", "device": "sim"}]));
    assert!(test_dir.run(&["results", "kept"]).ok().stdout.contains("2 records in kept"));
    let one = test_dir.run(&["results", "kept/2026-01-01-sim.tar.xz"]).ok();
    assert!(one.stdout.contains("\n1 record in kept/2026-01-01-sim."), "{}", one.stdout);
    test_dir.run(&["results", "kept/2026-01-01-sim.md"]).refused(2, &["2026-01-01-sim.md", "neither a directory"]);
}

/// A signal while an archive is unpacked leaves the archive alone. SIGKILL leaves what the next call removes.
#[cfg(unix)]
#[test]
fn an_interrupted_unpacking_leaves_nothing() {
    use rustix::process::{Pid, Signal, kill_process};
    let test_dir = TestDir::new();
    std::fs::create_dir(test_dir.at("kept")).unwrap();
    let mut tar = tar::Builder::new(liblzma::write::XzEncoder::new(Vec::new(), 0));
    for number in 0..40_000 {
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        tar.append_data(&mut header, format!("label/small/{number}"), b"text".as_slice()).unwrap();
    }
    test_dir.file("kept/label.tar.xz", tar.into_inner().unwrap().finish().unwrap());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let child = test_dir.process(&["results", "kept"]).stderr(std::process::Stdio::piped()).spawn().unwrap();
        wait_for("the unpacking", || names(&test_dir.at("kept")).len() == 2);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = Ran::of(child.wait_with_output().unwrap());
        assert_eq!(output.code, Some(code), "{output:#?}");
        assert_eq!(names(&test_dir.at("kept")), ["label.tar.xz"]);
    }
    let mut child = test_dir.process(&["results", "kept"]).spawn().unwrap();
    wait_for("the unpacking", || names(&test_dir.at("kept")).len() == 2);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(&test_dir.at("kept")).len(), 2);
    test_dir.run(&["results", "kept"]).ok();
    assert_eq!(names(&test_dir.at("kept")), ["label", "label.tar.xz"]);
}
