//! `experiments pack` and `unpack`: nothing of what is kept changes, and what reads experiments reads both forms.
#![allow(clippy::unwrap_used)]

mod common;

use common::{IDS, Place, Ran, SMALL, json_at, names};
use ring::digest::{SHA256, digest};
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
fn recorded() -> Place {
    let place = Place::new();
    let keep = r#"keep = ["summary.json", "steps.csv", "latency.hlog", "trace.jsonl"]"#;
    let spec = SMALL.replace(r#"keep = ["summary.json", "steps.csv"]"#, keep);
    place.write("small.toml", spec.replace("[options]\n", "[options]\ntrace = true\n"));
    place.run(&["run", "small.toml", "--device", "sim", "-o", "out"]).ok();
    place
}

/// The files of an experiment by their path, unpacked; documents and their lines as values, because the order of keys
/// tells nothing.
fn contents(folder: &Path) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
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
            serde_json::from_str(&text).unwrap()
        } else if plain.ends_with(".jsonl") {
            text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect()
        } else {
            json!(text)
        };
        found.insert(name, value);
    };
    add("experiment.json".into(), &folder.join("experiment.json"));
    for id in names(&folder.join("runs")) {
        for name in names(&folder.join("runs").join(&id)) {
            add(format!("{id}/{name}"), &folder.join("runs").join(&id).join(&name));
        }
    }
    found
}

fn unxz(path: &Path) -> String {
    let mut text = String::new();
    let bytes = std::fs::read(path).unwrap();
    liblzma::read::XzDecoder::new(bytes.as_slice()).read_to_string(&mut text).unwrap();
    text
}

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    names(folder).into_iter().map(|name| (name.clone(), std::fs::read(folder.join(name)).unwrap())).collect()
}

#[test]
fn of_programs_that_pack_into_one_folder_one_does() {
    use std::process::Stdio;
    let place = recorded();
    for (verb, from, to) in [("pack", "out", "packed"), ("unpack", "packed", "back")] {
        let start = || {
            let mut program = place.process(&[verb, from, "-o", to]);
            program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let programs: Vec<_> = (0..6).map(|_| start()).collect();
        let ran = programs.into_iter().map(|program| Ran::of(program.wait_with_output().unwrap()));
        let (won, lost): (Vec<Ran>, Vec<Ran>) = ran.partition(|ran| ran.code == Some(0));
        assert_eq!(won.len(), 1, "{verb}: {lost:#?}");
        lost.iter().for_each(|lost| lost.refused(2, &[&format!("{to}/small is there already")]));
        assert_eq!(names(&place.at(to)), ["small"], "{verb}");
    }
    assert_eq!(contents(&place.at("out/small")), contents(&place.at("back/small")));
}

#[test]
fn what_is_packed_comes_back_and_gives_the_same_bytes() {
    let place = recorded();
    place.run(&["pack", "out", "-o", "packed"]).ok();
    place.run(&["unpack", "packed", "-o", "back"]).ok();
    let (before, after) = (contents(&place.at("out/small")), contents(&place.at("back/small")));
    assert!(before.len() > 4 * IDS.len(), "{:?}", before.keys());
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    before.iter().for_each(|(name, value)| assert_eq!(value, &after[name], "{name}"));
    assert_eq!(names(&place.at("packed/small")), ["manifest.json", "runs.csv.xz", "series.jsonl.xz"]);
    place.run(&["pack", "back/small", "-o", "again"]).ok();
    assert!(bytes(&place.at("packed/small")) == bytes(&place.at("again/small")), "other bytes");
    // A row a run, in the order of the plan; a text that could be a number is told from one.
    let table = unxz(&place.at("packed/small/runs.csv.xz"));
    let ids: Vec<&str> = table.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!(ids, IDS);
    assert!(table.starts_with("id,arm,program,repeat,status,"), "{table:.80}");
    let manifest = json_at(&place.at("packed/small/manifest.json"));
    assert_eq!(manifest["runs"], json!({"planned": 8, "done": 8, "failed": 0, "skipped": 0}));
    assert_eq!(manifest["same_in_all"]["run"]["options"]["dataset"], "iris");
    assert_eq!(manifest["left_out"], json!([]));
}

#[test]
fn a_table_of_runs_that_an_earlier_version_packed_is_read() {
    let place = recorded();
    place.run(&["pack", "out", "-o", "packed"]).ok();
    place.run(&["unpack", "packed", "-o", "back"]).ok();
    let folder = place.at("packed/small");
    let table = unxz(&folder.join("runs.csv.xz"));
    std::fs::remove_file(folder.join("runs.csv.xz")).unwrap();
    std::fs::write(folder.join("runs.csv"), &table).unwrap();
    let mut manifest = json_at(&folder.join("manifest.json"));
    manifest["tables"][0]["name"] = json!("runs.csv");
    manifest["tables"][0]["bytes"] = json!(table.len());
    manifest["tables"][0]["sha256"] = json!(sha256(table.as_bytes()));
    std::fs::write(folder.join("manifest.json"), manifest.to_string()).unwrap();
    place.run(&["unpack", "packed", "-o", "plain"]).ok();
    assert_eq!(contents(&place.at("plain/small")), contents(&place.at("back/small")));
}

#[test]
fn what_is_left_out_is_named_and_all_else_is_there() {
    let place = recorded();
    let out = "latency.hlog,trace.jsonl,steps.csv:host_ns,summary.json:command,run.json:machine";
    place.run(&["pack", "out", "-o", "packed", "--leave-out", out]).ok();
    let manifest = json_at(&place.at("packed/small/manifest.json"));
    assert_eq!(manifest["left_out"], json!(out.split(',').collect::<Vec<_>>()), "{out}");
    place.run(&["unpack", "packed", "-o", "back"]).ok();
    let (before, after) = (contents(&place.at("out/small")), contents(&place.at("back/small")));
    let id = IDS[3];
    assert_eq!(names(&place.at("back/small/runs").join(id)), ["run.json", "steps.csv", "summary.json"]);
    let key = |name: &str| format!("{id}/{name}");
    let mut summary = before[&key("summary.json")].clone();
    summary.as_object_mut().unwrap().remove("command").unwrap();
    assert_eq!(after[&key("summary.json")], summary);
    let mut run = before[&key("run.json")].clone();
    run.as_object_mut().unwrap().remove("machine").unwrap();
    run["files"] = json!(["summary.json", "steps.csv"]);
    assert_eq!(after[&key("run.json")], run);
    let column = |steps: &Value, name: &str| {
        let lines: Vec<Vec<String>> =
            steps.as_str().unwrap().lines().map(|line| line.split(',').map(str::to_owned).collect()).collect();
        let at = lines[0].iter().position(|found| found == name)?;
        Some(lines.into_iter().map(|line| line[at].clone()).collect::<Vec<String>>())
    };
    let (old, new) = (&before[&key("steps.csv")], &after[&key("steps.csv")]);
    assert_eq!(column(old, "loss"), column(new, "loss"));
    assert_eq!((column(old, "host_ns").is_some(), column(new, "host_ns")), (true, None));
}

#[test]
fn what_cannot_be_packed_is_refused_and_nothing_is_left() {
    let place = recorded();
    let pack = |more: &[&str]| place.run(&[&["pack", "out", "-o", "packed"], more].concat());
    pack(&["--leave-out", "perfetto.json"]).refused(2, &["--leave-out perfetto.json: no run has that"]);
    let needed = pack(&["--leave-out", "run.json:status"]);
    assert!(needed.code == Some(2) && needed.stderr.contains("no run could be told"), "{needed:?}");
    place.run(&["pack", ".", "-o", "packed"]).refused(2, &[". holds no experiment.json"]);
    std::fs::write(place.at("out/small/runs").join(IDS[0]).join("notes.txt"), "mine").unwrap();
    pack(&[]).refused(2, &["notes.txt is no file that run.json names"]);
    std::fs::remove_file(place.at("out/small/runs").join(IDS[0]).join("notes.txt")).unwrap();
    std::fs::remove_file(place.at("out/small/runs").join(IDS[0]).join("summary.json")).unwrap();
    pack(&[]).refused(2, &["run.json names summary.json, which is not there"]);
    std::fs::remove_dir_all(place.at("out/small/runs").join(IDS[0])).unwrap();
    pack(&[]).refused(2, &["7 of 8 runs are done", "--incomplete"]);
    assert!(!place.at("packed").exists());
    pack(&["--incomplete"]).ok();
    pack(&["--incomplete"]).refused(2, &["packed/small is there already"]);
    place.run(&["pack", "packed", "-o", "more"]).refused(2, &["is packed already"]);
    place.run(&["unpack", "out", "-o", "more"]).refused(2, &["is not packed"]);
    // The planned run that is missing is still planned.
    place.run(&["unpack", "packed", "-o", "back"]).ok();
    assert_eq!(contents(&place.at("out/small")), contents(&place.at("back/small")));
}

#[test]
fn commands_read_a_packed_experiment_as_its_folder() {
    let place = recorded();
    place.run(&["pack", "out", "-o", "packed"]).ok();
    let of = |folder: &str| {
        let same = ["fidelity", "--measured", folder, "--against", folder, "--json"];
        let status = place.run(&["status", folder, "--json"]).ok();
        (place.run(&same).ok().json(), status.json())
    };
    assert_eq!(of("packed/small"), of("out/small"));
    let shown = place.run(&["status", "packed"]).ok().stdout;
    assert!(shown.contains("8 of 8 runs are done.") && shown.contains("vramlab report"), "{shown}");
    // It is no folder to go on in.
    place.run(&["run", "small.toml", "--device", "sim", "-o", "packed"]).refused(2, &["experiments unpack"]);
    let table = place.at("packed/small/runs.csv.xz");
    let mut changed = std::fs::read(&table).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&table, changed).unwrap();
    place.run(&["status", "packed"]).refused(2, &["runs.csv.xz is not the file that was packed"]);
    place.run(&["unpack", "packed", "-o", "back"]).refused(2, &["runs.csv.xz is not the file that was packed"]);
    assert_eq!(names(&place.at("back")), Vec::<String>::new());
}

// What a run exports and what `convert` writes, `replay` reads.

/// Ways of using each allocator; some run out of memory.
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
    // Room for the weights, but not for the gradients too.
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
        let place = Place::new();
        let record = place.at("record");
        let settings = Settings { out: Some(record.clone()), ..settings };
        let run = trainer::run(&settings, vec!["test".into()], Instant::now(), &AtomicBool::new(false), &observer);
        drop(run.unwrap());
        let summary: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(record.join("summary.json")).unwrap()).unwrap();
        let stats = &summary["allocator_stats"];
        for export in Export::ALL {
            let file = record.join(export.file_name());
            let file = file.to_str().unwrap();
            let ran = place.run(&["vramlab", "replay", file, "--alloc", "all", "--device", "null", "--json"]);
            if export == Export::Perfetto {
                assert_eq!(ran.code, Some(2), "a timeline is no history: {ran:#?}");
                continue;
            }
            let rows = ran.rows();
            assert_eq!(rows.len(), backends::all().len(), "{name} as {}", export.name());
            for row in &rows {
                let tried = stats["allocation.all.allocated"].as_u64().unwrap();
                assert_eq!(row["allocations"].as_u64(), Some(tried), "{name} as {}: {row}", export.name());
                // What fitted into a limit under PyTorch's rules may not fit under others.
                let alike = backends::find(row["allocator"].as_str().unwrap()).unwrap().capabilities.follows_pytorch;
                if alike || stats["num_ooms"] == 0 {
                    assert_eq!(row["failed_allocations"], 0, "{name} as {}: {row}", export.name());
                }
                if export.holds(Action::Oom) {
                    assert_eq!(row["refused_allocations"], stats["num_ooms"], "{name} as {}: {row}", export.name());
                }
            }
            // A snapshot has all that it takes to follow the run address for address.
            if !matches!(export, Export::Snapshot | Export::SnapshotJson)
                || settings.allocator.backend() != &caching::BACKEND
            {
                continue;
            }
            let arguments = ["vramlab", "replay", file, "--alloc", "caching", "--addresses", "recorded", "--json"];
            let row = &place.run(&arguments).rows()[0];
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

// What `vramlab` makes of the trainer's own records: plans that a later run follows, and who held memory.

#[test]
fn a_training_run_follows_the_plan_of_an_earlier_one() {
    let place = Place::new();
    let train = |alloc: &str, out: &str| {
        let arguments =
            ["trainer", "--alloc", alloc, "--device", "sim", "--dataset", "iris", "--epochs", "2", "--out", out];
        place.run(&[&arguments[..], &["--export", "snapshot-json"]].concat()).ok();
        let path = place.at(out).join("summary.json");
        let summary: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        summary["allocator_stats"].clone()
    };
    train("caching", "first");
    let made = place.run(&["vramlab", "plan", "first/snapshot.json", "-o", "plan.json", "--json"]).ok().stdout;
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    let stats = train("plan:file=plan.json", "second");
    assert_eq!((&stats["num_planned"], &stats["num_unplanned"]), (&made["allocations"], &json!(0)));
    assert_eq!(stats["reserved_bytes.all.peak"], made["plan_bytes"]);
}

#[test]
fn a_run_of_ours_names_layers_and_roles() {
    let place = Place::new();
    let run = ["trainer", "--device", "sim", "--dataset", "iris", "--epochs", "2", "--hidden", "256", "--layers", "3"];
    place.run(&[&run[..], &["--alloc", "caching", "--export", "snapshot,snapshot-json", "--out", "run"]].concat()).ok();
    for file in ["run/snapshot.pickle", "run/snapshot.json"] {
        let found = place
            .run(&["vramlab", "explain", "--json", file, "--between", "epoch 1 step 2", "epoch 2 step 1"])
            .ok()
            .json();
        let lines: Vec<&str> =
            found["who"][0]["lines"].as_array().unwrap().iter().map(|row| row["line"].as_str().unwrap()).collect();
        for wanted in ["layer 3 weights gradient", "layer 2 weights gradient", "set-up parameters or data"] {
            assert!(lines.contains(&wanted), "{wanted}: {lines:?}");
        }
        let children = found["who"][0]["tree"]["children"].as_array().unwrap();
        assert!(children.iter().any(|child| child["name"] == "training backward"), "{children:?}");
        assert_eq!(found["peak_active"]["annotation"].as_str().map(|name| name.starts_with("epoch ")), Some(true));
    }
}
