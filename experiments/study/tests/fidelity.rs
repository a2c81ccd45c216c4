//! `experiments fidelity` as a user meets it, on recorded runs.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, Ran};
use vramlab::Profile;

const SPEC: &str = r#"
name = "small"
question = "Is it the same?"
repeats = 1
devices = ["sim"]
keep = ["summary.json", "steps.csv"]

[options]
dataset = "iris"
layers = 2
epochs = 2

[matrix]
alloc = ["naive", "caching"]
sync = ["never", "step"]
"#;

/// Runs the spec into `out` on a device.
fn record(place: &Place, out: &str, device: &str) {
    place.write("small.toml", SPEC);
    place.run(&["run", "small.toml", "--device", device, "-o", out]).ok();
}

fn fidelity(place: &Place, more: &[&str]) -> Ran {
    place.run(&[&["fidelity", "--measured", "a/small", "--against", "b/small"], more].concat())
}

#[test]
fn a_simulation_is_like_itself() {
    let place = Place::new();
    record(&place, "a", "sim");
    record(&place, "b", "sim");
    let report = fidelity(&place, &["--json", "--tolerance", "0%"]).ok().json();
    assert_eq!((&report["worst"], &report["within"]), (&0.0.into(), &true.into()));
    assert_eq!(report["axes"], serde_json::json!(["alloc", "sync"]));
    let cells = report["cells"].as_array().unwrap();
    let names: Vec<&str> = cells.iter().map(|cell| cell["cell"].as_str().unwrap()).collect();
    assert_eq!(names, ["caching never", "caching step", "naive never", "naive step"]);
    for cell in cells {
        assert_eq!(cell["steps_with_other_allocations"], 0, "{cell}");
        assert!(cell["steps"].as_u64().unwrap() > 2 && cell["measured_step_s"].as_f64().unwrap() > 0.0);
        for call in cell["calls"].as_array().unwrap() {
            assert_eq!(call["measured"], call["simulated"]);
        }
    }
    let naive = cells.iter().find(|cell| cell["cell"] == "naive never").unwrap();
    assert!((naive["same_calls"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{naive}");
    let text = fidelity(&place, &[]).ok().stdout;
    assert!(text.contains("caching step") && text.contains("+0.0 %") && text.contains("mem_free"), "{text}");
}

#[test]
fn a_simulation_that_is_off_fails_and_says_by_how_much() {
    let place = Place::new();
    record(&place, "a", "sim");
    // Launches that take twice as long, and frees that do not wait.
    let mut profile = Profile::h200();
    profile.queues.launch_ns *= 2;
    place.write("slow.json", serde_json::to_string(&profile).unwrap());
    record(&place, "b", "sim:slow.json");
    let ran = fidelity(&place, &["--json"]);
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    let report = ran.json();
    assert!(report["worst"].as_f64().unwrap() > 0.15 && report["within"] == false, "{report}");
    let error = ran.stderr.lines().last().unwrap();
    assert!(error.starts_with("error: ") && error.contains("cells are not as measured"), "{error}");
    // A wider tolerance accepts it.
    fidelity(&place, &["--tolerance", "1000%"]).ok();

    let mut profile = Profile::h200();
    profile.plain.free_drains_device = false;
    place.write("lax.json", serde_json::to_string(&profile).unwrap());
    let out = ["run", "small.toml", "--device", "sim:lax.json", "-o", "c"];
    place.run(&out).ok();
    let arguments = ["fidelity", "--measured", "a/small", "--against", "c/small", "--tolerance", "1000%", "--json"];
    let ran = place.run(&arguments);
    assert_eq!(ran.code, Some(1), "it waits elsewhere: {ran:#?}");
    let cells = ran.json()["cells"].as_array().unwrap().clone();
    let elsewhere: Vec<&str> =
        cells.iter().filter(|cell| cell["within"] == false).map(|cell| cell["cell"].as_str().unwrap()).collect();
    assert_eq!(elsewhere, ["naive never", "naive step"]);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let place = Place::new();
    record(&place, "a", "sim");
    fidelity(&place, &[]).refused(2, &["b/small holds no experiment.json"]);
    std::fs::create_dir_all(place.at("b/small")).unwrap();
    fidelity(&place, &[]).refused(2, &["b/small holds no experiment.json"]);
    record(&place, "b", "sim");
    std::fs::remove_dir_all(place.at("b/small/runs/02-caching-never-r0")).unwrap();
    fidelity(&place, &[]).refused(2, &["b/small has no finished run of 'caching never'"]);
    std::fs::remove_dir_all(place.at("b/small/runs")).unwrap();
    fidelity(&place, &[]).refused(2, &["b/small holds no finished run"]);
    let path = place.at("b/small/experiment.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"schema_version\": 1", "\"schema_version\": 2")).unwrap();
    fidelity(&place, &[]).refused(2, &["schema version 2"]);
    let ran = fidelity(&place, &["--tolerance", "lots"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:#?}");
    fidelity(&place, &["--profile", "slow.json"]).refused(2, &["--profile is for new runs"]);
}

#[test]
fn without_a_gpu_the_recorded_runs_are_compared() {
    let place = Place::new();
    let mut command = place.process(&["fidelity", "--json"]);
    let ran = Ran::of(command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap());
    let report = ran.json();
    // It fails where the simulation is off, not because of what is missing here.
    assert_eq!(ran.code, Some(if report["within"] == true { 0 } else { 1 }), "{ran:#?}");
    assert!(report["cells"].as_array().unwrap().len() > 1, "{report}");
    let said = |words: &str| ran.stderr.lines().any(|line| line.contains(words));
    assert!(
        said("no GPU here: the measured runs are those of ") && said("the simulated runs are those of "),
        "{ran:#?}"
    );
    // Nothing was run for it.
    assert_eq!(place.files(), [""; 0]);

    // In words, one sentence and the next command.
    let mut command = place.process(&["fidelity"]);
    let text = Ran::of(command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()).stdout;
    let mut lines = text.lines().rev();
    let (next, found) = (lines.next().unwrap(), lines.next().unwrap());
    assert!(next.starts_with("Next: ") && next.contains("experiments"), "{text}");
    let count = report["cells"].as_array().unwrap().iter().filter(|cell| cell["within"] == true).count();
    assert!(found.starts_with(&format!("{count} of ")) && found.ends_with('.'), "{found}");
}
