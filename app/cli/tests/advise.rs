//! `vramlab advise` end to end.

use crate::common::{
    self,
    story::{Story, script},
};
use crate::common::{Ran, TestDir};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

const MIB: u64 = 1 << 20;

/// A recording of the repository.
fn history(name: &str) -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories").join(format!("{name}.pickle.xz"));
    path.to_str().unwrap().to_owned()
}

pub(crate) fn event(action: &str, addr: u64, size: u64) -> Value {
    let addr_key = if action == "oom" { "device_free" } else { "addr" };
    json!({"action": action, addr_key: addr, "size": size, "stream": 0, "time_us": 1})
}

/// A snapshot recorded under `roundup_power2_divisions:2`, which rounds 33 MiB up to 48; the second such request fails on a device
/// with 40 MiB free.
fn rounded_out_of_memory(test_dir: &TestDir) -> String {
    let events = [
        event("segment_alloc", 1 << 30, 48 * MIB),
        event("alloc", 1 << 30, 33 * MIB),
        event("oom", 40 * MIB, 33 * MIB),
    ];
    let block = json!({"address": 1 << 30, "size": 48 * MIB, "requested_size": 33 * MIB, "state": "active_allocated"});
    let segment = json!({"device": 0, "address": 1 << 30, "total_size": 48 * MIB, "stream": 0, "segment_type": "large",
        "segment_pool_id": [0, 0], "is_expandable": false, "blocks": [block]});
    let sizes: serde_json::Map<String, Value> = (0..16).map(|at| ((1_u64 << at).to_string(), json!(2))).collect();
    let settings = json!({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:2", "max_split_size": -1,
        "garbage_collection_threshold": 0.0, "expandable_segments": false, "roundup_power2_divisions": sizes});
    let snapshot = json!({"segments": [segment], "device_traces": [events], "allocator_settings": settings});
    test_dir.write("oom.json", snapshot.to_string())
}

fn setting<'a>(advice: &'a Value, conf: &str) -> &'a Value {
    let setting = advice["settings"].as_array().unwrap().iter().find(|setting| setting["conf"] == conf);
    setting.unwrap_or_else(|| panic!("no {conf}: {advice}"))
}

#[test]
fn advise_names_the_setting_that_avoids_out_of_memory() {
    let test_dir = TestDir::new();
    let file = rounded_out_of_memory(&test_dir);
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!((&advice["limit_bytes"], &advice["limit_source"]), (&json!(88 * MIB), &json!("out-of-memory")));
    assert_eq!(advice["recorded"]["replayed"]["out_of_memory"], true, "{advice}");
    assert_eq!((&advice["verdict"], &advice["live_bytes"]), (&json!("change"), &json!(66 * MIB)));
    let first = &advice["settings"][0];
    assert_eq!((&first["out_of_memory"], &first["rank"]), (&json!(false), &json!(1)));
    assert!(first["peak_reserved_bytes"].as_u64() <= Some(68 * MIB), "{first}");
    // Exactly two segments of 34 MiB.
    let plain = test_dir.run(&["advise", &file, "--conf", "", "--json"]).ok().json();
    let plain = setting(&plain, "");
    assert_eq!((&plain["peak_reserved_bytes"], &plain["smallest_memory_bytes"]), (&json!(68 * MIB), &json!(68 * MIB)));
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let expected = [
        "Out of memory at event 3 of 3: 33 MiB requested with 48 MiB reserved, 48 MiB allocated, none free.",
        "Settings: roundup_power2_divisions:2.",
        "Inferred memory limit: about 88 MiB; override with --limit.",
        "current settings: out of memory with peak reserved 48 MiB, minimum memory 96 MiB;",
        "Peak requested: 66 MiB;",
        "The program's behaviour if memory had not run out.",
        "40 MiB were free on the device.",
        "Next: ",
    ];
    for words in expected {
        assert!(screen.contains(words), "{words}: {screen}");
    }
    assert!(screen.contains(first["export"].as_str().unwrap()), "{screen}");
}

#[test]
fn advise_names_the_minimum_memory_where_no_setting_helps() {
    let test_dir = TestDir::new();
    let file = rounded_out_of_memory(&test_dir);
    let advice = test_dir.run(&["advise", &file, "--limit", "60MiB", "--json"]).ok().json();
    assert_eq!((&advice["verdict"], &advice["limit_source"]), (&json!("out-of-memory"), &json!("given")));
    assert_eq!(advice["needed_bytes"], 68 * MIB);
    assert!(advice["settings"].as_array().unwrap().iter().all(|setting| setting["out_of_memory"] == true));
    let screen = test_dir.run(&["advise", &file, "--limit", "60MiB"]).ok().stdout;
    assert!(screen.contains("Minimum memory: 68 MiB, under:"), "{screen}");
    // `--exit-code` changes the exit code alone.
    for (limit, code) in [("60MiB", 3), ("70MiB", 0)] {
        for more in [&[][..], &["--json"], &[&file]] {
            let arguments = [&["advise", &file, "--limit", limit], more].concat();
            let (plain, coded) =
                (test_dir.run(&arguments).ok(), test_dir.run(&[&arguments[..], &["--exit-code"]].concat()));
            assert_eq!((coded.code, coded.stdout, coded.stderr), (Some(code), plain.stdout, plain.stderr));
        }
    }
}

/// A program under `garbage_collection_threshold:0.5` and a limit of 200 MiB: with 110 MiB reserved, 60 of them idle, it requests
/// 80 more. Without `complete` the segments at the end are missing.
fn collected(test_dir: &TestDir, complete: bool) -> String {
    let at = |gib: u64| gib << 30;
    let mut events = Vec::new();
    for (gib, mib) in [(1, 60), (2, 50), (3, 80)] {
        if gib == 3 {
            for action in ["free_requested", "free_completed"] {
                events.push(event(action, at(1), 60 * MIB));
            }
            events.push(event("segment_free", at(1), 60 * MIB));
        }
        events.push(event("segment_alloc", at(gib), mib * MIB));
        events.push(event("alloc", at(gib), mib * MIB));
    }
    let segment = |gib: u64, mib: u64| {
        let block =
            json!({"address": at(gib), "size": mib * MIB, "requested_size": mib * MIB, "state": "active_allocated"});
        json!({"device": 0, "address": at(gib), "total_size": mib * MIB, "stream": 0, "segment_type": "large",
            "segment_pool_id": [0, 0], "is_expandable": false, "blocks": [block]})
    };
    let settings = json!({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.5", "max_split_size": -1,
        "garbage_collection_threshold": 0.5, "expandable_segments": false, "roundup_power2_divisions": {}});
    let mut snapshot = json!({"segments": [segment(2, 50), segment(3, 80)], "device_traces": [events]});
    snapshot["allocator_settings"] = settings;
    if !complete {
        snapshot["segments"] = json!([]);
    }
    test_dir.write("collected.json", snapshot.to_string())
}

/// PyTorch collects garbage only under a limit, so collections show that there was one. Without it the replay would take these
/// releases for the program's own, and no other setting would reserve more.
#[test]
fn limit_is_inferred_from_garbage_collections() {
    let test_dir = TestDir::new();
    let file = collected(&test_dir, true);
    let confs = ["--conf", "", "--conf", "garbage_collection_threshold:0.5"];
    let advice = test_dir.run(&[&["advise", &file, "--json"], &confs[..]].concat()).ok().json();
    assert_eq!((&advice["limit_bytes"], &advice["limit_source"]), (&json!(220 * MIB - 1), &json!("collections")));
    assert_eq!(
        (&advice["recorded"]["replayed_off_percent"], &advice["unknown"]["limit"]),
        (&json!(0.0), &json!(false))
    );
    assert_eq!(setting(&advice, "")["peak_reserved_bytes"], 190 * MIB);
    assert_eq!(setting(&advice, "garbage_collection_threshold:0.5")["peak_reserved_bytes"], 130 * MIB);
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let screen = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(screen.contains("PyTorch collected garbage, which it does only under a memory limit. "), "{screen}");
    // Without the segments at the end the reserved bytes are unknown.
    let cut = test_dir.run(&["advise", &collected(&test_dir, false), "--json"]).ok().json();
    assert_eq!((&cut["limit_bytes"], &cut["unknown"]["limit"]), (&Value::Null, &json!(true)), "{cut}");
    let screen = test_dir.run(&["advise", &collected(&test_dir, false)]).ok().stdout;
    assert!(screen.contains("Pass the limit with --limit"), "{screen}");
    let file = collected(&test_dir, true);
    // For a larger GPU: the recorded collections still happened under the smaller limit.
    let larger = [&["advise", &file, "--json", "--limit", "1GiB"], &confs[..]].concat();
    let advice = test_dir.run(&larger).ok().json();
    assert_eq!((&advice["limit_source"], &advice["recorded"]["replayed_off_percent"]), (&json!("given"), &Value::Null));
    for conf in ["", "garbage_collection_threshold:0.5"] {
        assert_eq!(setting(&advice, conf)["peak_reserved_bytes"], 190 * MIB, "{conf}");
    }
}

#[test]
fn commands_warn_of_collections_under_an_unknown_limit() {
    let test_dir = TestDir::new();
    let warning = "without --limit that counts as calls of empty_cache";
    for (complete, bound) in
        [(true, format!("; it was 220.0 MiB or less: --limit {}B", 220 * MIB - 1)), (false, String::new())]
    {
        let file = collected(&test_dir, complete);
        for command in [&["replay", &file, "--device", "null"][..], &["capacity", &file], &["plan", &file]] {
            let stderr = test_dir.run(command).ok().stderr;
            assert!(stderr.contains(&format!("{warning}{bound}\n")), "{stderr}");
            let stderr = test_dir.run(&[command, &["--limit", "200MiB"]].concat()).ok().stderr;
            assert!(!stderr.contains("warning"), "{stderr}");
        }
    }
}

/// A segment that is larger than PyTorch's policy allocates for the request, so that no replay matches.
#[test]
fn advise_cautions_if_the_replay_deviates_from_the_recording() {
    let test_dir = TestDir::new();
    let events = [event("segment_alloc", 1 << 30, 100 * MIB), event("alloc", 1 << 30, 33 * MIB)];
    let blocks = json!([
        {"address": 1 << 30, "size": 33 * MIB, "requested_size": 33 * MIB, "state": "active_allocated"},
        {"address": (1 << 30) + 33 * MIB, "size": 67 * MIB, "requested_size": 0, "state": "inactive"},
    ]);
    let segment = json!({"device": 0, "address": 1 << 30, "total_size": 100 * MIB, "stream": 0, "segment_type": "large",
        "segment_pool_id": [0, 0], "is_expandable": false, "blocks": blocks});
    let file = test_dir.write(
        "off.json",
        json!({"segments": [segment], "device_traces": [events], "allocator_settings": {}}).to_string(),
    );
    let screen = test_dir.run(&["advise", &file, "--conf", "expandable_segments:True"]).ok().stdout;
    let help = screen.split("What would help").nth(1).unwrap();
    let first = "Caution: the replay of the current settings reserves 66.0 % less than recorded.";
    assert!(help.trim_start().starts_with(first), "{screen}");
    assert!(help.contains("peak reserved 40 MiB (-60.0 %)"), "{screen}");
    assert!(
        help.contains(
            "current settings: peak reserved 100 MiB recorded; replay: peak reserved 34 MiB, minimum memory 34 MiB;"
        ),
        "{screen}"
    );
}

/// PyTorch checks a request's own size, and maps full pages.
#[test]
fn settings_over_the_given_limit_are_not_advised() {
    let test_dir = TestDir::new();
    let arguments = ["advise", &history("mlp"), "--limit", "80MiB"];
    let advice = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok().json();
    assert_eq!(advice["verdict"], "out-of-memory");
    let first = &advice["settings"][0];
    assert_eq!((&first["over_limit"], &first["out_of_memory"]), (&json!(true), &json!(false)));
    assert_eq!(first["smallest_memory_bytes"], advice["needed_bytes"]);
    let needed = advice["needed_bytes"].as_u64().unwrap();
    let screen = test_dir.run(&arguments).ok().stdout;
    assert!(screen.contains(&format!("Minimum memory: {} MiB, under:", needed / MIB)), "{screen}");
    assert!(screen.contains("above the limit") && screen.contains("set_per_process_memory_fraction"), "{screen}");
    // The minimum memory is enough, and is not exceeded.
    let limit = format!("{}MiB", needed / MIB);
    let advice = test_dir.run(&["advise", &history("mlp"), "--limit", &limit, "--json"]).ok().json();
    assert!(
        advice["verdict"] != "out-of-memory" && advice["settings"][0]["peak_reserved_bytes"].as_u64() <= Some(needed)
    );
}

#[test]
fn settings_of_a_recorded_program_are_ranked_by_their_peak() {
    let test_dir = TestDir::new();
    let advice = test_dir.run(&["advise", &history("mlp"), "--json"]).ok().json();
    let recorded = &advice["recorded"];
    assert_eq!(recorded["replayed"]["peak_reserved_bytes"], recorded["peak_reserved_bytes"]);
    assert_eq!(recorded["replayed_off_percent"], 0.0);
    assert_eq!(advice["torch"], "2.10 or 2.11", "PyTorch 2.11 recorded it");
    assert!(advice["limit_bytes"].is_null() && recorded["out_of_memory"].is_null());
    let settings = advice["settings"].as_array().unwrap();
    let tried = advice["also_tried"].as_array().unwrap();
    assert!(settings.len() > 2 && settings.len() + tried.len() > 20, "{advice}");
    let least =
        |list: &[Value]| list.iter().map(|setting| setting["peak_reserved_bytes"].as_u64().unwrap()).min().unwrap();
    let best = settings[0]["peak_reserved_bytes"].as_u64().unwrap() as f64;
    assert!(best <= least(settings).min(least(tried)) as f64 * 1.005);
    for (at, setting) in settings.iter().enumerate() {
        let (smallest, live) =
            (setting["smallest_memory_bytes"].as_u64().unwrap(), advice["live_bytes"].as_u64().unwrap());
        assert!(smallest >= live && setting["rank"] == at + 1 && setting["out_of_memory"] == false, "{setting}");
    }
    // No setting reserves less than the bound.
    let bound = advice["lower_bound_bytes"].as_u64().unwrap();
    assert!(bound <= advice["plan_bytes"].as_u64().unwrap() && bound <= least(settings));
    let other = advice["other_allocators"].as_array().unwrap();
    assert!(other.iter().any(|other| other["alloc"] == "stream-ordered"), "{other:?}");
}

#[test]
fn conf_arguments_replace_the_search() {
    let test_dir = TestDir::new();
    let confs = [
        "expandable_segments:True",
        "max_split_size_mb:32, roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "garbage_collection_threshold:0.6",
        "backend:cudaMallocAsync",
        "",
    ];
    let mut arguments = vec!["advise", "h", "--limit", "300MiB", "--json"];
    let file = history("mlp");
    arguments[1] = &file;
    confs.iter().for_each(|conf| arguments.extend(["--conf", conf]));
    let advice = test_dir.run(&arguments).ok().json();
    let confs_in_answer: BTreeSet<&str> =
        advice["settings"].as_array().unwrap().iter().map(|setting| setting["conf"].as_str().unwrap()).collect();
    assert_eq!(confs_in_answer, BTreeSet::from(confs));
    assert_eq!(advice["also_tried"], json!([]));
    for key in ["peak_reserved_bytes", "smallest_memory_bytes"] {
        assert!(confs.iter().all(|conf| setting(&advice, conf)[key].as_u64() > Some(0)), "{key}: {advice}");
    }
    let ranked = advice["settings"].as_array().unwrap();
    let peaks: Vec<u64> = ranked.iter().map(|setting| setting["peak_reserved_bytes"].as_u64().unwrap()).collect();
    assert!(peaks.windows(2).all(|pair| pair[0] as f64 <= pair[1] as f64 * 1.005), "{peaks:?}");
}

/// Two ranks of one job: the second needs less, and one setting must serve both.
#[test]
fn ranks_share_one_setting_and_a_table() {
    let test_dir = TestDir::new();
    let files = ["ranks/gpt2_fsdp1.rank0", "ranks/gpt2_fsdp1.rank1"].map(history);
    let confs = ["--conf", "", "--conf", "expandable_segments:True"];
    let arguments = [&["advise", &files[0], &files[1]], &confs[..]].concat();
    let found = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok().json();
    let ranks = found["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    for (at, setting) in found["settings"].as_array().unwrap().iter().enumerate() {
        let of = |key: &str| ranks.iter().map(move |rank| rank["settings"][at][key].as_u64().unwrap()).max();
        for key in ["peak_reserved_bytes", "smallest_memory_bytes"] {
            assert_eq!(setting[key].as_u64(), of(key), "{setting}");
        }
        assert_eq!((&setting["rank"], &setting["out_of_memory"]), (&json!(at + 1), &json!(false)));
    }
    let most = ranks.iter().max_by_key(|rank| rank["recorded_peak_reserved_bytes"].as_u64()).unwrap();
    assert_eq!(found["worst"]["trace"], most["trace"]);
    let table = test_dir.run(&arguments).ok().stdout;
    for words in [
        "2 recordings",
        "gpt2_fsdp1.rank1.pickle.xz",
        "1. PyTorch's defaults",
        "minimum memory for all ranks",
        "What happened",
    ] {
        assert!(table.contains(words), "{words}: {table}");
    }
    // A shard has a table of its own recordings.
    let share = test_dir.run(&[&arguments[..], &["--shard", "2/2", "--json"]].concat()).ok().json();
    assert_eq!(share["ranks"].as_array().unwrap().len(), 1);
    assert_eq!(share["worst"]["trace"], files[1]);
    test_dir.run(&["advise", &files[0], "--shard", "2/2"]).refused(2, &["--shard 2/2: there is 1 recording;"]);
}

/// Files that cannot be read are left out, and the table shows the outliers of many recordings.
#[test]
fn unreadable_ranks_are_left_out() {
    let test_dir = TestDir::new();
    let junk = test_dir.write("junk.pickle", "no snapshot\n");
    let snapshot = std::fs::read_to_string(rounded_out_of_memory(&test_dir)).unwrap();
    let mut files: Vec<String> = (0..10).map(|rank| test_dir.write(&format!("rank{rank}.json"), &snapshot)).collect();
    files.push(junk.clone());
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let arguments = [&["advise"], &files[..], &["--conf", ""]].concat();
    let output = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok();
    assert!(
        output.stderr.contains("junk.pickle") && output.stderr.contains("continuing without it"),
        "{}",
        output.stderr
    );
    let found = output.json();
    assert_eq!((found["ranks"].as_array().unwrap().len(), &found["unread"][0]["trace"]), (10, &json!(junk)));
    let table = test_dir.run(&arguments).ok().stdout;
    assert!(table.contains("10 recordings") && table.contains("2 more are nearer to the median"), "{table}");
    test_dir.run(&["advise", &junk, &junk]).refused(2, &["none of the 2 recordings could be read"]);
}

/// The program was killed between a free and its completion, before it wrote its settings.
#[test]
fn truncated_file_is_answered_for_its_events() {
    let test_dir = TestDir::new();
    let mut events = vec![event("segment_alloc", 1 << 30, 48 * MIB)];
    for _ in 0..3 {
        for action in ["alloc", "free_requested", "free_completed"] {
            events.push(event(action, 1 << 30, 33 * MIB));
        }
    }
    let snapshot = json!({"segments": [], "device_traces": [events], "allocator_settings": {}}).to_string();
    let end = snapshot.rfind("{\"action\":\"free_completed\"").unwrap();
    let file = test_dir.write("cut.json", &snapshot[..end + 9]);
    let output = test_dir.run(&["advise", &file, "--json"]).ok();
    assert_eq!(output.stderr.matches("the file was cut short at byte").count(), 1, "{}", output.stderr);
    let advice = output.json();
    assert_eq!((&advice["events"], &advice["unknown"]["deferred_frees"]), (&json!(9), &json!(0)));
    assert!(advice["cut"].as_str().unwrap().contains("first 9 events were read"), "{advice}");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    for words in [
        "The file was truncated; the answer covers its first 9 events.",
        "Peak reserved: at least 48 MiB. Peak live: 33 MiB.",
        "The file lacks the settings; PyTorch's defaults assumed.",
    ] {
        assert!(screen.contains(words), "{words}: {screen}");
    }
    assert!(!screen.contains("waited for other streams"), "{screen}");
}

/// The program passes commands of the Python package on.
#[cfg(unix)]
#[test]
fn commands_of_the_python_package_are_passed_on() {
    use std::process::Command;
    let test_dir = TestDir::new();
    test_dir.run(&["advize"]).refused(2, &["'advize' is not a command"]);
    let run = |installed: bool| {
        // An interpreter that prints its arguments.
        let finds = if installed { "exit 0" } else { "exit 1" };
        test_dir.program("python3", &format!("#!/bin/sh\ncase $1 in -c) {finds};; *) echo \"$@\"; exit 3;; esac\n"));
        let mut process = Command::new(common::PROGRAM);
        let path = format!("{}:/bin:/usr/bin", test_dir.at(".").display());
        process.args(["steps", "runs/a", "--json"]).current_dir(test_dir.at(".")).env("PATH", path);
        Ran::of(process.output().unwrap())
    };
    run(false).refused(2, &["steps: needs the analysis package", "pip install ./analysis"]);
    let ran = run(true);
    assert_eq!((ran.code, ran.stdout.trim()), (Some(3), "-m vramlab_analysis steps runs/a --json"), "{ran:?}");
    let help = test_dir.run(&["--help"]).ok().stdout;
    assert!(help.contains("steps, losses") && help.contains("advise"), "{help}");
}

#[test]
fn advise_fits_one_screen() {
    let test_dir = TestDir::new();
    let mut process = std::process::Command::new(common::PROGRAM);
    // A short path: a long one takes lines of its own.
    std::fs::copy(history("streams"), test_dir.at("streams.pickle.xz")).unwrap();
    process.args(["advise", "streams.pickle.xz"]).env("COLUMNS", "80").env("NO_COLOR", "1");
    let text = Ran::of(process.current_dir(test_dir.at(".")).output().unwrap()).ok().stdout;
    let titles = ["What happened", "What would help", "Next best", "\nLower bound\n", "\nUnknown\n"];
    let at: Vec<usize> =
        titles.iter().map(|title| text.find(title).unwrap_or_else(|| panic!("{title}: {text}"))).collect();
    assert!(at.is_sorted(), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.lines().count() <= 38, "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for sentence in [
        "above peak requested (765.0 MiB, deferred frees included).",
        "Peak requested: 441.8 MiB; lower bound with deferred frees as recorded 765.0 MiB (offline placement: ",
        "; if also no stream waits to reuse another's block ",
        "Settings need less where PyTorch, out of memory, waits for these frees.",
    ] {
        assert!(words.contains(sentence), "{sentence}: {text}");
    }
    assert!(text.contains("frees waited for other streams") && text.contains("without deferred frees"), "{text}");
}

#[test]
fn bad_input_gets_one_line() {
    let test_dir = TestDir::new();
    let (file, junk) = (rounded_out_of_memory(&test_dir), test_dir.write("junk.pickle", "no snapshot\n"));
    let refused =
        |arguments: &[&str], words: &[&str]| test_dir.run(&[&["advise"], arguments].concat()).refused(2, words);
    refused(&[&junk], &["junk.pickle"]);
    refused(&["gone.pickle"], &["gone.pickle"]);
    refused(&[&file, "--limit", "24"], &["--limit 24:", "24 B", "24GiB"]);
    refused(&[&file, "--limit", "lots"], &["'lots' is not a size"]);
    refused(
        &[&file, "--conf", "max_split:64"],
        &["'max_split' is not a setting of PyTorch's allocator", "max_split_size_mb"],
    );
    refused(&[&file, "--conf", "max_split_size_mb:8"], &["max_split_size_mb:8: PyTorch takes 20 or more"]);
    refused(&[&file, "--conf", "", "--conf", " "], &["given twice"]);
    refused(&[&file, "--gpu", "3"], &["no event of GPU 3"]);
}

/// The last part of a key's path.
fn last(path: &str) -> String {
    path.rsplit('.').next().unwrap_or_default().trim_end_matches("[]").to_owned()
}

/// Paths of the keys of a JSON value, in the syntax of `analysis/schema.md`.
fn paths(value: &Value, at: &str, out: &mut BTreeSet<String>) {
    match value {
        // Names of driver calls are not keys, and the out-of-memory report is described elsewhere.
        Value::Object(_) if at.ends_with("driver_calls") || at.ends_with("recorded.out_of_memory") => {}
        Value::Object(map) => {
            for (key, value) in map {
                let path = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                paths(value, &path, out);
                out.insert(path);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| paths(item, &format!("{at}[]"), out)),
        _ => {}
    }
}

#[test]
fn schema_describes_every_key_of_advise() {
    let test_dir = TestDir::new();
    let schema = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("schema.md")).unwrap();
    let part = |from: &str, to: &str| schema.split(from).nth(1).and_then(|rest| rest.split(to).next()).unwrap();
    let tables = [part("\n# Advice\n", "\n## explain\n"), part("\n### Bounds\n", "\n## ")];
    let rows = tables.into_iter().flat_map(str::lines).filter(|line| line.starts_with('`') && line.contains(" | "));
    let keys = rows.flat_map(|line| line.split(" | ").next().unwrap_or_default().split(", "));
    // Names of driver calls, and a link to keys described elsewhere, are not keys.
    let keys = keys.map(|key| key.trim_matches('`').trim_end_matches(".<name>")).filter(|key| !key.ends_with('…'));
    let described: BTreeSet<String> = keys.map(last).collect();
    let mut written = BTreeSet::new();
    let files = ["gpt2_fsdp1.rank0", "gpt2_fsdp1.rank1"].map(|name| history(&format!("ranks/{name}")));
    let junk = test_dir.write("junk.pickle", "no snapshot\n");
    let ranks = test_dir.run(&["advise", &files[0], &files[1], &junk, "--conf", "", "--json"]).ok().json();
    paths(&ranks, "", &mut written);
    for arguments in [&["--limit", "70MiB"][..], &["--limit", "10MiB"]] {
        let advice =
            test_dir.run(&[&["advise", &rounded_out_of_memory(&test_dir), "--json"], arguments].concat()).ok().json();
        paths(&advice, "", &mut written);
    }
    // With a limit inferred from stack traces.
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/full.pickle.xz");
    let full = test_dir.run(&["advise", full.to_str().unwrap(), "--conf", "", "--json"]).ok().json();
    paths(&full, "", &mut written);
    // With phases, memory that is free on another stream, and a private pool.
    let mut story = Story::default();
    for (stream, name) in [(0, "load"), (7, "train")] {
        let at = stream << 30;
        story.annotate(name, "START", story.events.len());
        story.segment(at, 20 * MIB, stream);
        for _ in 0..9 {
            story.alloc(at, 20 * MIB, stream, json!([script(3, "step")]));
            story.free(at, 20 * MIB, stream);
        }
        story.annotate(name, "END", story.events.len());
    }
    // One of the segments is a MemPool's.
    for (at, pool) in [(0, 1), (7 << 30, 0)] {
        story.held(at, 20 * MIB, json!([0, pool]));
    }
    story.segments.iter_mut().for_each(|segment| segment["segment_type"] = json!("large"));
    let phases = test_dir.write("phases.json", story.text());
    paths(&test_dir.run(&["advise", &phases, "--conf", "", "--json"]).ok().json(), "", &mut written);
    // With pinned host memory.
    let offload = test_dir.write("offload.json", crate::host::offload());
    paths(&test_dir.run(&["advise", &offload, "--conf", "", "--json"]).ok().json(), "", &mut written);
    // With another GPU.
    let one = std::fs::read_to_string(rounded_out_of_memory(&test_dir)).unwrap();
    let mut two: Value = serde_json::from_str(&one).unwrap();
    two["device_traces"].as_array_mut().unwrap().push(json!([event("segment_alloc", 1 << 30, 2 * MIB)]));
    let two = test_dir.write("two.json", two.to_string());
    paths(&test_dir.run(&["advise", &two, "--conf", "", "--json"]).ok().json(), "", &mut written);
    let written: BTreeSet<String> = written.iter().map(|path| last(path)).collect();
    assert_eq!(written.difference(&described).collect::<Vec<_>>(), Vec::<&String>::new(), "written and not described");
    assert_eq!(described.difference(&written).collect::<Vec<_>>(), Vec::<&String>::new(), "described and not written");
}

#[test]
fn saving_under_another_limit_is_that_of_the_replay() {
    let test_dir = TestDir::new();
    let file = history("resnet50");
    let saving = |arguments: &[&str]| {
        let advice = test_dir.run(&[&["advise", &file, "--json"], arguments].concat()).ok().json();
        let reserved = |of: &Value| of["peak_reserved_bytes"].as_f64().unwrap();
        let less = 1.0 - reserved(&advice["settings"][0]) / reserved(&advice["recorded"]["replayed"]);
        assert!((advice["saving_percent"].as_f64().unwrap() - 100.0 * less).abs() < 1e-9, "{arguments:?}: {advice}");
        less
    };
    // The current settings keep to the limit as well, so they save less.
    assert!(saving(&["--limit", "6.2GiB"]) < saving(&[]) / 2.0);
}
