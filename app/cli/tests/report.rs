//! `vramlab report` from the command line; `analysis/tests/test_history_page.py` opens the page in a browser.

use crate::common::{self, Ran, TestDir};
use serde_json::{Value, json};
use std::path::Path;

/// A line of a `trace.jsonl`.
fn line(time_ns: u64, action: &str, addr: u64, bytes: u64) -> String {
    let path = if time_ns == 0 { "driver_alloc" } else { "hit" };
    json!({"time_ns": time_ns, "action": action, "addr": addr, "size": bytes, "block": bytes, "stream": 1, "path": path})
        .to_string()
        + "\n"
}

/// Two blocks; one is freed.
fn trace() -> String {
    [
        line(0, "alloc", 1 << 30, 1 << 22),
        line(500, "alloc", 2 << 30, 700),
        line(900, "free_requested", 1 << 30, 1 << 22),
    ]
    .concat()
}

fn vramlab(dir: &TestDir, arguments: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(common::PROGRAM);
    command.args(arguments).current_dir(dir.at(".")).env("NO_COLOR", "1").env("COLUMNS", "1000");
    command
}

fn report(dir: &TestDir, arguments: &[&str]) -> Ran {
    Ran::of(vramlab(dir, &[&["report"], arguments].concat()).output().unwrap())
}

/// The JSON data of a page.
fn data(dir: &TestDir, page: &str) -> Value {
    let text = std::fs::read_to_string(dir.at(page)).unwrap();
    let start = text.split("id=\"data\">").nth(1).unwrap();
    serde_json::from_str(start.split("</script>").next().unwrap()).unwrap()
}

#[test]
fn a_page_contains_each_recording_with_maps_and_bounds() {
    let dir = TestDir::new();
    dir.write("a.jsonl", trace());
    let mlp = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories/mlp.pickle.xz");
    let output = report(
        &dir,
        &["a.jsonl", mlp.to_str().unwrap(), "--alloc", "caching,naive", "--advise", "off", "-o", "page.html"],
    )
    .ok();
    assert!(output.stdout.contains("2 recordings, each replayed under 2 allocators"), "{}", output.stdout);
    let data = data(&dir, "page.html");
    let [small, mlp] = data["histories"].as_array().unwrap().as_slice() else { panic!("{data}") };
    assert_eq!((&small["name"], &small["events"]), (&json!("a.jsonl"), &json!(4)));
    let names = |history: &Value, key: &str| -> Vec<String> {
        history[key].as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(small, "maps"), ["as recorded", "caching", "naive"]);
    assert_eq!(names(small, "settings"), ["caching", "naive"], "the log has no segments");
    assert_eq!(names(mlp, "settings"), ["as recorded", "caching", "naive"]);
    // The recorded peak, and that of the replay that matches it.
    let peak = |number: usize| mlp["settings"][number]["peak_reserved_bytes"].as_u64().unwrap();
    assert_eq!(peak(0), peak(1));
    assert!(mlp["lower_bound_bytes"].as_u64().unwrap() <= mlp["plan_bytes"].as_u64().unwrap());
    assert_eq!((&mlp["ledger"]["allocator"], &mlp["ledger"]["as_recorded"]), (&json!("caching"), &json!(true)));
    assert_eq!(mlp["maps"][0]["segments"], true);
}

#[test]
fn a_run_is_shown_with_its_events_and_its_record() {
    let dir = TestDir::new();
    std::fs::create_dir(dir.at("run")).unwrap();
    dir.file("run/trace.jsonl", trace());
    dir.file("run/steps.csv", "epoch,step,rows,loss,host_ns\n1,1,64,2.3,600\n1,2,64,2.2,2000\n");
    let record = json!({
        "schema_version": 1, "status": "finished", "settings": {"alloc": "naive"}, "device": {"name": "a device"},
        "epochs": [{"wall_s": 0.002, "steps": 2, "val_accuracy": 0.5}],
        "allocator_stats": {"reserved_bytes.all.peak": 4 << 20}
    });
    dir.file("run/summary.json", record.to_string());
    report(&dir, &["run", "--alloc", "caching", "--plan", "off"]).ok();
    let data = data(&dir, "report.html");
    let history = &data["histories"][0];
    let figures: Vec<(&str, &str)> = (history["figures"].as_array().unwrap().iter())
        .map(|figure| (figure[0].as_str().unwrap(), figure[1].as_str().unwrap()))
        .collect();
    let expected =
        [("allocator", "naive"), ("mean step, last epoch", "1000.0 us"), ("peak reserved, whole run", "4 MiB")];
    for figure in expected {
        assert!(figures.contains(&figure), "{figure:?}: {figures:?}");
    }
    assert_eq!(history["plan_bytes"], Value::Null);
    let marks: Vec<(&str, u64)> = (history["marks"].as_array().unwrap().iter())
        .map(|mark| (mark["text"].as_str().unwrap(), mark["start"].as_u64().unwrap()))
        .collect();
    assert_eq!(marks, [("end of step 1 of epoch 1", 2), ("end of step 2 of epoch 1", 4)]);
}

#[test]
fn file_names_do_not_become_markup() {
    let dir = TestDir::new();
    let hostile = "x<!--<script>'\"&.jsonl";
    dir.write(hostile, trace());
    report(&dir, &[hostile, "--alloc", "naive", "--plan", "off"]).ok();
    let text = std::fs::read_to_string(dir.at("report.html")).unwrap();
    assert!(!text.contains("<!--"));
    assert_eq!(data(&dir, "report.html")["histories"][0]["name"], hostile);
}

#[test]
fn a_page_offers_its_pictures_and_compares_remap_by_default() {
    let dir = TestDir::new();
    dir.write("a.jsonl", trace());
    report(&dir, &["a.jsonl", "--plan", "off"]).ok();
    let text = std::fs::read_to_string(dir.at("report.html")).unwrap();
    for words in ["vramlab-memory.png", "vramlab-chart.svg"] {
        assert!(text.contains(words), "{words}");
    }
    let settings = data(&dir, "report.html")["histories"][0]["settings"].clone();
    let names: Vec<&str> =
        settings.as_array().unwrap().iter().map(|setting| setting["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"remap"), "{names:?}");
}

#[cfg(unix)]
#[test]
fn a_file_name_that_is_not_utf8_is_shown_lossily() {
    use std::os::unix::ffi::OsStrExt;
    let dir = TestDir::new();
    let name = std::ffi::OsStr::from_bytes(b"a\xff.jsonl");
    std::fs::write(dir.0.path().join(name), trace()).unwrap();
    let output = vramlab(&dir, &["report", "--alloc", "naive"]).arg(name).output().unwrap();
    Ran::of(output).ok();
    assert_eq!(data(&dir, "report.html")["histories"][0]["name"], "a\u{fffd}.jsonl");
}

#[test]
fn unreadable_input_gets_one_line_and_leaves_no_page() {
    let dir = TestDir::new();
    dir.write("a.jsonl", trace());
    std::fs::create_dir(dir.at("run")).unwrap();
    report(&dir, &["missing.pickle"]).refused(2, &["missing.pickle"]);
    report(&dir, &["a.jsonl", "run"]).refused(2, &["run/summary.json"]);
    report(&dir, &["a.jsonl", "-o", "no/page.html"]).refused(2, &["no/page.html"]);
    dir.file("run/trace.jsonl", trace());
    report(&dir, &["run"]).refused(2, &["run/summary.json"]);
    dir.file("run/summary.json", "{\"status\":");
    report(&dir, &["run"]).refused(2, &["run/summary.json", "not the record of a run"]);
    assert!(!dir.at("report.html").exists());
}

#[test]
fn runs_without_events_are_shown_from_their_records() {
    let dir = TestDir::new();
    dir.write("a.jsonl", trace());
    let record = |alloc: &str| {
        json!({"schema_version": 1, "status": "finished", "settings": {"alloc": alloc}, "device": {"name": "a device"},
            "epochs": [{"wall_s": 0.002, "train_s": 0.001, "steps": 2}]})
    };
    for (run, alloc) in [("e/runs/one", "naive"), ("e/runs/two", "caching")] {
        std::fs::create_dir_all(dir.at(run)).unwrap();
        dir.file(&format!("{run}/summary.json"), record(alloc).to_string());
        let about = json!({"program": "trainer", "status": "done", "repeat": 0});
        dir.file(&format!("{run}/run.json"), about.to_string());
    }
    dir.file("e/experiment.json", "{}");
    let names = |page: &Value| -> Vec<String> {
        page["runs"].as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap().to_owned()).collect()
    };
    let output = report(&dir, &["e"]).ok();
    assert!(output.stdout.contains("2 runs; page size"), "{}", output.stdout);
    let page = data(&dir, "report.html");
    assert_eq!(
        (names(&page), page["histories"].as_array().unwrap().len()),
        (vec!["naive".into(), "caching".into()], 0)
    );
    assert_eq!(page["runs"][0]["step"], 500_000.0);
    // Together with a recording.
    report(&dir, &["a.jsonl", "e/runs/one", "--alloc", "naive", "--plan", "off"]).ok();
    let page = data(&dir, "report.html");
    assert_eq!((names(&page), page["histories"].as_array().unwrap().len()), (vec!["naive".into()], 1));
}

#[test]
fn an_experiment_with_only_replays_has_a_page() {
    let dir = TestDir::new();
    dir.write("a.jsonl", trace());
    std::fs::create_dir_all(dir.at("e/runs")).unwrap();
    dir.file("e/experiment.json", json!({"name": "mine", "question": "Which?"}).to_string());
    let replayed = |name: &str, program: &str, options: Value, repeat: u64| {
        let words = [program, "a.jsonl", "--alloc", "caching", "--json"];
        let result = Ran::of(vramlab(&dir, &words).output().unwrap()).ok().stdout;
        std::fs::create_dir(dir.at(&format!("e/runs/{name}"))).unwrap();
        let about = json!({"program": program, "arm": program, "status": "done", "repeat": repeat, "options": options});
        dir.file(&format!("e/runs/{name}/run.json"), about.to_string());
        dir.file(&format!("e/runs/{name}/result.json"), result);
    };
    replayed("00", "replay", json!({"history": "a.jsonl", "alloc": "caching", "completion": "instant"}), 0);
    replayed("01", "replay", json!({"history": "a.jsonl", "alloc": "caching", "completion": "instant"}), 1);
    replayed("02", "capacity", json!({"history": "a.jsonl", "alloc": "caching"}), 0);
    let output = report(&dir, &["e"]).ok();
    assert!(output.stdout.contains("2 replays; page size"), "{}", output.stdout);
    let page = data(&dir, "report.html");
    let arms = page["replays"].as_array().unwrap();
    let names: Vec<&str> = arms.iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["mine, replay", "mine, capacity"]);
    let row = &arms[0]["rows"][0];
    assert_eq!((&row["alloc"], &row["history"]), (&json!("caching, completion instant"), &json!("a.jsonl")));
    assert!(row["peak_reserved_bytes"].as_u64() >= row["lower_bound_bytes"].as_u64());
    assert!(arms[1]["rows"][0]["capacity_bytes"].as_u64() > Some(0));
    // An experiment without finished runs is refused.
    std::fs::create_dir_all(dir.at("none/runs")).unwrap();
    dir.file("none/experiment.json", "{}");
    report(&dir, &["none"]).refused(2, &["the experiment has no finished training run or replay"]);
}

#[cfg(unix)]
#[test]
fn the_page_is_opened_in_the_first_browser_that_starts() {
    let dir = TestDir::new();
    dir.write("a.jsonl", trace());
    dir.program("fake", "#!/bin/sh\nprintf '%s\\n' \"$@\" > asked\n");
    dir.program("bad", "#!/bin/sh\nexit 3\n");
    dir.program("xdg-open", "#!/bin/sh\nprintf 'desktop %s\\n' \"$@\" > asked\n");
    let here = dir.at(".").canonicalize().unwrap();
    let run = |browser: &str, path: &Path| {
        let _ = std::fs::remove_file(dir.at("asked"));
        let arguments = ["report", "a.jsonl", "--alloc", "naive", "--plan", "off", "--open", "-o", "the page.html"];
        let mut command = vramlab(&dir, &arguments);
        command.env("BROWSER", browser).env("PATH", path);
        Ran::of(command.output().unwrap())
    };
    let asked = || std::fs::read_to_string(dir.at("asked")).unwrap();
    let page = here.join("the page.html").display().to_string();
    let both = format!("{0}/bad:{0}/fake --tab %s", here.display());
    run(&both, Path::new("/nowhere")).ok();
    assert_eq!(asked(), format!("--tab\n{page}\n"), "the first that starts, with the page as one word");
    run("", &here).ok();
    assert_eq!(asked(), format!("desktop {page}\n"));
    // Without a browser: one line, exit code 1, and the page exists.
    std::fs::remove_file(dir.at("the page.html")).unwrap();
    let bad = format!("{}/bad", here.display());
    let output = run(&bad, Path::new("/nowhere"));
    assert_eq!((output.code, output.stderr.lines().count()), (Some(1), 1), "{output:#?}");
    let words = ["error: no browser", "/bad", "xdg-open", &page];
    assert!(words.iter().all(|word| output.stderr.contains(word)), "{output:#?}");
    assert!(dir.at("the page.html").is_file());
    assert!(!dir.at("asked").exists());
}
