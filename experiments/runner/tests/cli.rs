//! The program from a user's view: comparisons, fits, and refused input.
#![cfg(unix)]

use crate::common::{self, Ran, TestDir};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use vramlab::{HostCosts, Profile};

/// `compare` with small networks on iris, with enough epochs for a steady one.
fn compare(test_dir: &TestDir, before: &[&str], after: &[&str]) -> Ran {
    let common = ["--", "--device", "sim", "--dataset", "iris", "--hidden", "16"];
    test_dir.run(&[&["compare"], before, &common, after].concat())
}

#[test]
fn compare_has_a_row_for_each_arm() {
    let test_dir = TestDir::new();
    let rows = compare(&test_dir, &["--json"], &["--epochs", "3"]).ok().json();
    let rows = rows.as_array().unwrap();
    let arms: Vec<&str> = rows.iter().map(|row| row["arm"].as_str().unwrap()).collect();
    let trimmed = "stream-ordered:release_threshold=0 --sync step";
    assert_eq!(arms, ["naive", "caching", "stream-ordered", trimmed]);
    for row in rows {
        assert_eq!((&row["dataset"], &row["steps"]), (&"iris".into(), &2.into()));
        assert!(row["device"].as_str().unwrap().contains("simulated"));
        assert_eq!((&row["repeats"], row["started_at"].as_str().unwrap().len()), (&1.into(), 20));
        assert!(row["provenance"]["build_profile"].is_string() && row["provenance"]["host_hash"].is_string(), "{row}");
        assert_eq!(row["command"].as_array().unwrap()[..4], ["experiments", "compare", "--json", "--"], "{row}");
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("epoch_s") > 0.0 && number("final_train_loss") > 0.0);
        assert!((0.0..=1.0).contains(&number("val_accuracy")));
        assert!(0.0 < number("peak_requested_bytes"));
        assert!(number("peak_requested_bytes") <= number("peak_reserved_bytes"), "{row}");
        // A cache hit takes no simulated time, and unmeasured values are absent.
        for (p50, p99) in [("allocate_p50_ns", "allocate_p99_ns"), ("deallocate_p50_ns", "deallocate_p99_ns")] {
            assert_eq!(row.get(p50).is_none(), row["arm"] == "caching", "{row}");
            assert!(row["arm"] == "caching" || 0.0 < number(p50) && number(p50) <= number(p99), "{row}");
        }
        assert!(0.0 < number("utilisation") && number("utilisation") <= 1.0, "{row}");
        assert!(0.0 < number("step_s") && number("step_s") * number("steps") <= number("epoch_s"), "{row}");
        // The computed losses do not depend on the allocator.
        assert_eq!(row["final_train_loss"], rows[0]["final_train_loss"]);
        assert_eq!(row["val_accuracy"], rows[0]["val_accuracy"]);
    }
    let [naive, caching, pool, _] = [0, 1, 2, 3].map(|at| &rows[at]);
    assert_eq!((&caching["driver_allocations"], &caching["driver_frees"]), (&0.into(), &0.into()));
    assert!(naive["driver_allocations"].as_u64().unwrap() > 10);
    assert_eq!(naive["driver_allocations"], naive["driver_frees"], "a steady epoch frees what it takes");
    assert_eq!(naive["driver_allocations"], pool["driver_allocations"]);
    assert_eq!(naive["blocked_in"], "mem_free");
    assert!(naive["epoch_s"].as_f64() > caching["epoch_s"].as_f64());
    assert!(naive["blocked_ns"].as_u64() > caching["blocked_ns"].as_u64());
}

#[test]
fn compare_calls_nobody_the_fastest_where_all_are_equal() {
    let test_dir = TestDir::new();
    let output = compare(&test_dir, &["--arm", "--alloc caching", "--arm", "--alloc caching"], &["--epochs", "3"]).ok();
    assert!(output.stdout.contains("'caching' and 'caching' are equally fast; "), "{}", output.stdout);
    assert!(!output.stdout.contains("fastest"), "{}", output.stdout);
    let arms = ["--arm", "--alloc caching", "--arm", "--alloc naive", "--arm", "--alloc caching"];
    let stdout = compare(&test_dir, &arms, &["--epochs", "3"]).ok().stdout;
    assert!(stdout.contains("'caching' and 'caching' are equally the fastest; 'naive' takes "), "{stdout}");
}

#[test]
fn completions_are_there_for_each_program() {
    let test_dir = TestDir::new();
    for (program, word) in [(&[][..], "fidelity"), (&["trainer"], "allocators"), (&["vramlab"], "capacity")] {
        for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
            let script = test_dir.run(&[program, &["completions", shell]].concat()).ok().stdout;
            assert!(script.contains(word), "{program:?} {shell}");
        }
        assert_eq!(test_dir.run(&[program, &["completions", "csh"]].concat()).code, Some(2));
    }
}

#[test]
fn compare_takes_allocators_and_the_usual_options_by_name() {
    let test_dir = TestDir::new();
    let usual = ["--device", "sim", "--dataset", "iris", "--hidden", "7", "--layers", "2", "--batch", "10"];
    let more = ["--epochs", "2", "--lr", "0.05", "--seed", "3", "--sync", "step", "--loader", "copy", "--json"];
    let arguments = [&["compare", "--alloc", "caching,naive"], &usual[..], &more].concat();
    let rows = test_dir.run(&arguments).rows();
    let arms: Vec<&str> = rows.iter().map(|row| row["arm"].as_str().unwrap()).collect();
    assert_eq!(arms, ["caching", "naive"]);
    assert_eq!(test_dir.files(), [""; 0], "the runs' records are removed");
    let kept = [&["compare", "--alloc", "naive"], &usual[..], &more, &["--", "--out", "kept"]].concat();
    test_dir.run(&kept).ok();
    let settings = common::json_at(&test_dir.at("kept/summary.json"))["settings"].clone();
    let figures = ["hidden", "layers", "batch", "epochs", "seed", "sync", "loader"].map(|name| settings[name].clone());
    assert_eq!(figures, [json!(7), json!(2), json!(10), json!(2), json!(3), json!("step"), json!("copy")]);
    // Options after -- override those before it.
    let rows = test_dir.run(&[&arguments[..], &["--", "--epochs", "1"]].concat()).rows();
    assert_eq!(rows.len(), 2);
    let output = test_dir.run(&["compare", "--alloc", "naive", "--arm", "--alloc naive"]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:#?}");
    test_dir.run(&["compare", "--hidden", "0"]).refused(2, &["--hidden must be at least 1"]);
}

#[test]
fn compare_prints_a_table_and_repeats() {
    let test_dir = TestDir::new();
    let arms = ["--arm", "--alloc naive", "--arm", "--alloc caching --latency off", "--repeats", "2"];
    let text = compare(&test_dir, &arms, &["--epochs", "2"]).ok().stdout;
    for words in [
        "NVIDIA H200 (simulated), data set iris",
        "naive",
        "caching --latency off",
        "driver calls",
        "free p50",
        "utilisation",
        "mem_free",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(test_dir.files(), [""; 0], "a comparison leaves no records");
}

/// What an arm's label says is what ran.
#[test]
fn an_arms_own_options_override_those_of_every_run() {
    let test_dir = TestDir::new();
    let usual = ["compare", "--device", "sim", "--dataset", "iris", "--epochs", "2", "--json"];
    let arms = ["--hidden", "16", "--arm", "--hidden 64", "--arm", "--hidden 2048", "--arm", "--alloc caching"];
    let output = test_dir.run(&[&usual[..], &arms].concat()).ok();
    let peaks: Vec<u64> =
        output.json().as_array().unwrap().iter().map(|row| row["peak_requested_bytes"].as_u64().unwrap()).collect();
    assert!(peaks[2] < peaks[0] && peaks[0] < peaks[1], "{peaks:?}");
    assert!(output.stderr.contains("'--hidden 64' keeps its own --hidden"), "{}", output.stderr);
    assert!(!output.stderr.contains("'--alloc caching' keeps"), "{}", output.stderr);
    // The default arm with a setting of its own.
    let output = test_dir.run(&[&usual[..], &["--sync", "op", "--hidden", "16"]].concat()).ok();
    let rows = output.json();
    let trimmed = rows.as_array().unwrap().iter().find(|row| row["arm"].as_str().unwrap().contains("--sync step"));
    let pool = rows.as_array().unwrap().iter().find(|row| row["arm"] == "stream-ordered").unwrap();
    let waits = |row: &serde_json::Value| row["driver_calls"].as_object().unwrap().clone();
    assert_ne!(waits(trimmed.unwrap()), waits(pool), "it synchronises after steps, not after operations");
    assert!(output.stderr.contains("--sync step' keeps its own --sync"), "{}", output.stderr);
}

#[test]
fn an_arm_that_is_no_training_run_is_refused() {
    let test_dir = TestDir::new();
    for (arm, words) in [
        ("--device cuda", "all arms have one device"),
        ("--out here", "--out is not an option of an arm"),
        ("--json", "--json is not an option of an arm"),
        ("--help", "are not options of a training run"),
        ("doctor", "doctor is a command of the trainer"),
    ] {
        test_dir.run(&["compare", "--device", "sim", "--arm", arm]).refused(2, &[words, &format!("--arm '{arm}'")]);
    }
    test_dir.run(&["compare", "--", "--help"]).refused(2, &["are not options of a training run"]);
    assert_eq!(test_dir.files(), [""; 0]);
}

/// A directory that cannot be written to is no obstacle, as nothing is left there.
#[cfg(target_os = "linux")]
#[test]
fn compare_needs_no_directory_to_write_to() {
    let test_dir = TestDir::new();
    let mut command = test_dir.process(&["compare", "--device", "sim", "--dataset", "iris", "--epochs", "2"]);
    command.args(["--hidden", "16", "--alloc", "caching"]);
    Ran::of(command.current_dir("/proc").output().unwrap()).ok();
}

#[test]
fn a_failing_arm_is_one_line_and_its_exit_code() {
    let test_dir = TestDir::new();
    // Bad input: an option, a value, a file.
    compare(&test_dir, &["--arm", "--alloc nonsense"], &[]).refused(2, &["'--alloc nonsense'", "invalid value"]);
    compare(&test_dir, &[], &["--hidden=0"]).refused(2, &["'--alloc naive'"]);
    compare(&test_dir, &[], &["--lr", "0"]).refused(2, &["'--alloc naive'", "--lr must be a positive number"]);
    compare(&test_dir, &[], &["--out", "one"]).refused(2, &["'--alloc caching'", "exists already"]);
    // A failure while running.
    compare(&test_dir, &["--json"], &["--lr", "1e30"]).refused(1, &["'--alloc naive'", "the loss became NaN"]);
    let arms = ["--arm", "--alloc naive", "--arm", "--alloc caching --memory-limit 64K"];
    compare(&test_dir, &arms, &["--epochs", "1"])
        .refused(1, &["'--alloc caching --memory-limit 64K'", "out of memory"]);
}

#[test]
fn arguments_that_mean_nothing_are_refused() {
    let test_dir = TestDir::new();
    for arguments in
        [&["nonsense"][..], &["compare", "--repeats", "0"], &["compare", "--nonsense"], &["fit-kernels"], &[]]
    {
        let output = test_dir.run(arguments);
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:#?}");
    }
    let help = test_dir.run(&["--help"]).ok().stdout;
    assert!(help.contains("compare") && help.contains("fit-kernels"), "{help}");
    let help = test_dir.run(&["run", "--help"]).ok().stdout;
    assert!(
        ["0 all", "1 a run", "2 bad", "4 the", "130", "143", "129"].iter().all(|code| help.contains(code)),
        "{help}"
    );
}

/// Timings that a kernel of this cost would have given.
fn timings(kernel: &str, fixed: f64, iteration: f64, bandwidth: f64) -> String {
    let shapes =
        [(10u64, 7u64, 100_000u64), (132, 49, 500_000), (133, 49, 600_000), (900, 3, 9_000_000), (4, 1, 80_000_000)];
    let line = |(blocks, iterations, bytes): (u64, u64, u64)| {
        // The fixed time includes the first trip.
        let trips = blocks.div_ceil(132) * iterations - 1;
        let median = fixed + trips as f64 * iteration + bytes as f64 / bandwidth;
        let (m, n) = (64, 10);
        json!({"kernel": kernel, "blocks": blocks, "iterations": iterations, "bytes": bytes, "median_ns": median, "m": m, "n": n})
            .to_string()
    };
    shapes.map(line).join("\n")
}

#[test]
fn a_fit_gives_a_profile_that_runs() {
    let test_dir = TestDir::new();
    let text = format!("{}\n\n{}\n", timings("sgd", 1500.0, 800.0, 3000.0), timings("made_up", 900.0, 20.0, 2000.0));
    let file = test_dir.write("timings.jsonl", text);
    let output = test_dir.run(&["fit-kernels", &file, "--out", "profile.json"]).ok();
    assert!(
        output.stdout.contains("sgd") && output.stdout.contains("made_up") && output.stdout.contains("worst miss"),
        "{output:#?}"
    );
    let text = std::fs::read_to_string(test_dir.at("profile.json")).unwrap();
    let (fitted, old) = (Profile::from_json(&text).unwrap(), Profile::h200());
    assert!((fitted.kernels["sgd"].fixed_ns / 1500.0 - 1.0).abs() < 0.1, "{:?}", fitted.kernels["sgd"]);
    assert_eq!(fitted.kernels.len(), old.kernels.len() + usize::from(!old.kernels.contains_key("made_up")));
    assert_eq!((&fitted.plain, &fitted.pool, &fitted.queues), (&old.plain, &old.pool, &old.queues), "the rest is kept");
    compare(&test_dir, &["--arm", "--alloc caching"], &["--epochs", "1"]).ok();
    let output =
        test_dir.run(&["compare", "--", "--device", "sim:profile.json", "--dataset", "iris", "--epochs", "1"]).ok();
    assert!(output.stdout.contains("stream-ordered"));
    // A custom profile works as the base too.
    test_dir.run(&["fit-kernels", &file, "--profile", "profile.json", "--out", "again.json"]).ok();
    assert_eq!(std::fs::read_to_string(test_dir.at("again.json")).unwrap(), text);
    let size = ["--l2-bytes", "30000000"];
    test_dir
        .run(&[&["fit-kernels", &file, "--profile", "profile.json", "--out", "again.json"], &size[..]].concat())
        .ok();
    let again = Profile::from_json(&std::fs::read_to_string(test_dir.at("again.json")).unwrap()).unwrap();
    assert_eq!((again.l2_bytes, &again.kernels), (Some(30_000_000), &fitted.kernels));
}

#[test]
fn the_programs_time_comes_from_recorded_runs() {
    let test_dir = TestDir::new();
    let costs = (700, Some(250));
    let profile = Profile { program_ns_per_call: costs.0, program_ns_per_memory_call: costs.1, ..Profile::h200() };
    test_dir.write("slow.json", serde_json::to_string(&profile).unwrap());
    // The program's time is known on the simulated device.
    let spec = r#"
        name = "own"
        question = "How long does the program take between two calls?"
        devices = ["sim"]
        [options]
        dataset = "digits"
        layers = 2
        hidden = 16
        epochs = 2
        [matrix]
        alloc = ["caching", "stream-ordered"]
    "#;
    let spec = test_dir.write("own.toml", spec);
    test_dir.run(&["run", &spec, "--device", "sim:slow.json", "-o", "runs"]).ok();
    let output = test_dir.run(&["fit-program", "runs/own", "--out", "fitted.json"]).ok();
    let fitted = Profile::from_json(&std::fs::read_to_string(test_dir.at("fitted.json")).unwrap()).unwrap();
    assert!(fitted.program_ns_per_call.abs_diff(costs.0) <= 35, "{} {output:#?}", fitted.program_ns_per_call);
    assert!(fitted.program_ns_per_memory_call.unwrap().abs_diff(costs.1.unwrap()) <= 35, "{output:#?}");
    let rest = |profile: Profile| Profile { program_ns_per_call: 0, program_ns_per_memory_call: None, ..profile };
    assert_eq!(rest(fitted), rest(Profile::h200()));
    test_dir.run(&["fit-program", "nothing", "--out", "no.json"]).refused(2, &["nothing", "experiment.json"]);
    assert!(!test_dir.at("no.json").exists());
}

#[test]
fn calibration_writes_a_profile_and_what_it_measured() {
    let test_dir = TestDir::new();
    let arguments = ["calibrate", "--device", "sim", "--source", "a test", "--out", "profile.json", "-m", "calls.json"];
    let text = test_dir.run(&arguments).ok().stdout;
    for words in ["mem_free", "a kernel runs", "threshold 0, synchronised", "mem_set_access", "p99", "GFLOP/s"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let profile = Profile::from_json(&std::fs::read_to_string(test_dir.at("profile.json")).unwrap()).unwrap();
    assert_eq!((profile.source.as_str(), profile.kernels), ("a test", Profile::h200().kernels));
    let text = std::fs::read_to_string(test_dir.at("calls.json")).unwrap();
    let measurements: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&measurements["schema_version"], &measurements["clock"]), (&json!(1), &json!("virtual")));
    assert_eq!(measurements["command"].as_array().unwrap()[..2], ["experiments", "calibrate"]);
    assert!(
        measurements["calls"].as_array().unwrap().len() > 80 && measurements["kernels"].as_array().unwrap().len() > 20
    );
    // Its kernels are timings in the format of the fit.
    let lines: Vec<String> = measurements["kernels"].as_array().unwrap().iter().map(ToString::to_string).collect();
    let file = test_dir.write("timings.jsonl", lines.join("\n"));
    test_dir.run(&["fit-kernels", &file, "--out", "fitted.json"]).ok();
    let bad = ["calibrate", "--device", "null", "--source", "a", "--out", "b"];
    test_dir.run(&bad).refused(2, &["cannot be calibrated"]);
}

#[test]
fn costs_of_pinned_memory_are_written_for_replays() {
    let test_dir = TestDir::new();
    let calibrate = ["calibrate", "--device", "sim", "--only-host", "--source", "a test", "-o", "costs.json"];
    let text = test_dir.run(&[&calibrate[..], &["-m", "host.json"]].concat()).ok().stdout;
    for words in
        ["cudaHostAlloc", "cudaHostRegister", "pays after", "replay --host snapshot.pickle --pin-costs costs.json"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    let costs = HostCosts::from_json(&std::fs::read_to_string(test_dir.at("costs.json")).unwrap()).unwrap();
    assert_eq!(costs, HostCosts { source: "a test".to_owned(), ..HostCosts::h100x8() });
    let text = std::fs::read_to_string(test_dir.at("host.json")).unwrap();
    let measured: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&measured["schema_version"], &measured["clock"]), (&json!(1), &json!("virtual")));
    assert!(measured["command"].as_array().unwrap().contains(&json!("--only-host")), "{measured}");
    assert!(measured["machine"]["processors"].as_u64().unwrap() > 0);
    let counts = ["pins", "copies", "pool"].map(|key| measured[key].as_array().unwrap().len());
    // Eight sizes by cudaHostAlloc, three sizes by three numbers of threads; five sizes, four kinds of memory, two directions; three sizes.
    assert_eq!(counts, [17, 40, 3]);
    for option in [&["--only-links"][..], &["--gpus", "2"], &["--profile", "p.json"]] {
        assert_eq!(test_dir.run(&[&calibrate[..], option].concat()).code, Some(2), "{option:?}");
    }
    let bad = ["calibrate", "--device", "null", "--only-host", "--source", "a", "-o", "b"];
    test_dir.run(&bad).refused(2, &["cannot be calibrated"]);
}

#[test]
fn the_shortest_timings_give_a_profile_that_can_be_read() {
    let test_dir = TestDir::new();
    let line =
        |blocks: u64, ns: f64| json!({"kernel": "k", "blocks": blocks, "iterations": 1, "bytes": 1, "median_ns": ns});
    for (name, ns) in [("tiny", 1e-3), ("huge", 1e11)] {
        let file = test_dir.write(name, format!("{}\n{}", line(1, ns), line(5000, ns)));
        let out = test_dir.at(&format!("{name}.json"));
        test_dir.run(&["fit-kernels", &file, "--out", out.to_str().unwrap()]).ok();
        Profile::from_json(&std::fs::read_to_string(out).unwrap()).unwrap();
    }
}

#[test]
fn bad_timings_are_refused() {
    let test_dir = TestDir::new();
    let fit = |file: &str| test_dir.run(&["fit-kernels", file, "--out", "profile.json"]);
    fit("missing.jsonl").refused(2, &["cannot read missing.jsonl"]);
    fit(".").refused(2, &["cannot read ."]);
    let good = timings("sgd", 1500.0, 800.0, 3000.0);
    for (contents, words) in [
        (String::new(), "has no timings"),
        ("\n  \n".to_owned(), "has no timings"),
        (format!("{good}\nnot json"), "line 6: not a line of time_kernels"),
        (format!("{good}\n{{\"kernel\": \"sgd\"}}"), "line 6: not a line of time_kernels"),
        (good.replacen("\"blocks\":10", "\"blocks\":-1", 1), "line 1: not a line of time_kernels"),
        (format!("\n{}", good.replacen("\"blocks\":10", "\"blocks\":1e99", 1)), "line 2: not a line of time_kernels"),
        (json!({"kernel": "k", "blocks": 1, "iterations": 1, "bytes": 1, "median_ns": 0}).to_string(), "median_ns"),
        (json!({"kernel": "k", "blocks": 1, "iterations": 1, "bytes": 1, "median_ns": -5}).to_string(), "median_ns"),
        ("{\"kernel\":\"k\",\"blocks\":1,\"iterations\":1,\"bytes\":1,\"median_ns\":1e999}".to_owned(), "line 1:"),
        (json!({"kernel": "k", "blocks": 1, "iterations": 1, "bytes": 1, "median_ns": 1e300}).to_string(), "median_ns"),
    ] {
        let file = test_dir.write("bad.jsonl", contents);
        fit(&file).refused(2, &["bad.jsonl", words]);
        assert!(!test_dir.at("profile.json").exists(), "nothing is written for '{words}'");
    }
    let file = test_dir.write("bytes.jsonl", [0xff, 0xfe, 0x00]);
    fit(&file).refused(2, &["cannot read", "bytes.jsonl"]);

    let file = test_dir.write("good.jsonl", good);
    let with = |profile: &str| test_dir.run(&["fit-kernels", &file, "--profile", profile, "--out", "profile.json"]);
    with("missing.json").refused(2, &["cannot read missing.json"]);
    with(&test_dir.write("broken.json", "{")).refused(2, &["broken.json", "not a device profile"]);
    let blocked = format!("{file}/profile.json");
    test_dir.run(&["fit-kernels", &file, "--out", &blocked]).refused(2, &["cannot be made", "profile.json"]);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let test_dir = TestDir::new();
    let file = test_dir.write("timings.jsonl", timings("sgd", 1500.0, 800.0, 3000.0));
    let compare =
        ["compare", "--arm", "--alloc caching", "--", "--device", "sim", "--dataset", "iris", "--epochs", "1"];
    for arguments in [&compare[..], &["fit-kernels", &file, "--out", "profile.json"]] {
        let mut child = test_dir.process(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

// Files that `experiments` writes: only regular files are replaced.

#[test]
fn links_stay_whatever_is_written() {
    let test_dir = TestDir::new();
    let target = test_dir.file("target", "old");
    std::os::unix::fs::symlink("target", test_dir.at("link")).unwrap();
    let messages = ["link: is a symbolic link to target; name the file itself"];
    // Before the minutes that measuring takes.
    let calibrate = ["calibrate", "--device", "sim", "--source", "here"];
    test_dir.run(&[&calibrate[..], &["-o", "link"]].concat()).refused(2, &messages);
    test_dir.run(&[&calibrate[..], &["-o", "profile.json", "-m", "link"]].concat()).refused(2, &messages);
    let timings = test_dir.write("timings", "");
    assert_eq!(test_dir.run(&["fit-kernels", &timings, "-o", "link"]).code, Some(2));
    assert_eq!(std::fs::read_to_string(target).unwrap(), "old");
    assert_eq!(std::fs::read_link(test_dir.at("link")).unwrap(), Path::new("target"));
    assert_eq!(test_dir.files(), ["link", "target", "timings"]);
}

// Endless files, and small ones that unpack to more than the memory: each is refused in one line.

/// `times` copies of `item`, compressed.
fn packed(item: &[u8], times: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    (0..times).for_each(|_| encoder.write_all(item).unwrap());
    encoder.finish().unwrap()
}

#[test]
fn devices_that_never_end() {
    let test_dir = TestDir::new();
    let device = "it is a device; name a regular file";
    test_dir.run(&["fit-kernels", "/dev/null", "--profile", "/dev/zero", "-o", "new.json"]).refused(2, &[device]);
    test_dir.run(&["run", "/dev/zero", "--dry-run"]).refused(2, &["/dev/zero", device]);
}

#[test]
fn a_record_that_unpacks_to_more_than_any() {
    let test_dir = TestDir::new();
    std::fs::create_dir_all(test_dir.at("record/runs/a")).unwrap();
    test_dir.write("record/experiment.json", r#"{"schema_version": 1, "runs": [{"id": "a", "options": {}}]}"#);
    test_dir.write("record/runs/a/run.json", r#"{"schema_version": 1, "status": "done"}"#);
    // 64 MiB in 64 KiB.
    test_dir.write("record/runs/a/summary.json.gz", packed(&vec![b' '; 1 << 20], 64));
    let fidelity = || test_dir.run(&["fidelity", "--measured", "record", "--against", "record"]);
    fidelity().refused(2, &["summary.json.gz", "it is longer than 16 MiB"]);
    test_dir.write("record/runs/a/run.json", vec![b' '; 17 << 20]);
    fidelity().refused(2, &["run.json", "it is longer than 16 MiB"]);
}
