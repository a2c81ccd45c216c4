//! `experiments simulate-ranks` on the committed record of two GPUs, on records of simulated ranks, and on bad input.

use crate::common::{TestDir, names};
use serde_json::{Value, json};
use std::fs::{File, create_dir};
use std::path::Path;

/// The runs of the spec `ranks` in the newest record of two GPUs, unpacked.
fn record(test_dir: &TestDir) -> String {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    let archives = names(&results).into_iter().filter(|name| name.ends_with("-x2-ranks.tar.xz"));
    let file = File::open(results.join(archives.max().unwrap())).unwrap();
    let unpacked = test_dir.at("unpacked");
    create_dir(&unpacked).unwrap();
    let mut archive = tar::Archive::new(liblzma::read::XzDecoder::new(file));
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        if path.iter().nth(1).is_some_and(|folder| folder == "ranks") {
            entry.unpack_in(&unpacked).unwrap();
        }
    }
    unpacked.to_string_lossy().into_owned()
}

fn predict(test_dir: &TestDir, arguments: &[&str]) -> Value {
    test_dir.run(&[&["simulate-ranks"], arguments, &["--json"]].concat()).ok().json()
}

/// Trains simulated ranks, with these further options.
fn train(test_dir: &TestDir, out: &str, arguments: &[&str]) {
    let run = [
        "trainer",
        "--device",
        "sim",
        "--dataset",
        "iris",
        "--offline",
        "--batch",
        "24",
        "--epochs",
        "4",
        "--out",
        out,
    ];
    test_dir.run(&[&run[..], arguments].concat()).ok();
}

#[test]
fn measured_ranks_predict_more_ranks() {
    let test_dir = TestDir::new();
    let report = predict(&test_dir, &[&record(&test_dir), "--ranks", "8,64,1024"]);
    let plans = report["plans"].as_array().unwrap();
    let step = |plan: &Value| plan["step_s"].as_f64().unwrap();
    let of = |configuration: &Value, alloc: &str, on: &str| -> Vec<f64> {
        let alike = |plan: &&Value| {
            (&plan["configuration"], &plan["alloc"], &plan["on"]) == (configuration, &json!(alloc), &json!(on))
        };
        plans.iter().filter(alike).map(step).collect()
    };
    let mut mixed = 0;
    for plan in plans.iter().filter(|plan| plan["on"] == "one" && plan["alloc"] == "naive" && plan["ranks"] == 8) {
        let configuration = &plan["configuration"];
        let [one, all, base] =
            [("naive", "one"), ("naive", "all"), ("caching", "all")].map(|(alloc, on)| of(configuration, alloc, on));
        assert_eq!([one.len(), all.len(), base.len()], [3, 3, 3], "{configuration}");
        assert!(
            [&one, &all, &base].iter().all(|steps| steps.is_sorted()),
            "more ranks are not faster: {one:?} {all:?} {base:?}"
        );
        // One waiting rank makes all of them wait.
        assert!(
            one.iter().zip(&base).all(|(one, base)| one > base) && one[2] <= 1.001 * all[2],
            "{one:?} {all:?} {base:?}"
        );
        mixed += 1;
    }
    assert!(mixed > 0);
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.iter().any(|check| check["allocs"] == json!(["naive", "caching"])), "{checks:?}");
    for check in checks {
        let ratio = check["predicted_s"].as_f64().unwrap() / check["measured_s"].as_f64().unwrap();
        assert!((0.5..2.0).contains(&ratio), "{check}");
    }
}

#[test]
fn a_page_names_the_model_and_its_checks() {
    let test_dir = TestDir::new();
    let text = test_dir.run(&["simulate-ranks", &record(&test_dir)]).ok().stdout;
    for words in
        ["a model, not a measurement", "Each rank keeps its rows", "one rank", "GPUs lost", "Predicted over measured: "]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn simulated_ranks_predict_simulated_ranks() {
    let test_dir = TestDir::new();
    for alloc in ["caching", "naive"] {
        train(&test_dir, &format!("runs/{alloc}"), &["--gpus", "2", "--alloc", alloc]);
    }
    train(&test_dir, "runs/mixed", &["--gpus", "2", "--alloc", "caching", "--rank-alloc", "0=naive"]);
    // As many rows for each of four ranks.
    train(&test_dir, "runs/four", &["--gpus", "4", "--alloc", "caching", "--batch", "48"]);
    let report = predict(&test_dir, &["runs", "--ranks", "4"]);
    let checks: Vec<(u64, u64)> = report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|check| {
            let ratio = check["predicted_s"].as_f64().unwrap() / check["measured_s"].as_f64().unwrap();
            assert!((0.8..1.25).contains(&ratio), "{check}");
            (check["from_ranks"].as_u64().unwrap(), check["ranks"].as_u64().unwrap())
        })
        .collect();
    assert!(checks.contains(&(2, 2)) && checks.contains(&(2, 4)), "{report}");
    assert_eq!(predict(&test_dir, &["runs", "--ranks", "4"]), report, "nothing is random");
}

#[test]
fn records_that_cannot_be_used_are_refused() {
    let test_dir = TestDir::new();
    train(&test_dir, "single", &[]);
    let file = test_dir.write("broken.jsonl", "{\"status\": \"finished\"}\nnot JSON\n");
    let measured = record(&test_dir);
    let cases: [(&[&str], &str); 4] = [
        (
            &[&measured, "--baseline", "nope"],
            "--baseline nope: no rank of these records has it; write one of caching, naive, stream-ordered",
        ),
        (&["single"], "no complete run of several ranks"),
        (&["missing.jsonl"], "missing.jsonl"),
        (&[&file], "line 2: not a JSON object"),
    ];
    for (arguments, words) in cases {
        test_dir.run(&[&["simulate-ranks"], arguments].concat()).refused(2, &[words]);
    }
}

#[test]
fn calibration_of_simulated_links_writes_them_into_the_profile() {
    let test_dir = TestDir::new();
    let links = [
        "calibrate",
        "--device",
        "sim",
        "--source",
        "a test",
        "--only-links",
        "-o",
        "profile.json",
        "-m",
        "links.json",
    ];
    test_dir.run(&links).refused(2, &["--only-links needs several GPUs"]);
    for more in [&["--only-links", "-m", "./profile.json"][..], &["--only-host", "-m", "profile.json"]] {
        let same = ["calibrate", "--device", "sim", "--source", "a test", "-o", "profile.json"];
        test_dir.run(&[&same, more].concat()).refused(2, &["--out and --measurements name the same file"]);
    }
    let text = test_dir.run(&[&links[..], &["--gpus", "4"]].concat()).ok().stdout;
    assert!(text.contains("device time of all-reduces"), "{text}");
    let read =
        |name: &str| -> Value { serde_json::from_str(&std::fs::read_to_string(test_dir.at(name)).unwrap()).unwrap() };
    let times = read("links.json")["links"].as_array().unwrap().clone();
    assert!(times.iter().any(|time| time["ranks"] == 2) && times.iter().any(|time| time["ranks"] == 4));
    let (built_in, calibrated) = (vramlab::Profile::h200().links, read("profile.json")["links"].clone());
    let bandwidth = calibrated["bytes_per_ns"].as_f64().unwrap() / built_in.bytes_per_ns;
    assert!((bandwidth - 1.0).abs() < 0.01, "{calibrated}");
    assert!(calibrated["hop_ns"].as_u64().unwrap().abs_diff(built_in.hop_ns) <= 5, "{calibrated}");
}
