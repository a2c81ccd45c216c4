//! `experiments run` and `experiments list` as a user meets them.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::{HANGS, Place, Ran, names};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// A small spec on iris: two allocators, two widths.
const SMALL: &str = r#"
name = "small"
question = "Is it there?"
repeats = 2
devices = ["cuda", "sim"]
keep = ["summary.json", "steps.csv"]

[options]
dataset = "iris"
layers = 2
epochs = 2

[matrix]
alloc = ["naive", "caching"]
hidden = [5, 9]
"#;

fn run(place: &Place, more: &[&str]) -> Ran {
    place.run(&[&["run", "small.toml", "--device", "sim", "-o", "out"], more].concat())
}

fn json_at(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// Each run's folder with the text of its `run.json`.
fn runs(place: &Place, out: &str) -> BTreeMap<String, String> {
    let folder = place.at(out).join("small/runs");
    let read = |name: String| (name.clone(), std::fs::read_to_string(folder.join(name).join("run.json")).unwrap());
    names(&folder).into_iter().map(read).collect()
}

/// The ids that a spec of eight runs has.
const IDS: [&str; 8] = [
    "00-naive-5-r0",
    "01-naive-5-r1",
    "02-naive-9-r0",
    "03-naive-9-r1",
    "04-caching-5-r0",
    "05-caching-5-r1",
    "06-caching-9-r0",
    "07-caching-9-r1",
];

#[test]
fn an_experiment_leaves_its_spec_and_a_folder_for_each_run() {
    let place = Place::new();
    place.write("small.toml", SMALL);
    let ran = run(&place, &["--json"]).ok();
    let cells = ran.json();
    assert_eq!(cells.as_array().unwrap().len(), 4);
    for cell in cells.as_array().unwrap() {
        assert_eq!((&cell["done"], &cell["planned"], &cell["failed"]), (&json!(2), &json!(2), &json!(0)), "{cell}");
        assert!(cell["median"].as_f64().unwrap() > 0.0 && cell["measure"] == "step_time");
        assert_eq!(cell["spread"], 0.0, "simulated time does not vary");
    }
    let experiment = json_at(&place.at("out/small/experiment.json"));
    assert_eq!((&experiment["schema_version"], &experiment["name"]), (&json!(1), &json!("small")));
    assert_eq!(experiment["question"], "Is it there?");
    assert_eq!(experiment["spec"]["matrix"], json!({"alloc": ["naive", "caching"], "hidden": [5, 9]}));
    assert_eq!(experiment["command"], json!(["experiments", "run", "small", "--device", "sim"]));
    let planned: Vec<&str> =
        experiment["runs"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    assert_eq!(planned, IDS);

    let found = runs(&place, "out");
    assert_eq!(found.keys().collect::<Vec<_>>(), IDS);
    let mut positions = Vec::new();
    for (id, text) in &found {
        let record: Value = serde_json::from_str(text).unwrap();
        assert_eq!((&record["id"], &record["status"], &record["exit_code"]), (&json!(id), &json!("done"), &json!(0)));
        assert_eq!(record["spec_sha256"], experiment["spec_sha256"]);
        assert_eq!(record["files"], json!(["summary.json", "steps.csv"]));
        assert_eq!(record["options"]["epochs"], 2);
        assert!(record["machine"]["cores"].as_u64().unwrap() > 0 && record["wall_s"].as_f64().unwrap() > 0.0);
        let folder = place.at("out/small/runs").join(id);
        assert_eq!(names(&folder), ["run.json", "steps.csv", "summary.json"]);
        let summary = json_at(&folder.join("summary.json"));
        assert_eq!(summary["settings"]["allocator"], record["options"]["alloc"]);
        assert_eq!(summary["settings"]["hidden"], record["options"]["hidden"]);
        positions.push(record["position"].as_u64().unwrap());
    }
    positions.sort_unstable();
    assert_eq!(positions, (0..8).collect::<Vec<u64>>());
    // Nothing of this machine's folders is in any file.
    let here = place.0.path().to_str().unwrap();
    for id in IDS {
        for file in names(&place.at("out/small/runs").join(id)) {
            let text = std::fs::read_to_string(place.at("out/small/runs").join(id).join(&file)).unwrap();
            assert!(!text.contains(here), "{id}/{file} names {here}");
        }
    }
    // Once more: nothing to do, nothing changed, the same table.
    let again = run(&place, &["--json"]).ok();
    assert_eq!(again.stdout, ran.stdout);
    assert_eq!(runs(&place, "out"), found);
}

#[test]
fn a_killed_runner_goes_on_where_it_was() {
    let place = Place::new();
    place.write("small.toml", SMALL.replace("hidden = [5, 9]", "hidden = [5, 9]\nseed = [1, 2, 3, 4, 5]"));
    let arguments = ["run", "small.toml", "--device", "sim", "-o", "out"];
    let mut child = place.process(&arguments).stdout(std::process::Stdio::null()).spawn().unwrap();
    let folder = place.at("out/small/runs");
    let whole = || {
        let names = if folder.is_dir() { names(&folder) } else { Vec::new() };
        names.into_iter().filter(|name| !name.starts_with('.')).count()
    };
    let begun = Instant::now();
    while whole() < 3 {
        assert!(begun.elapsed() < HANGS, "it should have done three runs");
        assert!(child.try_wait().unwrap().is_none(), "it should be running");
        std::thread::sleep(Duration::from_millis(1));
    }
    // SIGKILL: nothing can be tidied up.
    child.kill().unwrap();
    child.wait().unwrap();
    let before: BTreeMap<String, String> = names(&folder)
        .into_iter()
        .filter(|name| !name.starts_with('.'))
        .map(|name| (name.clone(), std::fs::read_to_string(folder.join(name).join("run.json")).unwrap()))
        .collect();
    assert!((3..40).contains(&before.len()), "{}", before.len());
    place.run(&arguments).ok();
    let after = runs(&place, "out");
    assert_eq!(after.len(), 40, "nothing is lost, nothing half-written is left");
    for (id, text) in before {
        assert_eq!(after[&id], text, "{id} should not be repeated");
    }
}

#[test]
fn shards_put_together_are_the_whole() {
    let place = Place::new();
    place.write("small.toml", SMALL);
    for (shard, out) in [("1/2", "a"), ("2/2", "b")] {
        place.run(&["run", "small.toml", "--device", "sim", "--shard", shard, "-o", out]).ok();
    }
    let (first, second) = (runs(&place, "a"), runs(&place, "b"));
    assert_eq!((first.len(), second.len()), (4, 4));
    for id in second.keys() {
        std::fs::rename(place.at("b/small/runs").join(id), place.at("a/small/runs").join(id)).unwrap();
    }
    assert_eq!(runs(&place, "a").keys().collect::<Vec<_>>(), IDS);
    let merged = place.run(&["run", "small.toml", "--device", "sim", "-o", "a", "--json"]).ok();
    let done: Vec<u64> = merged.rows().iter().map(|cell| cell["done"].as_u64().unwrap()).collect();
    assert_eq!(done, [2, 2, 2, 2]);
    let mut together = first;
    together.extend(second);
    assert_eq!(runs(&place, "a"), together, "there was nothing left to do");
}

#[test]
fn a_failing_arm_is_recorded_and_the_others_go_on() {
    let place = Place::new();
    // With this limit the wider network does not fit.
    let spec =
        SMALL.replace("hidden = [5, 9]", "hidden = [5, 900]\nmemory-limit = [\"40K\"]").replace(", \"caching\"", "");
    place.write("small.toml", &spec);
    let ran = run(&place, &[]);
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    assert!(ran.stdout.contains("0/2 2 failed") && ran.stdout.contains("2/2"), "{ran:#?}");
    let last = ran.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: 2 runs failed; small/0") && last.contains("out of memory"), "{last}");
    let found = runs(&place, "out");
    let failed: Vec<Value> = found
        .values()
        .map(|text| serde_json::from_str::<Value>(text).unwrap())
        .filter(|record| record["status"] == "failed")
        .collect();
    assert_eq!(failed.len(), 2);
    for record in failed {
        assert_eq!((&record["exit_code"], &record["options"]["hidden"]), (&json!(1), &json!(900)));
        assert!(record["error"].as_str().unwrap().contains("out of memory"), "{record}");
    }
    // What failed is tried again, what is done is not.
    assert_eq!(run(&place, &[]).code, Some(1));
    let again = runs(&place, "out");
    for (id, text) in found.iter().filter(|(_, text)| text.contains("\"done\"")) {
        assert_eq!(&again[id], text);
    }
}

#[test]
fn arms_that_cannot_run_here_are_skipped_with_a_reason() {
    let place = Place::new();
    let spec = SMALL.to_owned()
        + "[[arms]]\nname = \"ours\"\n[[arms]]\nname = \"theirs\"\nprogram = \"pytorch\"\ndevices = [\"sim\"]\n";
    // The matrix has an axis that PyTorch does not know.
    place.write("small.toml", &spec);
    run(&place, &[]).refused(2, &["small.toml:", "--alloc is no option of pytorch"]);
    // What both programs have takes the same values, alone and together.
    let spec = spec.replace("alloc = [\"naive\", \"caching\"]", "");
    place.write(
        "small.toml",
        spec.replace("devices = [\"sim\"]\n", "devices = [\"sim\"]\n[arms.options]\ndtype = \"f64\"\n"),
    );
    run(&place, &[]).refused(2, &["small.toml:2", "invalid value 'f64'"]);
    place.write(
        "small.toml",
        spec.replace("devices = [\"sim\"]\n", "devices = [\"sim\"]\n[arms.options]\nweights = \"half\"\n"),
    );
    run(&place, &[]).refused(2, &["small.toml:1: theirs 5", "--weights half needs --dtype bf16 or f16, found f32"]);
    place.write("small.toml", &spec);
    let mut command = place.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    let ran = Ran::of(command.env("PYTHON", "no-such-python").output().unwrap()).ok();
    let note = ran.stderr.lines().find(|line| line.contains("skipped")).unwrap();
    assert!(note.starts_with("note: small: 4 runs of PyTorch are skipped: "), "{note}");
    assert!(ran.stdout.contains("0/2 2 skipped"), "{}", ran.stdout);
    let found = runs(&place, "out");
    let record: Value = serde_json::from_str(&found["04-theirs-5-r0"]).unwrap();
    assert_eq!((&record["status"], &record["files"]), (&json!("skipped"), &json!([])));
    assert!(!record["error"].as_str().unwrap().is_empty());
}

#[test]
fn what_cannot_work_is_refused_before_anything_runs() {
    let place = Place::new();
    for (from, to, words) in [
        // The file.
        ("question", "qestion", ["small.toml:3", "unknown field `qestion`"]),
        ("repeats = 2", "repeats = 0", ["small.toml:4", "repeats lie between"]),
        ("repeats = 2", "repeats = ", ["small.toml:4", "small.toml"]),
        ("\"small\"", "\"other\"", ["small.toml:2", "the name is 'other' and the file is 'small'"]),
        ("\"cuda\", ", "\"tpu\", ", ["small.toml:5", "unknown variant `tpu`"]),
        ("steps.csv", "stops.csv", ["small.toml:6", "no run writes 'stops.csv'"]),
        ("question = \"Is it there?\"", "question = \"\"", ["small.toml:3", "write it down"]),
        // The options.
        ("hidden = ", "hiden = ", ["small.toml:15", "a similar argument exists: '--hidden'"]),
        ("[5, 9]", "[5, 0]", ["small.toml:15", "--hidden must be at least 1"]),
        ("[5, 9]", "[5, \"nine\"]", ["small.toml:15", "invalid value 'nine'"]),
        ("[5, 9]", "[5, 5]", ["small.toml:15", "has the value 5 twice"]),
        ("[5, 9]", "[]", ["small.toml:15", "has no value"]),
        ("[5, 9]", "5", ["small.toml:15", "an axis is a list"]),
        ("\"naive\", ", "\"naiv\", ", ["small.toml:14", "invalid value 'naiv'"]),
        ("layers = 2", "layers = [2]", ["small.toml:10", "an option has one value"]),
        ("layers = 2", "hidden = 2", ["small.toml:15", "'hidden' is an option and an axis"]),
        ("layers = 2", "out = \"here\"", ["small.toml:10", "the runner sets --out itself"]),
        ("layers = 2", "gc-threshold = 0.5", ["small.toml:1", "--memory-limit, which is not given"]),
        ("layers = 2", "trace = 1", ["small.toml:10", "write trace = true"]),
        ("layers = 2", "weights = \"half\"", ["small.toml:1:", "--weights half needs --dtype bf16 or f16, found f32"]),
        ("layers = 2", "weights = \"hlaf\"", ["small.toml:10", "invalid value 'hlaf'"]),
        // Options of the runner, and what a command line would understand as one of them.
        ("layers = 2", "\"save-start\" = \"/x\"", ["small.toml:10", "the runner sets --save-start itself"]),
        ("layers = 2", "\"save-start=/x\" = 2", ["small.toml:10", "'save-start=/x' is no name of an option"]),
        ("layers = 2", "\"data-dir=\" = \"/x\"", ["small.toml:10", "'data-dir=' is no name of an option"]),
        ("layers = 2", "\"--out\" = \"/x\"", ["small.toml:10", "'--out' is no name of an option"]),
        ("layers = 2", "\"-o\" = \"/x\"", ["small.toml:10", "'-o' is no name of an option"]),
        ("layers = 2", "o = \"/x\"", ["small.toml:10", "unexpected argument '--o'"]),
        ("layers = 2", "sav = \"/x\"", ["small.toml:10", "unexpected argument '--sav'"]),
        ("layers = 2", "save_start = \"/x\"", ["small.toml:10", "'save_start' is no name of an option"]),
        ("layers = 2", "OUT = \"/x\"", ["small.toml:10", "'OUT' is no name of an option"]),
        ("layers = 2", "\"\" = \"/x\"", ["small.toml:10", "'' is no name of an option"]),
        ("layers = 2", "\"layers 2\" = 2", ["small.toml:10", "'layers 2' is no name of an option"]),
        ("layers = 2", "\"layers\\u0000\" = 2", ["small.toml:10", "is no name of an option"]),
        ("layers = 2", "layers = \"--out=/x\"", ["small.toml:", "invalid value '--out=/x'"]),
        ("layers = 2", "dataset = \"iris\\u0000\"", ["small.toml:", "small.toml"]),
    ] {
        assert!(SMALL.contains(from), "{from}");
        place.write("small.toml", SMALL.replacen(from, to, 1));
        run(&place, &[]).refused(2, &words[1..]);
        let stderr = run(&place, &["--dry-run"]).stderr;
        assert!(stderr.contains(words[0]), "{} is missing: {stderr}", words[0]);
        assert!(!place.at("out").exists(), "{to}");
    }
    place.write("small.toml", SMALL);
    place.run(&["run", "missing.toml"]).refused(2, &["cannot read missing.toml"]);
    place.run(&["run", "no-such-spec"]).refused(2, &["there is no spec 'no-such-spec'", "width"]);
    for arguments in [&["--shard", "3/2"][..], &["--device", "tpu"], &["--nonsense"]] {
        let ran = place.run(&[&["run", "small.toml"], arguments].concat());
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:#?}");
    }
    // Histories that are not there.
    let spec = "name = \"small\"\nquestion = \"?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"a\"\nprogram = \"replay\"\n\
                [arms.options]\nhistory = \"gone.pickle\"\n";
    place.write("small.toml", spec);
    run(&place, &["--histories", "."]).refused(2, &["small.toml:8", "gone.pickle", "--histories"]);
    place.run(&["run", "small.toml", "--device", "cuda"]).refused(2, &["small is not for cuda", "--device sim"]);
}

#[test]
fn what_a_spec_names_lies_in_the_folder_of_the_histories() {
    let place = Place::new();
    place.write("secret", "{}");
    std::fs::create_dir(place.at("histories")).unwrap();
    place.write("histories/--json", "");
    let absolute = place.at("secret").to_str().unwrap().to_owned();
    for name in ["../secret", absolute.as_str(), "--json", "-h", "--out=/x", ".", ""] {
        let spec = format!(
            "name = \"small\"\nquestion = \"?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"a\"\nprogram = \"replay\"\n\
             [arms.options]\nhistory = \"{name}\"\n"
        );
        place.write("small.toml", spec);
        run(&place, &["--histories", "histories"]).refused(2, &["small.toml:8", "in the folder of the histories"]);
    }
    // Nor the folder from which `bench` starts programs.
    let spec = "name = \"small\"\nquestion = \"?\"\ndevices = [\"sim\"]\n[[arms]]\nname = \"a\"\nprogram = \"bench\"\n\
                [arms.options]\nbaselines = true\nbaselines-dir = \".\"\n";
    place.write("small.toml", spec);
    run(&place, &[]).refused(2, &["small.toml:9", "the runner sets --baselines-dir itself"]);
}

#[test]
fn a_matrix_that_is_too_large_is_refused_before_it_is_built() {
    let place = Place::new();
    let spec = |axes: &str, arms: &str| {
        format!("name = \"small\"\nquestion = \"?\"\nrepeats = 1\ndevices = [\"sim\"]\n[matrix]\n{axes}{arms}")
    };
    // 64 axes of two values are 2^64 cells, which a product of 64 bits counts as none; the keys are not looked at before.
    let wraps: String = (0..64).map(|axis| format!("axis-{axis} = [1, 2]\n")).collect();
    // 17 * 600 runs, each arm alone far below the bound.
    let seeds = format!("seed = {:?}\n", (0..600).collect::<Vec<u32>>());
    let arms: String = (0..17).map(|arm| format!("[[arms]]\nname = \"a{arm}\"\n")).collect();
    let repeated = "[sim]\nrepeats = 1000\n";
    for text in [spec(&wraps, ""), spec(&seeds, &arms), spec(&seeds, repeated)] {
        place.write("small.toml", text);
        run(&place, &[]).refused(2, &["small.toml: more than 10000 runs on sim; shorten the matrix"]);
    }
    place.write("small.toml", spec("seed = [1]\n", "[[arms]]\nname = \"a\"\n[arms.sim]\nrepeats = 1001\n"));
    run(&place, &[]).refused(2, &["small.toml:", "repeats lie between 1 and 1000"]);
    // A file that never ends is not read to its end.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("/dev/zero", place.at("endless.toml")).unwrap();
        place.run(&["run", "endless.toml"]).refused(2, &["endless.toml is longer than 1048576 bytes"]);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_said_once() {
    let place = Place::new();
    if allocators::CudaDriver::probe().is_ok() {
        println!("skipped: there is a GPU here");
        return;
    }
    place.write("small.toml", SMALL);
    place.run(&["run", "small.toml", "--device", "cuda", "-o", "out"]).refused(2, &["--device cuda: "]);
    assert!(!place.at("out").exists());
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let place = Place::new();
    place.write("small.toml", SMALL);
    std::fs::create_dir_all(place.at("out/small")).unwrap();
    run(&place, &["--dry-run"]).ok();
    let stranger = place.at("out/small/thesis.txt");
    std::fs::write(&stranger, "dear").unwrap();
    run(&place, &[]).refused(2, &["holds no experiment.json", "with -o"]);
    run(&place, &["--again"]).refused(2, &["--again will not remove it"]);
    assert!(stranger.exists());

    std::fs::remove_file(&stranger).unwrap();
    run(&place, &[]).ok();
    let found = runs(&place, "out");
    // A comment changes nothing; a value does.
    place.write("small.toml", format!("# better\n{SMALL}"));
    run(&place, &[]).ok();
    assert_eq!(runs(&place, "out"), found);
    place.write("small.toml", SMALL.replace("epochs = 2", "epochs = 1"));
    run(&place, &[]).refused(2, &["another version of this spec", "-o", "--again"]);
    assert_eq!(runs(&place, "out"), found);
    run(&place, &["--again"]).ok();
    assert_eq!(runs(&place, "out").len(), 8);
    assert_ne!(runs(&place, "out"), found);

    let path = place.at("out/small/experiment.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for (broken, words) in [
        (text.replace("\"schema_version\": 1", "\"schema_version\": 9"), "schema version 9"),
        (text.replace("\"device\": \"sim\"", "\"device\": \"cuda\""), "holds runs on cuda, not on sim"),
        (text[..text.len() / 2].to_owned(), "is not JSON"),
        ("{}".to_owned(), "has no schema_version"),
    ] {
        std::fs::write(&path, broken).unwrap();
        run(&place, &[]).refused(2, &[words]);
    }
    std::fs::write(&path, text).unwrap();
    std::fs::write(place.at("out/small/runs/00-naive-5-r0/run.json"), "{").unwrap();
    run(&place, &[]).refused(2, &["00-naive-5-r0/run.json", "is not JSON"]);
}

#[test]
fn histories_are_replayed_and_named_without_their_folder() {
    let place = Place::new();
    let line = |action: &str, addr: u64| {
        json!({"time_ns": 0, "action": action, "addr": addr, "size": 4096, "block": 4096, "stream": 1, "path": "hit"})
            .to_string()
    };
    std::fs::create_dir(place.at("recorded")).unwrap();
    std::fs::write(place.at("recorded/h.jsonl"), [line("alloc", 4096), line("free_requested", 4096)].join("\n"))
        .unwrap();
    let spec = "name = \"small\"\nquestion = \"?\"\nrepeats = 1\ndevices = [\"sim\"]\n\
                [matrix]\nhistory = [\"h.jsonl\"]\nalloc = [\"naive\", \"stream-ordered\"]\n\
                [[arms]]\nname = \"replay\"\nprogram = \"replay\"\n[arms.options]\nrelease-threshold = \"0\"\n\
                [[arms]]\nname = \"capacity\"\nprogram = \"capacity\"\n";
    place.write("small.toml", spec);
    let cells = run(&place, &["--histories", "recorded", "--json"]).rows();
    let measures: Vec<&str> = cells.iter().map(|cell| cell["measure"].as_str().unwrap()).collect();
    assert_eq!(measures, ["simulated_time", "simulated_time", "capacity", "capacity"]);
    let folder = place.at("out/small/runs/01-replay-h.jsonl-stream-ordered-r0");
    let result = json_at(&folder.join("result.json"));
    assert_eq!((&result[0]["trace"], &result[0]["allocator"]), (&json!("h.jsonl"), &json!("stream-ordered")));
    assert_eq!(result[0]["allocator_settings"]["release_threshold"], 0);
    let record = json_at(&folder.join("run.json"));
    assert_eq!(record["files"], json!(["result.json"]));
    let command = record["command"].as_array().unwrap();
    assert_eq!(command[..3], [json!("experiments"), json!("replay"), json!("h.jsonl")]);
}

#[test]
fn large_files_are_compressed() {
    let place = Place::new();
    let spec = SMALL.replace("alloc = [\"naive\", \"caching\"]\nhidden = [5, 9]", "alloc = [\"naive\"]");
    let spec = spec.replace("repeats = 2", "repeats = 1").replace("epochs = 2", "epochs = 300\nbatch = 4");
    place.write("small.toml", spec);
    run(&place, &[]).ok();
    let folder = place.at("out/small/runs/00-naive-r0");
    assert_eq!(names(&folder), ["run.json", "steps.csv.gz", "summary.json"]);
    assert_eq!(json_at(&folder.join("run.json"))["files"], json!(["summary.json", "steps.csv.gz"]));
    let bytes = std::fs::read(folder.join("steps.csv.gz")).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(bytes.as_slice()), &mut text).unwrap();
    assert!(text.starts_with("epoch,step,") && text.lines().count() > 3000);
}

#[test]
fn a_second_runner_leaves_the_first_alone() {
    let place = Place::new();
    place.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000"));
    let mut first = place.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    let mut first = first.stderr(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn().unwrap();
    let (folder, begun) = (place.at("out/small/runs"), Instant::now());
    let unfinished = || if folder.is_dir() { names(&folder) } else { Vec::new() };
    while unfinished().is_empty() {
        assert!(begun.elapsed() < HANGS, "it should have begun a run");
        std::thread::sleep(Duration::from_millis(5));
    }
    let before = unfinished();
    for more in [&[][..], &["--again"], &["--shard", "2/2"]] {
        run(&place, more).refused(2, &["another run is at work in", "out/small;", "with -o"]);
    }
    assert_eq!(before.len(), 1);
    assert_eq!(unfinished(), before, "nothing of the first is gone");
    assert!(first.try_wait().unwrap().is_none(), "it is still at work");
    // To look is allowed, and so is another experiment beside it.
    run(&place, &["--dry-run"]).ok();
    place.write("other.toml", SMALL.replace("\"small\"", "\"other\""));
    place.run(&["run", "other.toml", "--device", "sim", "-o", "out"]).ok();
    // A killed one leaves its lock's file, and no lock.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(place.at("out/.small.lock").exists());
    place.write("small.toml", SMALL);
    run(&place, &["--again"]).ok();
    assert_eq!(runs(&place, "out").len(), 8);
    assert_eq!(names(&place.at("out")), ["other", "small"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_it_cleanly() {
    let place = Place::new();
    place.write("small.toml", SMALL.replace("epochs = 2", "epochs = 5000"));
    let mut command = place.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    let child = command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let folder = place.at("out/small/runs");
    let begun = Instant::now();
    while !folder.is_dir() || names(&folder).is_empty() {
        assert!(begun.elapsed() < HANGS, "it should have begun a run");
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{ran:#?}");
    assert!(ran.stderr.contains("interrupted in small; what was done is kept"), "{ran:#?}");
    assert!(names(&folder).iter().all(|name| !name.starts_with('.')), "{:?}", names(&folder));
}

#[test]
fn the_specs_of_the_study_are_listed_and_can_be_planned() {
    let place = Place::new();
    let rows = place.run(&["list", "--json"]).rows();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    for name in [
        "where-time-goes",
        "when-allocations-stop",
        "caching-vs-stream-ordered",
        "release-threshold",
        "reuse-policies",
        "synchronise",
        "loader",
        "initialisation",
        "loss-against-pytorch",
        "width",
        "memory",
        "iris",
        "pytorch-histories",
        "capacity",
        "pytorch-loaders",
        "latency",
        "fidelity",
        "fast-training",
        "fast-training-compile",
        "graph-allocators",
        "fusion-load",
        "streams",
        "full-batch",
        "half-losses",
    ] {
        assert!(names.contains(&name), "{name} is missing: {names:?}");
    }
    let text = place.run(&["list"]).ok().stdout;
    assert!(text.contains("runs on sim") && text.contains("where-time-goes"), "{text}");
    std::fs::create_dir(place.at("histories")).unwrap();
    for history in ["mlp", "gpt2", "resnet50", "streams"] {
        std::fs::write(place.at("histories").join(format!("{history}.pickle.xz")), "").unwrap();
    }
    for row in &rows {
        assert!(row["question"].as_str().unwrap().ends_with('?'), "{row}");
        for device in row["devices"].as_array().unwrap() {
            let device = device.as_str().unwrap();
            let name = row["name"].as_str().unwrap();
            let plan =
                place.run(&["run", name, "--device", device, "--dry-run", "--histories", "histories"]).ok().stdout;
            let runs = row[format!("runs_{device}")].as_u64().unwrap();
            assert_eq!(plan.lines().filter(|line| line.contains(" to do ")).count() as u64, runs, "{plan}");
        }
    }
}

/// The keys that a section of the schema describes.
fn described(section: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../analysis/schema.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, text) = text.split_once(&format!("\n## {section}\n")).unwrap();
    let rows = text.lines().take_while(|line| !line.starts_with('#')).filter(|line| line.starts_with("| `"));
    let mut keys: Vec<String> =
        rows.map(|row| row.split('`').nth(1).unwrap().trim_end_matches("[]").to_owned()).collect();
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
    let place = Place::new();
    place.write("small.toml", SMALL);
    let mut command = place.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--shard", "1/8"]);
    command.envs([("SLURM_JOB_ID", "57"), ("SLURM_ARRAY_JOB_ID", "55"), ("SLURM_ARRAY_TASK_ID", "2")]);
    Ran::of(command.output().unwrap()).ok();
    let experiment = json_at(&place.at("out/small/experiment.json"));
    assert_eq!(keys(&experiment, ""), described("experiment.json"));
    let record = json_at(&place.at("out/small/runs/00-naive-5-r0/run.json"));
    let provenance = described("Provenance");
    for of in [&experiment["provenance"], &record["provenance"]] {
        let unknown: Vec<String> = keys(of, "job").into_iter().filter(|key| !provenance.contains(key)).collect();
        assert_eq!(unknown, [""; 0], "not described");
        assert!(of["build_profile"].is_string() && of["opt_level"].is_string(), "{of}");
        assert_eq!(of["job"], json!({"id": "57", "array_id": "55", "array_task": "2"}));
        if let Some(commit) = of["git_commit"].as_str() {
            assert!(commit.len() >= 40 && of["git_dirty"].is_boolean(), "{of}");
        }
    }
    let mut found = keys(&record, "machine");
    // What not every system tells.
    let mut wanted = described("run.json");
    for list in [&mut found, &mut wanted] {
        list.retain(|key| key != "machine.cpu" && key != "machine.load");
    }
    assert_eq!(found, wanted);
    // What a plan says of a run, its record says too.
    for key in experiment["runs"][0].as_object().unwrap().keys() {
        assert_eq!(experiment["runs"][0][key], record[key], "{key}");
    }
}

/// A stand-in for Python: PyTorch and a GPU are there, and the program wants its start file.
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
    let place = Place::new();
    // Written by another process: a test beside this one may start a program while the file is open here, which then has it
    // open for writing too until its own begins, and a file that is open for writing cannot be run.
    place.file("python.sh", PYTHON);
    let mut copy = std::process::Command::new("sh");
    copy.args(["-c", "cp python.sh python && chmod 755 python"]);
    assert!(copy.current_dir(place.at(".")).status().unwrap().success());
    let python = place.at("python");
    let spec = "name = \"small\"\nquestion = \"?\"\nrepeats = 1\nwarm_up = 1\nstart = true\ndevices = [\"sim\"]\n\
                [options]\ndataset = \"iris\"\nepochs = 2\nseed = 7\n[matrix]\nhidden = [5, 9]\n\
                [[arms]]\nname = \"ours\"\n[[arms]]\nname = \"theirs\"\nprogram = \"pytorch\"\ndevices = [\"sim\"]\n";
    place.write("small.toml", spec);
    let mut command = place.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--json"]);
    let cells = Ran::of(command.env("PYTHON", &python).output().unwrap()).rows();
    assert!(cells.iter().all(|cell| cell["done"] == 1), "{cells:?}");
    assert_eq!(cells[2]["median"], Value::Null, "a record without epochs has no step time");
    let of = |id: &str| json_at(&place.at("out/small/runs").join(id).join("run.json"))["command"].to_string();
    for (id, hidden) in [("02-theirs-5-r0", 5), ("03-theirs-9-r0", 9)] {
        let start = format!("--start=../../start/dataset-iris_epochs-2_seed-7_hidden-{hidden}.safetensors");
        assert!(of(id).contains(&start), "{}", of(id));
    }
    assert!(!of("00-ours-5-r0").contains("start"));
    // They are large, and can be made again.
    assert_eq!(names(&place.at("out/small")), ["experiment.json", "runs"]);
}
