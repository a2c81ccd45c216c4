//! Runs of several ranks over the simulated device: one process a rank, as on GPUs.

use super::outside::{Background, PATIENCE};
use super::*;
use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Few, small layers on iris, in batches that split.
const IRIS: [&str; 6] = ["--batch", "24", "--epochs", "2", "--hidden", "16"];

/// The losses of the steps of a run in `record`, and its record.
fn losses(arguments: &[&str]) -> (Vec<String>, Value) {
    let test_dir = TestDir::new();
    test_dir.iris(&[&IRIS[..], &["--out", "record"], arguments].concat()).ok();
    let json = read_json(&test_dir.at("record/summary.json"));
    assert_eq!(json["status"], "finished");
    (column(&test_dir.at("record/steps.csv"), "loss"), json)
}

fn close(a: &[String], b: &[String], most: f64) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        let (a, b): (f64, f64) = (a.parse().unwrap(), b.parse().unwrap());
        assert!((a - b).abs() <= most * b.abs(), "{a} and {b}");
    }
}

#[test]
fn losses_are_equal_under_every_allocator_and_buffer_lifetime() {
    let (expected, _) = losses(&["--gpus", "2"]);
    let variants: [&[&str]; 13] = [
        &["--alloc", "naive"],
        &["--alloc", "stream-ordered", "--buffers", "record-stream"],
        &["--alloc", "caching", "--buffers", "record-stream", "--bucket", "1K"],
        &["--alloc", "caching", "--buffers", "events", "--bucket", "1K"],
        &["--alloc", "rmm-arena", "--overlap", "off"],
        &["--rank-alloc", "0=naive"],
        &["--comm-streams", "2", "--bucket", "1K"],
        &["--comm-streams", "2", "--bucket", "1K", "--buffers", "record-stream", "--alloc", "stream-ordered"],
        &["--comm-streams", "2", "--bucket", "1K", "--launch", "graph", "--buffers", "events"],
        &["--bucket-source", "nccl", "--register", "on", "--peer-access", "on"],
        &["--launch", "graph"],
        &["--launch", "graph", "--buffers", "events", "--alloc", "stream-ordered"],
        &["--check", "--loader", "pinned", "--streams", "4"],
    ];
    for variant in variants {
        let (actual, _) = losses(&[&["--gpus", "2"], variant].concat());
        assert_eq!(actual, expected, "{variant:?}");
    }
}

#[test]
fn several_ranks_train_as_one_does() {
    // 120 rows in batches of 36: the last batch has 12 rows.
    for (dtype, most) in [(&["--dtype", "f32"][..], 1e-5), (&["--dtype", "f16", "--fuse", "epilogue"], 2e-3)] {
        let base = [&["--batch", "36"], dtype].concat();
        let (one, _) = losses(&base);
        for count in ["2", "3", "4"] {
            let (several, json) = losses(&[&base[..], &["--gpus", count]].concat());
            close(&several, &one, most);
            assert_eq!(json["ranks"].as_array().unwrap().len().to_string(), count);
        }
    }
}

#[test]
fn parts_of_a_batch_may_differ_by_a_row() {
    // 120 rows in batches of 35: of the last batch of an epoch six ranks have two rows and one has three.
    let (one, _) = losses(&["--batch", "35"]);
    for launch in ["eager", "graph"] {
        let (seven, _) = losses(&["--batch", "35", "--gpus", "7", "--launch", launch]);
        close(&seven, &one, 1e-5);
    }
}

#[test]
fn a_record_holds_every_rank_and_how_far_they_differ() {
    let test_dir = TestDir::new();
    let arguments = ["--gpus", "2", "--rank-alloc", "1=naive", "--bucket", "1K", "--out", "record", "--json"];
    let output = test_dir.iris(&[&IRIS[..], &arguments].concat()).ok();
    let json = output.json();
    assert_eq!(json, read_json(&test_dir.at("record/summary.json")));
    let ranks = json["ranks"].as_array().unwrap();
    for (number, (rank, alloc)) in ranks.iter().zip(["caching", "naive"]).enumerate() {
        assert_eq!((&rank["rank"], &rank["alloc"], &rank["steps"]), (&number.into(), &alloc.into(), &10.into()));
        let own = read_json(&test_dir.at("record").join(rank["directory"].as_str().unwrap()).join("summary.json"));
        assert_eq!(
            (&own["rank"], &own["settings"]["allocator"], &own["status"]),
            (&number.into(), &alloc.into(), &"finished".into())
        );
        assert_eq!(own["epochs"][1]["val_loss"], json["epochs"][1]["val_loss"], "weights are the same on all ranks");
    }
    let steps = ranks.iter().map(|rank| rank["step_s"].as_f64().unwrap());
    assert_eq!(json["rank_spread"]["step_s"]["most"].as_f64(), steps.reduce(f64::max));
    assert_eq!(json["communication"]["bucket_bytes"].as_array().unwrap().len(), 2, "{}", json["communication"]);
    assert_eq!(json["settings"]["buffers"], "kept");
}

#[test]
fn virtual_time_repeats_exactly_and_a_slow_rank_slows_all() {
    let step = |arguments: &[&str]| {
        let (_, json) = losses(&[&["--gpus", "3"], arguments].concat());
        let of_rank = |rank: usize| json["ranks"][rank]["step_s"].as_f64().unwrap();
        [of_rank(0), of_rank(1), of_rank(2)]
    };
    let (all, mixed) = (step(&[]), step(&["--rank-alloc", "1=naive"]));
    assert_eq!(step(&["--rank-alloc", "1=naive"]), mixed);
    assert!(mixed[0] > 1.5 * all[0] && mixed[2] > 1.5 * all[2], "{mixed:?} and {all:?}");
}

#[test]
fn waits_for_sums_are_recorded_for_eager_steps() {
    // Ten steps in an epoch, of which the eighth is timed.
    let exposed = |arguments: &[&str]| {
        let (_, json) = losses(&[&["--gpus", "2", "--batch", "12", "--bucket", "1K"], arguments].concat());
        [0, 1].map(|rank| json["ranks"][rank]["exposed_communication_s"].as_f64())
    };
    let [Some(overlapped), Some(_)] = exposed(&[]) else { panic!("absent") };
    let [Some(serial), Some(_)] = exposed(&["--overlap", "off"]) else { panic!("absent") };
    assert!(overlapped > 0.0 && serial >= overlapped, "the last sum is always waited for: {overlapped} and {serial}");
    let [Some(fast), Some(slow)] = exposed(&["--rank-alloc", "1=naive"]) else { panic!("absent") };
    assert!(fast > overlapped && fast > slow, "the faster rank waits: {fast}, {slow} and {overlapped}");
    assert_eq!(exposed(&["--launch", "graph"]), [None, None]);
}

#[test]
fn more_memory_waits_with_record_stream_than_with_events() {
    let pending = |rule: &str| {
        let (_, json) = losses(&["--gpus", "2", "--hidden", "64", "--bucket", "1K", "--buffers", rule]);
        json["ranks"][0]["peak_pending_bytes"].as_u64().unwrap()
    };
    assert_eq!((pending("kept"), pending("events")), (0, 0));
    assert!(pending("record-stream") > 0);
}

#[test]
fn buckets_outside_the_allocator_are_not_reserved_and_are_in_the_record() {
    let run = |source: &str| {
        let (_, json) = losses(&["--gpus", "2", "--hidden", "512", "--alloc", "naive", "--bucket-source", source]);
        let reserved = json["ranks"][0]["peak_reserved_bytes"].as_u64().unwrap();
        (reserved, json["communication"].clone())
    };
    let ((with, _), (without, communication)) = (run("allocator"), run("nccl"));
    let buckets: u64 =
        communication["bucket_bytes"].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(with >= without + buckets, "{with}, {without} and {buckets}");
    assert_eq!((&communication["source"], &communication["streams"]), (&"nccl".into(), &1.into()));
    // Without NCCL nothing is registered, and nothing outside of the allocator can be measured.
    assert!(communication["registered_buckets"].is_null() && communication["context_bytes"].is_null());
    let (_, json) = losses(&["--gpus", "2", "--register", "on", "--comm-streams", "2"]);
    let communication = &json["communication"];
    assert_eq!((&communication["registered_buckets"], &communication["streams"]), (&0.into(), &2.into()));
}

#[test]
fn what_cannot_be_several_ranks_is_refused() {
    let test_dir = TestDir::new();
    let cases: [(&[&str], &str); 11] = [
        (&["--gpus", "0"], "--gpus must be at least 1"),
        (&["--gpus", "2", "--batch", "25"], "--batch 25 does not split over 2 ranks; use a multiple of 2, such as 24"),
        (&["--gpus", "2", "--batch", "24", "--fuse", "update"], "use --fuse epilogue"),
        (&["--gpus", "2", "--batch", "24", "--bucket", "0"], "--bucket must be at least 1 byte"),
        (&["--gpus", "2", "--batch", "24", "--rank-alloc", "2=naive"], "ranks are numbered from 0 to 1"),
        (&["--bucket", "1M"], "--bucket is for several ranks"),
        (&["--buffers", "events"], "--buffers is for several ranks"),
        (&["--comm-streams", "2"], "--comm-streams is for several ranks"),
        (
            &["--gpus", "2", "--batch", "24", "--bucket-source", "nccl", "--buffers", "events"],
            "use --buffers kept instead of events",
        ),
        (&["--gpus", "2", "--batch", "24", "--register", "on", "--buffers", "record-stream"], "--register on is for"),
        (&["--gpus", "7", "--batch", "119"], "the last batch of an epoch has 1 of the data set's 120 rows"),
    ];
    for (arguments, words) in cases {
        let output = test_dir.iris(&[arguments, &["--out", "record"]].concat());
        let line = output.error(2);
        assert!(line.contains(words), "{line}");
        assert!(!test_dir.at("record").exists(), "{arguments:?}");
    }
}

/// A rank that a launcher such as torchrun would start.
fn rank(test_dir: &TestDir, number: u32, port: u16, arguments: &[&str]) -> Background {
    rank_of(test_dir, "", number, port, arguments)
}

/// The same of a run with a name.
fn rank_of(test_dir: &TestDir, run: &str, number: u32, port: u16, arguments: &[&str]) -> Background {
    let base = ["--device", "sim", "--dataset", "iris", "--rank-timeout", "20"];
    let mut command = test_dir.process(&[&base[..], &IRIS, arguments].concat());
    let variables = [("RANK", number.to_string()), ("WORLD_SIZE", "2".into()), ("LOCAL_RANK", number.to_string())];
    command.envs(variables).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_RUN_ID", run);
    Background::of(command)
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn error_of(lines: &[String]) -> &str {
    let errors: Vec<&String> = lines.iter().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{lines:?}");
    errors[0]
}

#[test]
fn a_process_of_another_launcher_is_one_rank() {
    let (test_dir, port) = (TestDir::new(), free_port());
    let ranks = [rank(&test_dir, 1, port, &["--out", "unused"]), rank(&test_dir, 0, port, &["--out", "record"])];
    for rank in ranks {
        let (status, _, lines) = rank.end();
        assert_eq!(status.code(), Some(0), "{lines:?}");
    }
    let (expected, _) = losses(&["--gpus", "2"]);
    assert_eq!(column(&test_dir.at("record/steps.csv"), "loss"), expected);
    assert!(test_dir.at("record/rank1/summary.json").exists() && !test_dir.at("unused").exists());
}

#[test]
fn ranks_with_other_settings_are_refused() {
    let (test_dir, port) = (TestDir::new(), free_port());
    let ranks = [rank(&test_dir, 0, port, &["--out", "record"]), rank(&test_dir, 1, port, &["--lr", "0.5"])];
    for rank in ranks {
        let (status, stdout, lines) = rank.end();
        assert_eq!((status.code(), stdout.as_str()), (Some(2), ""), "{lines:?}");
        let line = error_of(&lines);
        assert!(line.contains("has --lr 0.5 and rank 0 0.1; give all ranks the same options"), "{line}");
    }
    assert!(!test_dir.at("record").exists());
}

#[test]
fn a_rank_that_an_earlier_run_left_is_refused_and_the_run_goes_on() {
    let (test_dir, port) = (TestDir::new(), free_port());
    let first = rank_of(&test_dir, "new", 0, port, &["--out", "record"]);
    let (status, _, lines) = rank_of(&test_dir, "old", 1, port, &[]).end();
    assert_eq!(status.code(), Some(2), "{lines:?}");
    assert!(error_of(&lines).contains("another run uses this MASTER_PORT; set a free one"), "{lines:?}");
    for rank in [rank_of(&test_dir, "new", 1, port, &[]), first] {
        let (status, _, lines) = rank.end();
        assert_eq!(status.code(), Some(0), "{lines:?}");
    }
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let (test_dir, port) = (TestDir::new(), free_port());
    for (number, words) in [(0, "rank 1 did not connect within 1 s"), (1, "cannot reach rank 0 at 127.0.0.1:")] {
        let (status, _, lines) = rank(&test_dir, number, port, &["--rank-timeout", "1"]).end();
        assert_eq!(status.code(), Some(2), "{lines:?}");
        assert!(error_of(&lines).contains(words), "{lines:?}");
    }
    assert!(!test_dir.at("runs").exists());
}

/// Whether a process has a connection to this port of the local host.
#[cfg(target_os = "linux")]
fn is_connected(process: u32, port: u16) -> bool {
    const ESTABLISHED: &str = "01";
    let inodes: Vec<String> = std::fs::read_dir(format!("/proc/{process}/fd"))
        .map(|entries| entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect::<Vec<_>>())
        .unwrap_or_default()
        .iter()
        .filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned))
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields[2].ends_with(&format!(":{port:04X}"))
            && fields[3] == ESTABLISHED
            && inodes.iter().any(|id| id == fields[9])
    })
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_before_all_have_connected_ends_all() {
    let (test_dir, port) = (TestDir::new(), free_port());
    // A third rank never comes.
    let start = |number: u32, arguments: &[&str]| {
        let base = ["--device", "sim", "--dataset", "iris", "--rank-timeout", "5"];
        let mut command = test_dir.process(&[&base[..], &IRIS, arguments].concat());
        command.envs([("RANK", number.to_string()), ("WORLD_SIZE", "3".into()), ("LOCAL_RANK", number.to_string())]);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        Background::of(command)
    };
    let (first, second) = (start(0, &["--out", "record"]), start(1, &[]));
    let until = Instant::now() + PATIENCE;
    while !is_connected(second.child.id(), port) {
        assert!(Instant::now() < until, "rank 1 does not connect");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill("-KILL", second.child.id());
    second.end();
    let (status, _, lines) = first.end();
    // Killed before its introduction, a rank is one that never came.
    let line = error_of(&lines);
    assert!(
        line.contains("rank 1 ended before all ranks had connected") || line.contains("did not connect within"),
        "{line}"
    );
    assert!(status.code().is_some_and(|code| code == 1 || code == 2), "{lines:?}");
    assert!(!test_dir.at("record").exists());
}

#[test]
fn a_port_in_use_is_named() {
    let listener = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (status, _, lines) = rank(&TestDir::new(), 0, port, &[]).end();
    assert_eq!(status.code(), Some(2), "{lines:?}");
    let words = format!("port {port} of MASTER_ADDR 127.0.0.1 is in use by another program; set MASTER_PORT");
    assert!(error_of(&lines).contains(&words), "{lines:?}");
}

#[test]
fn who_connects_and_is_no_rank_is_ignored() {
    let (test_dir, port) = (TestDir::new(), free_port());
    let first = rank(&test_dir, 0, port, &["--out", "record"]);
    let until = Instant::now() + PATIENCE;
    // Kept open, so that rank 0 sees what it says.
    let stranger = loop {
        match std::net::TcpStream::connect(("127.0.0.1", port)) {
            Ok(mut stream) => break stream.write_all(b"GET / HTTP/1.1\r\n\r\n").map(|()| stream).unwrap(),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let second = rank(&test_dir, 1, port, &[]);
    for rank in [first, second] {
        let (status, _, lines) = rank.end();
        assert_eq!(status.code(), Some(0), "{lines:?}");
    }
    drop(stranger);
}

/// A long run of three ranks, once its first epoch is in the record.
fn long(test_dir: &TestDir) -> Background {
    let base = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--batch", "24", "--epochs", "1000000"];
    let run = Background::start(test_dir, &[&base[..], &["--gpus", "3", "--out", "record"]].concat());
    run.wait_for("epoch  1 ");
    run
}

/// The processes that a process has started, in the order of their numbers.
#[cfg(target_os = "linux")]
fn children(of: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).unwrap();
    let children = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    children.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>()).collect()
}

#[cfg(target_os = "linux")]
fn kill(signal: &str, process: u32) {
    let sent = std::process::Command::new("kill").args([signal, &process.to_string()]).stderr(Stdio::null()).status();
    assert!(sent.unwrap().success());
}

/// Whether a process is there and has not ended.
#[cfg(target_os = "linux")]
fn lives(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    status.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[cfg(target_os = "linux")]
fn all_have_ended(processes: &[u32]) {
    let until = Instant::now() + PATIENCE;
    while processes.iter().any(|process| lives(*process)) {
        assert!(Instant::now() < until, "ranks outlive their launcher");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_ends_all() {
    for victim in [0, 1, 2] {
        let test_dir = TestDir::new();
        let run = long(&test_dir);
        let ranks = children(run.child.id());
        assert_eq!(ranks.len(), 3);
        kill("-KILL", ranks[victim]);
        let (status, _, lines) = run.end();
        assert_eq!(status.code(), Some(1), "{lines:?}");
        let words = if victim == 0 { "was killed by signal 9" } else { "ended without a message; it was killed" };
        let line = error_of(&lines);
        assert!(line.contains(&format!("rank {victim}: ")) && line.contains(words), "{line}");
        all_have_ended(&ranks);
        // Those that were not killed have said how they ended.
        for (number, path) in ["record", "record/rank1", "record/rank2"].into_iter().enumerate() {
            let json = read_json(&test_dir.at(path).join("summary.json"));
            assert_eq!(json["status"], if number == victim { "running" } else { "failed" }, "{path}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_at_any_moment_leaves_no_process_and_no_half_record() {
    // From the start of the processes to the end of a run, however fast the machine is.
    for (victim, delay_ms) in [(0, 0), (1, 0), (0, 5), (1, 10), (0, 20), (1, 40), (0, 80), (1, 160), (0, 320), (1, 640)]
    {
        let test_dir = TestDir::new();
        let base = ["--device", "sim", "--dataset", "iris", "--epochs", "20", "--gpus", "2", "--out", "record"];
        let run = Background::start(&test_dir, &[&base[..], &["--hidden", "16", "--batch", "24"]].concat());
        let until = Instant::now() + PATIENCE;
        let ranks = loop {
            let ranks = children(run.child.id());
            if ranks.len() == 2 {
                break ranks;
            }
            assert!(Instant::now() < until, "the ranks do not start");
        };
        std::thread::sleep(Duration::from_millis(delay_ms));
        // It may have ended by then.
        let _ = std::process::Command::new("kill")
            .args(["-KILL", &ranks[victim].to_string()])
            .stderr(Stdio::null())
            .status();
        let (status, _, lines) = run.end();
        all_have_ended(&ranks);
        let paths = ["record", "record/rank1"].map(|path| test_dir.at(path).join("summary.json"));
        let left: Vec<Value> = paths.iter().filter(|path| path.exists()).map(|path| read_json(path)).collect();
        match status.code() {
            Some(0) => assert!(left.iter().all(|json| json["status"] == "finished"), "{left:?}"),
            code => {
                assert_eq!(code, Some(1), "{lines:?}");
                assert!(error_of(&lines).contains(&format!("rank {victim}: ")), "{lines:?}");
            }
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_end_with_a_launcher_that_is_killed() {
    let test_dir = TestDir::new();
    let run = long(&test_dir);
    let ranks = children(run.child.id());
    run.signal("-KILL");
    all_have_ended(&ranks);
    run.end();
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_stops_answering_ends_all() {
    let test_dir = TestDir::new();
    let base = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--batch", "24", "--epochs", "1000000"];
    let more = ["--gpus", "2", "--rank-timeout", "3", "--out", "record"];
    let run = Background::start(&test_dir, &[&base[..], &more].concat());
    run.wait_for("epoch  1 ");
    let ranks = children(run.child.id());
    kill("-STOP", ranks[1]);
    let (status, _, lines) = run.end();
    assert_eq!(status.code(), Some(1), "{lines:?}");
    assert!(error_of(&lines).contains("rank 1: nothing arrived for 3 s"), "{lines:?}");
    all_have_ended(&ranks);
}

#[cfg(target_os = "linux")]
#[test]
fn a_signal_ends_all_ranks_before_the_same_step() {
    // To the launcher, to rank 0, and to another rank, as a scheduler may send it.
    for (target, signal, code) in
        [(None, "-INT", 130), (None, "-TERM", 143), (Some(0), "-INT", 130), (Some(2), "-TERM", 130)]
    {
        let test_dir = TestDir::new();
        let run = long(&test_dir);
        let ranks = children(run.child.id());
        kill(signal, target.map_or(run.child.id(), |rank: usize| ranks[rank]));
        let (status, _, lines) = run.end();
        assert_eq!(status.code(), Some(code), "{target:?} {signal}: {lines:?}");
        assert!(error_of(&lines).contains("interrupted"), "{lines:?}");
        all_have_ended(&ranks);
        let paths = ["record", "record/rank1", "record/rank2"].map(|path| test_dir.at(path));
        let steps = paths.each_ref().map(|path| column(&path.join("steps.csv"), "loss"));
        assert!(steps.iter().all(|losses| *losses == steps[0]), "{:?}", steps.map(|losses| losses.len()));
        for path in paths {
            assert_eq!(read_json(&path.join("summary.json"))["status"], "interrupted");
        }
    }
}
