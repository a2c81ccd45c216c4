//! `experiments run` from a user's view: the files that it writes, and those that it leaves unchanged.

use crate::common::{IDS, Ran, SMALL, TestDir, json_at, names, run, runs};
use serde_json::{Value, json};
use std::path::Path;

/// Profile of a simulated device.
const PROFILE: &str = include_str!("../../../allocators/device/src/profiles/h200.json");

#[test]
fn an_experiment_leaves_its_spec_and_a_folder_for_each_run() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    let output = run(&test_dir, &["--json"]).ok();
    let cells = output.json();
    assert_eq!(cells.as_array().unwrap().len(), 4);
    for cell in cells.as_array().unwrap() {
        assert_eq!((&cell["done"], &cell["planned"], &cell["failed"]), (&json!(2), &json!(2), &json!(0)), "{cell}");
        assert!(cell["median"].as_f64().unwrap() > 0.0 && cell["measure"] == "step_time");
        assert_eq!(cell["spread"], 0.0, "simulated time does not vary");
    }
    let experiment = json_at(&test_dir.at("out/small/experiment.json"));
    assert_eq!((&experiment["schema_version"], &experiment["name"]), (&json!(1), &json!("small")));
    assert_eq!(experiment["question"], "Is it there?");
    assert_eq!(experiment["spec"]["matrix"], json!({"alloc": ["naive", "caching"], "hidden": [5, 9]}));
    assert_eq!(experiment["command"], json!(["experiments", "run", "small", "--device", "sim"]));
    let planned: Vec<&str> =
        experiment["runs"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    assert_eq!(planned, IDS);

    let records = runs(&test_dir, "out");
    assert_eq!(records.keys().collect::<Vec<_>>(), IDS);
    let mut positions = Vec::new();
    for (id, text) in &records {
        let record: Value = serde_json::from_str(text).unwrap();
        assert_eq!((&record["id"], &record["status"], &record["exit_code"]), (&json!(id), &json!("done"), &json!(0)));
        assert_eq!(record["spec_sha256"], experiment["spec_sha256"]);
        assert_eq!(record["files"], json!(["summary.json", "steps.csv"]));
        assert_eq!(record["options"]["epochs"], 2);
        assert!(record["machine"]["cores"].as_u64().unwrap() > 0 && record["wall_s"].as_f64().unwrap() > 0.0);
        let folder = test_dir.at("out/small/runs").join(id);
        assert_eq!(names(&folder), ["run.json", "steps.csv", "summary.json"]);
        let summary = json_at(&folder.join("summary.json"));
        assert_eq!(summary["settings"]["allocator"], record["options"]["alloc"]);
        assert_eq!(summary["settings"]["hidden"], record["options"]["hidden"]);
        positions.push(record["position"].as_u64().unwrap());
    }
    positions.sort_unstable();
    assert_eq!(positions, (0..8).collect::<Vec<u64>>());
    // No file contains this machine's directories.
    let here = test_dir.0.path().to_str().unwrap();
    for id in IDS {
        for file in names(&test_dir.at("out/small/runs").join(id)) {
            let text = std::fs::read_to_string(test_dir.at("out/small/runs").join(id).join(&file)).unwrap();
            assert!(!text.contains(here), "{id}/{file} names {here}");
        }
    }
    // A second call: nothing to do, nothing changed, the same table.
    let again = run(&test_dir, &["--json"]).ok();
    assert_eq!(again.stdout, output.stdout);
    assert_eq!(runs(&test_dir, "out"), records);
}

#[test]
fn a_failing_arm_is_recorded_and_the_others_go_on() {
    let test_dir = TestDir::new();
    // With this limit the wider network runs out of memory.
    let spec =
        SMALL.replace("hidden = [5, 9]", "hidden = [5, 900]\nmemory-limit = [\"40K\"]").replace(", \"caching\"", "");
    test_dir.write("small.toml", &spec);
    let output = run(&test_dir, &[]);
    assert_eq!(output.code, Some(1), "{output:#?}");
    assert!(output.stdout.contains("0/2 2 failed") && output.stdout.contains("2/2"), "{output:#?}");
    let last = output.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: 2 runs failed; small/0") && last.contains("out of memory"), "{last}");
    let records = runs(&test_dir, "out");
    let failed: Vec<Value> = records
        .values()
        .map(|text| serde_json::from_str::<Value>(text).unwrap())
        .filter(|record| record["status"] == "failed")
        .collect();
    assert_eq!(failed.len(), 2);
    for record in failed {
        assert_eq!((&record["exit_code"], &record["options"]["hidden"]), (&json!(1), &json!(900)));
        assert!(record["error"].as_str().unwrap().contains("out of memory"), "{record}");
    }
    // A failed run is repeated, a complete one is not.
    assert_eq!(run(&test_dir, &[]).code, Some(1));
    let again = runs(&test_dir, "out");
    for (id, text) in records.iter().filter(|(_, text)| text.contains("\"done\"")) {
        assert_eq!(&again[id], text);
    }
}

#[test]
fn arms_that_cannot_run_here_are_skipped_with_a_reason() {
    let test_dir = TestDir::new();
    let spec = SMALL.to_owned()
        + "[[arms]]\nname = \"ours\"\n[[arms]]\nname = \"theirs\"\nprogram = \"pytorch\"\ndevices = [\"sim\"]\n";
    // The matrix has an axis that PyTorch does not support.
    test_dir.write("small.toml", &spec);
    run(&test_dir, &[]).refused(2, &["small.toml:", "--alloc is not an option of pytorch"]);
    // Options of both programs take the same values, separately and together.
    let spec = spec.replace("alloc = [\"naive\", \"caching\"]", "");
    test_dir.write(
        "small.toml",
        spec.replace("devices = [\"sim\"]\n", "devices = [\"sim\"]\n[arms.options]\ndtype = \"f64\"\n"),
    );
    run(&test_dir, &[]).refused(2, &["small.toml:2", "invalid value 'f64'"]);
    test_dir.write(
        "small.toml",
        spec.replace("devices = [\"sim\"]\n", "devices = [\"sim\"]\n[arms.options]\nweights = \"half\"\n"),
    );
    run(&test_dir, &[]).refused(2, &["small.toml:1: theirs 5", "--weights half needs --dtype bf16 or f16, found f32"]);
    test_dir.write("small.toml", &spec);
    let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    let output = Ran::of(command.env("PYTHON", "no-such-python").output().unwrap()).ok();
    let note = output.stderr.lines().find(|line| line.contains("skipped")).unwrap();
    assert!(note.starts_with("note: small: 4 runs of PyTorch are skipped: "), "{note}");
    assert!(output.stdout.contains("0/2 2 skipped"), "{}", output.stdout);
    let records = runs(&test_dir, "out");
    let record: Value = serde_json::from_str(&records["04-theirs-5-r0"]).unwrap();
    assert_eq!((&record["status"], &record["files"]), (&json!("skipped"), &json!([])));
    assert!(!record["error"].as_str().unwrap().is_empty());
}

#[test]
fn a_gpu_that_is_not_there_is_said_once() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    let mut command = test_dir.process(&["run", "small.toml", "--device", "cuda", "-o", "out"]);
    // Where there is a GPU, this makes the driver hide it.
    let output = command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap();
    Ran::of(output).refused(2, &["--device cuda: "]);
    assert!(!test_dir.at("out").exists());
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    std::fs::create_dir_all(test_dir.at("out/small")).unwrap();
    run(&test_dir, &["--dry-run"]).ok();
    let stranger = test_dir.at("out/small/thesis.txt");
    std::fs::write(&stranger, "dear").unwrap();
    run(&test_dir, &[]).refused(2, &["has no experiment.json", "with -o"]);
    run(&test_dir, &["--again"]).refused(2, &["--again will not remove it"]);
    assert!(stranger.exists());

    std::fs::remove_file(&stranger).unwrap();
    run(&test_dir, &[]).ok();
    let records = runs(&test_dir, "out");
    // A comment does not change the spec; a value does.
    test_dir.write("small.toml", format!("# better\n{SMALL}"));
    run(&test_dir, &[]).ok();
    assert_eq!(runs(&test_dir, "out"), records);
    test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 1"));
    run(&test_dir, &[]).refused(2, &["another version of this spec", "-o", "--again"]);
    assert_eq!(runs(&test_dir, "out"), records);
    run(&test_dir, &["--again"]).ok();
    assert_eq!(runs(&test_dir, "out").len(), 8);
    assert_ne!(runs(&test_dir, "out"), records);

    let path = test_dir.at("out/small/experiment.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for (broken, words) in [
        (text.replace("\"schema_version\": 1", "\"schema_version\": 9"), "schema version 9"),
        (text.replace("\"device\": \"sim\"", "\"device\": \"cuda\""), "has runs on cuda, not on sim"),
        (text[..text.len() / 2].to_owned(), "is not JSON"),
        ("{}".to_owned(), "has no schema_version"),
    ] {
        std::fs::write(&path, broken).unwrap();
        run(&test_dir, &[]).refused(2, &[words]);
    }
    std::fs::write(&path, text).unwrap();
    // What is not the experiment's stays.
    std::fs::write(&stranger, "dear").unwrap();
    run(&test_dir, &["--again"]).ok();
    assert!(stranger.exists());
    let shard = run(&test_dir, &["--again", "--shard", "1/2"]);
    assert!(shard.code == Some(2) && shard.stderr.contains("cannot be used with"), "{shard:?}");
    assert_eq!(runs(&test_dir, "out").len(), 8, "a shard removes no other's runs");
}

#[test]
fn two_specs_of_one_name_are_refused_before_the_first_run() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    std::fs::create_dir(test_dir.at("more")).unwrap();
    test_dir.write("more/small.toml", SMALL.replace("epochs = 2", "epochs = 1"));
    for more in ["more/small.toml", "small.toml"] {
        run(&test_dir, &[more]).refused(2, &["the name small is of two specs"]);
    }
    assert!(!test_dir.at("out").exists());
}

/// What is damaged names the directory to remove, costs no other experiment its runs, and is not packed.
#[test]
fn a_damaged_run_is_named_and_made_again_when_it_is_removed() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    test_dir.write("other.toml", SMALL.replace("\"small\"", "\"other\""));
    run(&test_dir, &[]).ok();
    let folder = test_dir.at("out/small/runs/00-naive-5-r0");
    let whole = std::fs::read_to_string(folder.join("summary.json")).unwrap();
    let pack = || test_dir.run(&["pack", "out/small", "-o", "label.tar.xz"]);
    std::fs::write(folder.join("summary.json"), &whole[..whole.len() / 2]).unwrap();
    let ran = run(&test_dir, &["other.toml", "--json"]);
    assert!(ran.code == Some(1) && ran.stderr.contains("remove the directory of that run"), "{ran:?}");
    let cells: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(cells.as_array().unwrap().len(), 4, "the cells of the other experiment");
    pack().refused(2, &["summary.json is cut; remove the directory of that run"]);

    std::fs::write(folder.join("summary.json"), whole).unwrap();
    let table = std::fs::read_to_string(folder.join("steps.csv")).unwrap();
    std::fs::write(folder.join("steps.csv"), &table[..table.len() - 3]).unwrap();
    pack().refused(2, &["steps.csv is cut"]);
    std::fs::write(folder.join("steps.csv"), table).unwrap();

    std::fs::write(folder.join("run.json"), "{").unwrap();
    run(&test_dir, &[]).refused(2, &["00-naive-5-r0 is damaged; remove it", "is not JSON"]);
    pack().refused(2, &["00-naive-5-r0 is damaged"]);
    let status = test_dir.run(&["status", "out"]).ok();
    assert!(status.stdout.contains("15 of 16 runs are done, 1 damaged."), "{status:?}");
    assert!(status.stdout.contains("damaged: ") && status.stdout.contains("00-naive-5-r0"), "{status:?}");
    std::fs::remove_dir_all(&folder).unwrap();
    run(&test_dir, &[]).ok();
    pack().ok();
}

#[test]
fn a_folder_takes_runs_of_one_profile() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    let on = |device: &'static str| test_dir.run(&["run", "small.toml", "--device", device, "-o", "out"]);
    test_dir.write("gpu.json", PROFILE);
    on("sim:gpu.json").ok();
    let record = json_at(&test_dir.at("out/small/experiment.json"));
    assert_eq!((&record["device"], record["profile_sha256"].as_str().unwrap().len()), (&json!("sim:gpu.json"), 64));
    on("sim:gpu.json").ok();
    test_dir.write("gpu.json", format!("{PROFILE}\n"));
    on("sim:gpu.json").refused(2, &["when that file had another content", "-o", "--again"]);
    test_dir.run(&["run", "small.toml", "--device", "sim:gpu.json", "-o", "out", "--again"]).ok();
    assert_ne!(json_at(&test_dir.at("out/small/experiment.json"))["profile_sha256"], record["profile_sha256"]);
    on("sim:none.json").refused(2, &["none.json"]);
}

#[test]
fn histories_are_replayed_and_named_without_their_folder() {
    let test_dir = TestDir::new();
    let line = |action: &str, addr: u64| {
        json!({"time_ns": 0, "action": action, "addr": addr, "size": 4096, "block": 4096, "stream": 1, "path": "hit"})
            .to_string()
    };
    std::fs::create_dir(test_dir.at("recorded")).unwrap();
    std::fs::write(test_dir.at("recorded/h.jsonl"), [line("alloc", 4096), line("free_requested", 4096)].join("\n"))
        .unwrap();
    let spec = "name = \"small\"\nquestion = \"?\"\nrepeats = 1\ndevices = [\"sim\"]\n\
                [matrix]\nhistory = [\"h.jsonl\"]\nalloc = [\"naive\", \"stream-ordered\"]\n\
                [[arms]]\nname = \"replay\"\nprogram = \"replay\"\n[arms.options]\nrelease-threshold = \"0\"\n\
                [[arms]]\nname = \"capacity\"\nprogram = \"capacity\"\n";
    test_dir.write("small.toml", spec);
    let cells = run(&test_dir, &["--histories", "recorded", "--json"]).rows();
    let measures: Vec<&str> = cells.iter().map(|cell| cell["measure"].as_str().unwrap()).collect();
    assert_eq!(measures, ["simulated_time", "simulated_time", "capacity", "capacity"]);
    let folder = test_dir.at("out/small/runs/01-replay-h.jsonl-stream-ordered-r0");
    let result = json_at(&folder.join("result.json"));
    assert_eq!((&result[0]["trace"], &result[0]["allocator"]), (&json!("h.jsonl"), &json!("stream-ordered")));
    assert_eq!(result[0]["alloc"], "stream-ordered:release_threshold=0");
    assert_eq!(result[0]["allocator_settings"]["release_threshold"], 0);
    let record = json_at(&folder.join("run.json"));
    assert_eq!(record["files"], json!(["result.json"]));
    let command = record["command"].as_array().unwrap();
    assert_eq!(command[..3], [json!("vramlab"), json!("replay"), json!("h.jsonl")]);
}

#[test]
fn large_files_are_compressed() {
    let test_dir = TestDir::new();
    let spec = SMALL.replace("alloc = [\"naive\", \"caching\"]\nhidden = [5, 9]", "alloc = [\"naive\"]");
    let spec = spec.replace("repeats = 2", "repeats = 1").replace("epochs = 2", "epochs = 300\nbatch = 4");
    test_dir.write("small.toml", spec);
    run(&test_dir, &[]).ok();
    let folder = test_dir.at("out/small/runs/00-naive-r0");
    assert_eq!(names(&folder), ["run.json", "steps.csv.gz", "summary.json"]);
    assert_eq!(json_at(&folder.join("run.json"))["files"], json!(["summary.json", "steps.csv.gz"]));
    let bytes = std::fs::read(folder.join("steps.csv.gz")).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(bytes.as_slice()), &mut text).unwrap();
    assert!(text.starts_with("epoch,step,") && text.lines().count() > 3000);
}

/// The keys that a section of the schema describes.
fn described(section: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../analysis/schema.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, text) = text.split_once(&format!("\n## {section}\n")).unwrap();
    let rows = text.lines().take_while(|line| !line.starts_with('#'));
    let rows = rows.filter(|line| line.starts_with('`') && line.contains(" | "));
    let cells = rows.flat_map(|row| row.split(" | ").next().unwrap().split(", "));
    let mut keys: Vec<String> = cells.map(|cell| cell.trim_matches('`').trim_end_matches("[]").to_owned()).collect();
    // An object that is described key by key is spread out.
    let holders: Vec<String> =
        keys.iter().filter_map(|key| key.split_once('.')).map(|(key, _)| key.to_owned()).collect();
    keys.retain(|key| !holders.contains(key));
    keys.sort();
    keys
}

/// The keys of a record: an object that is described key by key is spread out.
fn keys(record: &Value, spread: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (key, value) in record.as_object().unwrap() {
        match value.as_object().filter(|_| key == spread) {
            Some(inner) => out.extend(inner.keys().map(|name| format!("{key}.{name}"))),
            None => out.push(key.clone()),
        }
    }
    out.sort();
    out
}

#[test]
fn the_records_are_as_the_schema_describes_them() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    test_dir.write("gpu.json", PROFILE);
    let mut command =
        test_dir.process(&["run", "small.toml", "--device", "sim:gpu.json", "-o", "out", "--shard", "1/8"]);
    command.envs([("SLURM_JOB_ID", "57"), ("SLURM_ARRAY_JOB_ID", "55"), ("SLURM_ARRAY_TASK_ID", "2")]);
    Ran::of(command.output().unwrap()).ok();
    let experiment = json_at(&test_dir.at("out/small/experiment.json"));
    assert_eq!(keys(&experiment, ""), described("experiment.json"));
    let record = json_at(&test_dir.at("out/small/runs/00-naive-5-r0/run.json"));
    let provenance = described("Provenance");
    for of in [&experiment["provenance"], &record["provenance"]] {
        let unknown: Vec<String> = keys(of, "job").into_iter().filter(|key| !provenance.contains(key)).collect();
        assert_eq!(unknown, [""; 0], "not described");
        assert!(of["build_profile"].is_string(), "{of}");
        assert_eq!(of["job"], json!({"id": "57", "array_id": "55", "array_task": "2"}));
        if let Some(commit) = of["git_commit"].as_str() {
            assert!(commit.len() >= 40 && of["git_dirty"].is_boolean(), "{of}");
        }
    }
    let mut written = keys(&record, "machine");
    // Keys that some systems or devices lack.
    let mut expected = described("run.json");
    // The plan's keys are replaced by a link to their table.
    expected.retain(|key| key != "…");
    expected.extend(described("A planned run"));
    expected.sort();
    for list in [&mut written, &mut expected] {
        list.retain(|key| !["machine.cpu", "machine.gpu", "machine.load", "machine.alone"].contains(&key.as_str()));
    }
    assert_eq!(written, expected);
    // A run's record contains all keys of the plan.
    for key in experiment["runs"][0].as_object().unwrap().keys() {
        assert_eq!(experiment["runs"][0][key], record[key], "{key}");
    }
}

/// A stand-in for Python: reports PyTorch and a GPU, and the program requires its start file.
#[cfg(unix)]
const PYTHON: &str = r#"#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi
for argument in "$@"; do
    case "$argument" in --start=*) start="${argument#--start=}" ;; esac
done
if ! [ -s "$start" ]; then echo "error: there is no start file '$start'" >&2; exit 2; fi
mkdir record && echo '{"schema_version": 1, "epochs": []}' > record/summary.json
"#;

#[cfg(unix)]
#[test]
fn pytorch_gets_the_weights_and_batches_of_its_options() {
    let test_dir = TestDir::new();
    test_dir.program("python", PYTHON);
    let python = test_dir.at("python");
    let spec = "name = \"small\"\nquestion = \"?\"\nrepeats = 1\nwarm_up = 1\nstart = true\ndevices = [\"sim\"]\n\
                [options]\ndataset = \"iris\"\nepochs = 2\nseed = 7\n[matrix]\nhidden = [5, 9]\n\
                [[arms]]\nname = \"ours\"\n[[arms]]\nname = \"theirs\"\nprogram = \"pytorch\"\ndevices = [\"sim\"]\n";
    test_dir.write("small.toml", spec);
    let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--json"]);
    let cells = Ran::of(command.env("PYTHON", &python).output().unwrap()).rows();
    assert!(cells.iter().all(|cell| cell["done"] == 1), "{cells:?}");
    assert_eq!(cells[2]["median"], Value::Null, "a record without epochs has no step time");
    let of = |id: &str| json_at(&test_dir.at("out/small/runs").join(id).join("run.json"))["command"].to_string();
    for (id, hidden) in [("02-theirs-5-r0", 5), ("03-theirs-9-r0", 9)] {
        let start = format!("--start=../../start/dataset-iris_epochs-2_seed-7_hidden-{hidden}.safetensors");
        assert!(of(id).contains(&start), "{}", of(id));
    }
    assert!(!of("00-ours-5-r0").contains("start"));
    // They are large, and can be made again.
    assert_eq!(names(&test_dir.at("out/small")), ["experiment.json", "runs"]);
}

/// A stand-in for Python and `programs.py`: its result is its command and its variables. Memory runs out under a limit
/// below 1000 bytes.
#[cfg(unix)]
const INSIDE: &str = r#"#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi
shift
limit=null
for argument in "$@"; do
    case "$argument" in
        --output=*) output="${argument#--output=}" ;;
        --limit=*) limit="${argument#--limit=}" ;;
        --history=*) mkdir record && echo text > "${argument#--history=}" ;;
    esac
done
oom=null code=0
if [ "$limit" != null ] && [ "$limit" -lt 1000 ]; then oom='"refused"' code=3; fi
cat > "$output" << END
{"words": "$*", "conf": "$PYTORCH_CUDA_ALLOC_CONF", "alloc": "$VRAMLAB_ALLOC", "path": "$PYTHONPATH", "limit": $limit, "oom": $oom,
 "ms": 2.5, "stats": {"active_bytes.all.peak": 1000, "reserved_bytes.all.peak": 2000}}
END
exit $code
"#;

#[cfg(unix)]
const INSIDE_SPEC: &str = r#"
name = "small"
question = "?"
repeats = 1
devices = ["sim"]
keep = ["history.pickle.xz"]
limits_of = "native"
[options]
program = "gpt2"
[[arms]]
name = "native"
program = "inside"
devices = ["sim"]
options = { history = true }
[[arms]]
name = "within"
program = "inside"
devices = ["sim"]
options = { conf = "expandable_segments:True" }
matrix = { limit-over-active = [1.5, 0.5] }
[[arms]]
name = "remap"
program = "inside"
devices = ["sim"]
options = { alloc = "remap:steal=always", steps = 4, small = true }
"#;

/// Runs of PyTorch's programs: allocators and settings are variables of each process, limits follow from finished runs, and
/// memory that runs out is a result.
#[cfg(unix)]
#[test]
fn programs_inside_pytorch_run_under_an_allocator_and_a_limit() {
    let test_dir = TestDir::new();
    test_dir.program("python", INSIDE);
    test_dir.write("small.toml", INSIDE_SPEC);
    let run = |python: &str| {
        let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--json"]);
        // The user's own settings must not reach a run.
        command.env("PYTORCH_ALLOC_CONF", "user").env("VRAMLAB_ALLOC", "user").env("PYTHON", test_dir.at(python));
        Ran::of(command.output().unwrap())
    };
    let cells = run("python").ok().rows();
    assert!(cells.iter().all(|cell| cell["done"] == 1 && cell["median"] == 0.0025), "{cells:?}");
    assert_eq!((&cells[0]["peak_reserved_bytes"], &cells[0]["utilisation"]), (&2000.0.into(), &0.5.into()));
    let file = |id: &str, name: &str| json_at(&test_dir.at("out/small/runs").join(id).join(name));
    let native = file("00-native-r0", "result.json");
    assert_eq!(native["words"], "gpt2 --history=record/history.pickle.xz --device=cpu --output=result.json");
    assert_eq!((&native["conf"], &native["alloc"], &native["limit"]), (&"".into(), &"".into(), &Value::Null));
    assert!(!native["path"].as_str().unwrap().contains("_site"), "{native}");
    assert_eq!(file("00-native-r0", "run.json")["files"], json!(["history.pickle.xz", "result.json"]));
    let within = ["01-within-1.5-r0", "02-within-0.5-r0"].map(|id| (file(id, "result.json"), file(id, "run.json")));
    let limits = within.each_ref().map(|(result, _)| result["limit"].as_u64());
    assert_eq!(limits, [Some(1500), Some(500)], "of the native run's active memory");
    assert_eq!(within.each_ref().map(|(_, record)| record["exit_code"].as_u64()), [Some(0), Some(3)]);
    assert!(within.iter().all(|(result, _)| result["conf"] == "expandable_segments:True"), "{within:?}");
    assert_eq!(within[0].1["command"][0], "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    let remap = file("03-remap-r0", "result.json");
    assert_eq!(remap["words"], "gpt2 --steps=4 --small --device=cpu --output=result.json");
    assert_eq!(remap["alloc"], "remap:steal=always");
    assert!(remap["path"].as_str().unwrap().contains("/_site:"), "the start hook comes first: {remap}");
    // Without the reference a limited run fails and says why; the same command tries again.
    std::fs::remove_dir_all(test_dir.at("out/small/runs/00-native-r0")).unwrap();
    std::fs::remove_dir_all(test_dir.at("out/small/runs/01-within-1.5-r0")).unwrap();
    test_dir.program("fails", "#!/bin/sh\n[ \"$1\" = -c ]\n");
    assert!(run("fails").stderr.contains("failed"));
    let error = file("01-within-1.5-r0", "run.json")["error"].to_string();
    assert!(error.contains("no finished run of arm 'native'"), "{error}");
    run("python").ok();
}

/// A budget leaves out the runs that would not end within it, as far as finished ones show; the next call makes them.
#[cfg(unix)]
#[test]
fn a_budget_leaves_runs_for_the_next_call() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    let left = run(&test_dir, &["--budget", "0"]);
    assert_eq!(left.code, Some(4), "{left:?}");
    assert!(left.stderr.contains("the budget left out 8 runs; the same command makes them"), "{left:?}");
    run(&test_dir, &["--budget", "100000"]).ok();
    let record = test_dir.at("out/small/runs/00-naive-5-r0/run.json");
    let mut value = json_at(&record);
    value["wall_s"] = json!(1e6);
    std::fs::write(&record, value.to_string()).unwrap();
    // Its repeat is expected to take as long.
    std::fs::remove_dir_all(test_dir.at("out/small/runs/01-naive-5-r1")).unwrap();
    assert!(run(&test_dir, &["--budget", "100000"]).stderr.contains("left out 1 run"));
    run(&test_dir, &[]).ok();
    // Warm-ups take time, too: these would take hours.
    let spec = SMALL.replace("repeats = 2", "repeats = 2\nwarm_up = 1000").replace("epochs = 2", "epochs = 5000");
    test_dir.write("small.toml", spec);
    assert_eq!(run(&test_dir, &["--again", "--budget", "0"]).code, Some(4));
}
