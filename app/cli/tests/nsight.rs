//! `vramlab nsight` on exports made by hand.

use crate::nsight_export::{Export, THREAD, Version, training};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn nsight(file: &Path, arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_vramlab");
    Command::new(program).arg("nsight").arg(file).args(arguments).env("NO_COLOR", "1").output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_first_line_names_the_call_that_waited() {
    let export = training(Version::New, 25);
    let text = stdout(&nsight(&export.path, &[]));
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    assert!(text.starts_with("cuMemFree waited 3.90 us in 25 of 50 calls, behind relu. "), "{text}");
    assert!(text.contains("75 memory calls take 4.35 us of 25.0 us: 3.90 us waiting for the device"), "{text}");
    assert!(text.contains(" --tables"), "{text}");
    for line in stdout(&nsight(&export.path, &["--tables", "--top", "3"])).lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
}

#[test]
fn json_has_every_wait() {
    let export = training(Version::Old, 25);
    let document: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json"]))).unwrap();
    assert_eq!(document["steps"], 25);
    assert_eq!(document["memory"]["blocked_ns"], 25 * 156);
    let waits = document["tables"]["blocked_calls"].as_array().unwrap();
    assert_eq!(waits.len(), 25);
    assert_eq!(waits[3]["path"], "epoch 1/step 4/forward/free 4 KiB");
    let behind = &document["tables"]["waited_for"];
    assert_eq!(behind.as_array().unwrap().len(), 1);
    assert_eq!((&behind[0]["call"], &behind[0]["waited_for"]), (&Value::from("cuMemFree"), &Value::from("relu")));
}

#[test]
fn the_page_has_one_picture_and_no_script() {
    let mut export = training(Version::New, 25);
    export.kernel("<b>&\"'", (30_000, 30_010), (30_020, 30_100));
    export.call("cudaFree_v3020", 30_030, 30_110);
    let page = export.path.with_extension("html");
    let read = || {
        stdout(&nsight(&export.path, &["-o", page.to_str().unwrap()]));
        std::fs::read_to_string(&page).unwrap()
    };
    let html = read();
    assert_eq!(html.matches("<svg").count(), 1);
    assert!(html.contains("cuMemFree waited 3.90 us in 25 of 50 calls, behind relu"));
    assert!(html.contains(">step "), "a step is drawn");
    assert!(html.contains("url(#wait)"));
    assert!(!html.contains("<b>") && !html.contains("<script"));
    assert_eq!(html, read(), "the same capture gives the same page");
}

#[test]
fn rows_join_calls_with_work_and_ranges() {
    let export = training(Version::New, 25);
    let document: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json", "--rows"]))).unwrap();
    let rows = &document["rows"];
    let [calls, work, ranges] = ["calls", "work", "ranges"].map(|list| rows[list].as_array().unwrap());
    assert_eq!((calls.len(), work.len()), (100, 25));
    let place = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let waits: Vec<_> = calls.iter().filter(|call| !call["waited_for"].is_null()).collect();
    assert_eq!(waits.len(), 25);
    for wait in waits {
        let kernel = &work[place(&wait["waited_for"])];
        assert_eq!((&wait["call"], &kernel["name"]), (&Value::from("cuMemFree"), &Value::from("relu")));
        let launch = &calls[place(&kernel["call"])];
        assert_eq!(launch["kind"], "kernel_launch");
        assert!(launch["start_ns"].as_i64() < wait["start_ns"].as_i64());
        assert_eq!(ranges[place(&wait["range"])]["text"], "free 4 KiB");
        assert_eq!(ranges[place(&ranges[place(&wait["range"])]["parent"])]["text"], "forward");
    }
    let plain: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json"]))).unwrap();
    assert!(plain.get("rows").is_none());
    assert_eq!(plain["tables"], document["tables"]);
}

#[test]
fn an_extracted_directory_prints_the_same_tables() {
    let export = training(Version::New, 25);
    let directory = export.path.with_extension("tables");
    let extract = ["--json", "--extract", directory.to_str().unwrap()];
    let mut documents = [&export.path, &directory].map(|path| {
        let arguments = if path == &directory { &extract[..1] } else { &extract[..] };
        serde_json::from_str::<Value>(&stdout(&nsight(path, arguments))).unwrap()
    });
    for document in &mut documents {
        // Ids and times of the machine are not in extracted tables.
        for row in document["tables"]["blocked_calls"].as_array_mut().unwrap() {
            for key in ["process", "thread"] {
                row[key] = Value::Null;
            }
        }
    }
    assert_eq!(documents[0], documents[1]);
    let again = nsight(&export.path, &extract);
    assert_eq!(again.status.code(), Some(2), "an existing directory is not replaced");
    let stderr = String::from_utf8(again.stderr).unwrap();
    assert!(stderr.contains("capture.tables"), "{stderr}");
}

fn report(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vramlab")).arg("report").args(arguments).env("NO_COLOR", "1").output().unwrap()
}

#[test]
fn a_report_of_a_capture_is_its_page() {
    let export = training(Version::Old, 25);
    let directory = tempfile::tempdir().unwrap();
    let [page, other] = ["report.html", "nsight.html"].map(|name| directory.path().join(name));
    let file = export.path.to_str().unwrap();
    let text = stdout(&report(&[file, "-o", page.to_str().unwrap()]));
    assert!(text.contains("cuMemFree waited 3.90 us in 25 of 50 calls"), "{text}");
    assert!(text.contains("in a browser"), "{text}");
    stdout(&nsight(&export.path, &["-o", other.to_str().unwrap()]));
    assert_eq!(std::fs::read(&page).unwrap(), std::fs::read(&other).unwrap());
    for arguments in [&[file, file][..], &[file, "--alloc", "caching"]] {
        let refused = report(&[arguments, &["-o", page.to_str().unwrap()]].concat());
        assert_eq!(refused.status.code(), Some(2));
        let stderr = String::from_utf8(refused.stderr).unwrap();
        assert!(stderr.contains("a page of its own"), "{stderr}");
    }
}

#[test]
fn other_commands_lead_to_nsight() {
    let export = training(Version::New, 2);
    let directory = tempfile::tempdir().unwrap();
    let files = ["x.nsys-rep", "x.qdstrm", "x.qdrep"].map(|name| {
        let path = directory.path().join(name);
        std::fs::write(&path, "a capture").unwrap();
        path
    });
    let unknown = directory.path().join("x.bin");
    std::fs::write(&unknown, [0xff; 64]).unwrap();
    for command in ["advise", "explain"] {
        let error = |path: &Path| {
            let output = Command::new(env!("CARGO_BIN_EXE_vramlab")).arg(command).arg(path).output().unwrap();
            assert_eq!(output.status.code(), Some(2));
            String::from_utf8(output.stderr).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        for file in files.iter().chain([&export.path]) {
            let text = error(file);
            assert!(text.contains(" nsight ") && text.contains("Nsight Systems"), "{command}: {text}");
        }
        let text = error(&unknown);
        assert!(text.contains("snapshot") && text.contains("Nsight Systems"), "{command}: {text}");
    }
}

/// Two processes on two GPUs, with a graph that was traced as a whole, a named thread, and stacks of Python.
fn several(version: Version) -> Export {
    let mut export = Export::new(version);
    let other = (77 << 24) | 5;
    for at in [0, 1000] {
        let launch = export.call("cudaGraphLaunch_v10000", at, at + 10);
        export.graph(launch, (at + 20, at + 300));
        let wait = export.memory_call("cudaFree_v3020", at + 50, at + 310, 4096);
        let sql = "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET callchainId = 9 WHERE correlationId = ?1";
        export.db.execute(sql, [wait]).unwrap();
        let launch = export.call_on(other, "cudaLaunchKernel_v7000", at, at + 10);
        export.run("gemm", launch, (at + 20, at + 500), 13);
        let sql = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1, globalPid = ?1 WHERE correlationId = ?2";
        export.db.execute(sql, [77 << 24, launch]).unwrap();
        export.call_on(other, "cudaDeviceSynchronize_v3020", at + 30, at + 510);
    }
    for (depth, frame) in [(0, "cudaFree"), (1, "c10::free"), (2, "step (train.py:12)"), (3, "main (train.py:40)")] {
        let symbol = export.string(frame);
        export.insert("CUDA_CALLCHAINS", &[("id", &9), ("symbol", &symbol), ("stackDepth", &depth)]);
    }
    export.insert("NVTX_EVENTS", &[("start", &0), ("eventType", &39), ("globalTid", &other), ("text", &"loader")]);
    export.insert("DIAGNOSTIC_EVENT", &[("severity", &2), ("text", &"Not all events were collected: 12 were lost.")]);
    export
}

#[test]
fn the_page_shows_processes_devices_stacks_and_lost_events() {
    for version in [Version::Old, Version::New] {
        let export = several(version);
        let page = export.path.with_extension("html");
        stdout(&report(&[export.path.to_str().unwrap(), "-o", page.to_str().unwrap()]));
        let html = std::fs::read_to_string(&page).unwrap();
        assert_eq!(html.matches("<svg").count(), 1);
        for part in [
            ">calls, pid 77, loader<",
            ">calls, pid 1234, thread 77<",
            ">pid 1234, GPU 0, stream 7<",
            ">pid 77, GPU 1, stream 13<",
            "graph 3, ",
            "gemm, ",
            "of it waiting",
            "<td>step (train.py:12) &lt; main (train.py:40)<",
            "Not all events were collected: 12 were lost.",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        let text = stdout(&nsight(&export.path, &["--tables"]));
        assert!(text.contains("step (train.py:12) < main (train.py:40)"), "{text}");
        let document: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json"]))).unwrap();
        assert_eq!(document["processes"], 2);
        let stack = &document["tables"]["stacks"][0];
        assert_eq!((&stack["call"], stack["frames"].as_array().unwrap().len()), (&Value::from("cudaFree"), 4));
    }
}

#[test]
fn the_first_screen_names_the_line_that_waits() {
    let mut export = Export::new(Version::New);
    for step in 0..4 {
        let at = step * 100_000;
        export.kernel("gemm", (at, at + 10), (at + 20, at + 5000));
        export.memory_call("cudaFree_v3020", at + 30, at + 5010, 4096);
        let line = if step == 0 { 12 } else { 30 };
        export.python(
            THREAD,
            at + 5005,
            2,
            &[
                ("_free", "/opt/venv/lib/python3.12/site-packages/torch/cuda/memory.py", 3),
                ("step", "/home/me/proj/train.py", line),
                ("&lt;module&gt;", "/home/me/proj/train.py", 40),
            ],
        );
    }
    let text = screen(&export.path, &[]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.starts_with("cudaFree waited "), "{words}");
    assert!(words.contains(" in 4 of 4 calls, most of them at proj/train.py:30 step, behind gemm."), "{words}");
    assert!(words.contains("mostly at") && words.contains("proj/train.py:30 step (75 %)"), "{words}");
    let document: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json"]))).unwrap();
    let sites = document["tables"]["sites"].as_array().unwrap();
    let site = |row: &Value| (row["site"].as_str().unwrap().to_owned(), row["count"].as_u64().unwrap());
    let expected = [("proj/train.py:30 step".to_owned(), 3), ("proj/train.py:12 step".to_owned(), 1)];
    assert_eq!(sites.iter().map(site).collect::<Vec<_>>(), expected);
    assert_eq!(document["tables"]["blocked_calls"][0]["site"], "proj/train.py:12 step");
    let page = export.path.with_extension("html");
    stdout(&report(&[export.path.to_str().unwrap(), "-o", page.to_str().unwrap()]));
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("<td>proj/train.py:30 step (75 %)<td>gemm"), "{html}");
    // A stack of native code names its symbol.
    let plain = several(Version::Old);
    let sql = "UPDATE StringIds SET value = 'free_all(Pool&)' WHERE value LIKE '%.py:%'";
    plain.db.execute(sql, []).unwrap();
    let document: Value = serde_json::from_str(&stdout(&nsight(&plain.path, &["--json"]))).unwrap();
    assert_eq!(document["tables"]["sites"][0]["site"], "c10::free");
}

/// What a command prints on a screen of 100 columns.
fn screen(file: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vramlab"));
    let command = command.arg("nsight").arg(file).args(arguments).env("COLUMNS", "100").env("NO_COLOR", "1");
    let text = stdout(&command.output().unwrap());
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    text
}

#[test]
fn long_names_and_several_processes_fit_the_first_screen() {
    let gemm = format!("sm90_xmma_gemm_{}_cublas", "tilesize128x128x64_".repeat(5));
    let mut export = Export::new(Version::New);
    let other = (77 << 24) | 5;
    for at in [0, 1000] {
        export.kernel(&gemm, (at, at + 10), (at + 20, at + 900));
        export.memory_call("cudaFree_v3020", at + 30, at + 910, 4096);
        let launch = export.call_on(other, "cudaLaunchKernel_ptsz_v7000", at, at + 10);
        export.run(&gemm, launch, (at + 20, at + 900), 13);
        let sql = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1, globalPid = ?1 WHERE correlationId = ?2";
        export.db.execute(sql, [77 << 24, launch]).unwrap();
        export.call_on(other, "cudaFree_v3020", at + 30, at + 910);
    }
    for arguments in [&[][..], &["--tables"]] {
        let words = screen(&export.path, arguments).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("mostly behind") && !words.contains("omitted: mostly"), "{words}");
        assert!(
            words.contains("sm90_xmma_gemm_") && words.contains("…") && words.contains("_cublas (100 %)"),
            "{words}"
        );
        // More than the span, since both call at the same time.
        assert!(words.contains("4 memory calls of 2 processes take 3.52 us within 1.91 us:"), "{words}");
    }
    let document: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json"]))).unwrap();
    assert_eq!(document["tables"]["waited_for"][0]["waited_for"], gemm.as_str());
}

#[test]
fn a_capture_without_calls_has_no_empty_table() {
    let mut export = Export::new(Version::New);
    export.insert("NVTX_EVENTS", &[("start", &5), ("eventType", &34), ("globalTid", &THREAD), ("text", &"mark")]);
    let text = screen(&export.path, &[]);
    assert!(text.starts_with("The capture has no CUDA calls.\n"), "{text}");
    assert!(!text.contains("calls  time"), "{text}");
}

#[test]
fn other_files_are_refused_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let text = directory.path().join("x.sqlite");
    std::fs::write(&text, "not a database ".repeat(300)).unwrap();
    let report = directory.path().join("x.nsys-rep");
    std::fs::write(&report, "a report").unwrap();
    let raw = directory.path().join("x.qdstrm");
    std::fs::write(&raw, "raw events").unwrap();
    for (file, part) in [
        (text.as_path(), "nsys export --type sqlite"),
        (report.as_path(), "`nsys` is not on the PATH; export where it is: nsys export --type sqlite "),
        (&directory.path().join("missing.nsys-rep"), "No such file"),
        (directory.path(), "no capture.json"),
        (raw.as_path(), "QdstrmImporter -i "),
    ] {
        let program = env!("CARGO_BIN_EXE_vramlab");
        let output = Command::new(program).arg("nsight").arg(file).env("PATH", "").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let stderr = String::from_utf8(output.stderr).unwrap();
        let error = stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(error.contains(part), "{error}");
        for fault in ["No such file", "not a database"] {
            assert!(error.matches(fault).count() <= 1, "{error}");
        }
        assert!(output.stdout.is_empty());
    }
}
