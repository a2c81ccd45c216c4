//! Exports that lack something, that are damaged, or that are not exports.

use crate::common::{Export, OTHER_THREAD, PROCESS, THREAD, Version, file, open, training};
use vramlab_nsight::{Error, attribute, read};

#[test]
fn a_missing_table_leaves_the_others() {
    for version in [Version::Old, Version::New] {
        for (table, note, waits) in [
            ("CUPTI_ACTIVITY_KIND_RUNTIME", "no CUDA calls", 0),
            ("CUPTI_ACTIVITY_KIND_KERNEL", "no kernels", 0),
            ("CUPTI_ACTIVITY_KIND_MEMCPY", "", 25),
            ("NVTX_EVENTS", "", 25),
            ("StringIds", "no table StringIds", 25),
            ("CUDA_GPU_MEMORY_USAGE_EVENTS", "", 25),
        ] {
            let export = training(version, 25);
            export.db.execute(&format!("DROP TABLE IF EXISTS {table}"), []).unwrap();
            let (capture, attribution) = export.attribution();
            assert_eq!(attribution.waits.len(), waits, "{table}");
            assert!(
                note.is_empty() || capture.notes.iter().any(|text| text.contains(note)),
                "{table}: {:?}",
                capture.notes
            );
        }
    }
}

#[test]
fn any_value_in_any_column_is_survived() {
    let values = ["NULL", "''", "'x'", "1.5", "-1", "9223372036854775807", "-9223372036854775808", "x'00ff'"];
    let mut export = training(Version::New, 3);
    let sync = export.call("cuStreamSynchronize", 5000, 5010);
    export.detail("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", sync, Some(7), 1, 1);
    export.copy("cudaMemcpy_v3020", (6000, 6100), (6020, 6090), 1);
    export.insert("PROFILER_OVERHEAD", &[("start", &205), ("end", &215), ("globalTid", &THREAD)]);
    let query = "SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns \
                 WHERE tables.type = 'table' AND columns.pk = 0";
    let mut statement = export.db.prepare(query).unwrap();
    let columns: Vec<(String, String)> =
        statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect();
    assert!(columns.iter().any(|(table, column)| table == "NVTX_EVENTS" && column == "textId"));
    let copy = export.path.with_extension("copy");
    for (table, column) in columns {
        for value in values {
            std::fs::copy(&export.path, &copy).unwrap();
            let db = open(&copy);
            db.execute(&format!("UPDATE {table} SET \"{column}\" = {value}"), []).unwrap();
            drop(db);
            let capture = read(&copy).unwrap();
            let _ = attribute(&capture);
            let _ = vramlab_nsight::idle::by_cause(&capture, None);
            let _ = vramlab_nsight::idle::launches(&capture);
        }
    }
}

#[test]
fn times_that_were_not_collected_are_counted() {
    let mut export = training(Version::New, 25);
    export.run("lost", 5, (0, 0), 7);
    export.run("lost", 6, (90, 10), 7);
    let capture = export.capture();
    assert!(capture.work_names.iter().all(|name| name != "lost"));
    assert!(capture.notes.iter().any(|note| note.starts_with("2 kernels and copies have no valid times")));
}

#[test]
fn warnings_of_lost_events_become_notes() {
    let mut export = training(Version::New, 2);
    let text = "Not all CUDA events might have been collected.";
    export.insert("DIAGNOSTIC_EVENT", &[("severity", &2), ("text", &text)]);
    export.insert("DIAGNOSTIC_EVENT", &[("severity", &1), ("text", &"Profiling has started.")]);
    let notes = export.capture().notes;
    assert!(notes.contains(&format!("Nsight Systems warns: {text}")), "{notes:?}");
    assert!(!notes.iter().any(|note| note.contains("started")));
}

#[test]
fn kernels_without_their_launches_are_counted() {
    let mut export = Export::new(Version::Old);
    export.run("before", 5, (0, 100), 7);
    export.call("cuCtxSynchronize", 20, 110);
    assert!(export.capture().notes.iter().any(|note| note.starts_with("1 of 1 kernels")));
    assert_eq!(export.waits().len(), 1);
}

#[test]
fn stacks_of_memory_calls_are_read() {
    let mut export = Export::new(Version::New);
    let free = export.memory_call("cudaFree_v3020", 20, 30, 64);
    export
        .db
        .execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET callchainId = 9 WHERE correlationId = ?1", [free])
        .unwrap();
    for (depth, symbol) in [(1, "release(Matrix&)"), (0, "cudaFree"), (2, "main")] {
        let symbol = export.string(symbol);
        export.insert("CUDA_CALLCHAINS", &[("id", &9), ("symbol", &symbol), ("stackDepth", &depth)]);
    }
    let capture = export.capture();
    let stack = capture.calls.iter().find_map(|call| call.stack).unwrap();
    assert_eq!(capture.stacks[stack], ["cudaFree", "release(Matrix&)", "main"]);
}

#[test]
fn a_record_of_a_backtrace_is_not_a_second_call() {
    let mut export = training(Version::New, 25);
    let wait = export.call("cudaStreamSynchronize_v3020", 30_000, 30_010);
    let name = export.string("cudaStreamSynchronize_v3020");
    let values: [(&str, &dyn rusqlite::ToSql); 6] = [
        ("start", &30_000),
        ("end", &30_010),
        ("globalTid", &THREAD),
        ("correlationId", &wait),
        ("nameId", &name),
        ("callchainId", &4),
    ];
    export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", &values);
    let symbol = export.string("step (train.py:12)");
    export.insert("CUDA_CALLCHAINS", &[("id", &4), ("symbol", &symbol), ("stackDepth", &0)]);
    let capture = export.capture();
    let calls: Vec<_> = capture.calls.iter().filter(|call| call.correlation == wait).collect();
    assert_eq!(calls.len(), 1);
    assert_eq!(capture.stacks[calls[0].stack.unwrap()], ["step (train.py:12)"]);
}

#[test]
fn a_backtrace_without_version_and_with_other_times_is_not_a_second_call() {
    let mut export = Export::new(Version::New);
    let insert = |export: &mut Export, class: i64, name: &str, span: (i64, i64), chain: Option<i64>| {
        let name = export.string(name);
        let values: [(&str, &dyn rusqlite::ToSql); 7] = [
            ("start", &span.0),
            ("end", &span.1),
            ("eventClass", &class),
            ("globalTid", &THREAD),
            ("correlationId", &17),
            ("nameId", &name),
            ("callchainId", &chain),
        ];
        export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", &values);
    };
    // The order of rows is not guaranteed.
    insert(&mut export, 67, "cudaEventSynchronize", (124, 131), Some(5));
    insert(&mut export, 0, "cudaEventSynchronize_v3020", (125, 130), None);
    let symbol = export.string("wait(Event&)");
    export.insert("CUDA_CALLCHAINS", &[("id", &5), ("symbol", &symbol), ("stackDepth", &0)]);
    let capture = export.capture();
    let calls: Vec<_> = capture.calls.iter().map(|call| (call.start, call.end)).collect();
    assert_eq!(calls, [(125, 130)]);
    assert_eq!(capture.stacks[capture.calls[0].stack.unwrap()], ["wait(Event&)"]);
}

#[test]
fn python_stacks_belong_to_the_calls_around_them() {
    let mut export = training(Version::New, 2);
    let marks = export.capture().marks.len();
    let module = ("&lt;module&gt;", "/home/me/train.py", 40);
    let free = export.call("cudaFree_v3020", 100_000, 100_500);
    let inner = export.call("cuMemFree_v2", 100_010, 100_490);
    // Inside of both.
    export.python(THREAD, 100_480, 2, &[("step", "/home/me/train.py", 12), module]);
    // Just behind: a stack of an event belongs to the call, and a sample does not.
    let synchronize = export.call("cudaDeviceSynchronize_v3020", 200_000, 200_500);
    export.python(THREAD, 200_510, 2, &[("evaluate", "/home/me/train.py", 20)]);
    let sampled = export.call("cudaStreamSynchronize_v3020", 300_000, 900_000);
    export.python(THREAD, 299_000, 1, &[("other", "/home/me/train.py", 1)]);
    export.python(THREAD, 600_000, 1, &[("load", "/home/me/data.py", 7)]);
    export.python(THREAD, 910_000, 1, &[("other", "/home/me/train.py", 1)]);
    // Far from any call, of another thread, and a launch, which has no stack.
    export.python(THREAD, 1_500_000, 2, &[("other", "/home/me/train.py", 1)]);
    export.python(OTHER_THREAD, 100_480, 2, &[("other", "/home/me/train.py", 1)]);
    let launch = export.kernel("k", (2_000_000, 2_000_100), (2_000_200, 2_000_300));
    export.python(THREAD, 2_000_050, 2, &[("other", "/home/me/train.py", 1)]);
    let capture = export.capture();
    let stack = |correlation: i64| {
        let call = capture.calls.iter().find(|call| call.correlation == correlation).unwrap();
        call.stack.map(|stack| capture.stacks[stack].join(", "))
    };
    let step = Some("step (/home/me/train.py:12), <module> (/home/me/train.py:40)".to_owned());
    assert_eq!((stack(free), stack(inner)), (step.clone(), step));
    assert_eq!(stack(synchronize).as_deref(), Some("evaluate (/home/me/train.py:20)"));
    assert_eq!(stack(sampled).as_deref(), Some("load (/home/me/data.py:7)"));
    assert_eq!(stack(launch), None);
    assert_eq!(capture.marks.len(), marks, "stacks are not marks of the program");
    assert!(capture.stacks.iter().flatten().all(|frame| !frame.starts_with("other")));
}

#[test]
fn python_frames_stand_behind_native_ones() {
    let mut export = Export::new(Version::New);
    let free = export.memory_call("cudaFree_v3020", 20, 30, 64);
    let sql = "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET callchainId = 9 WHERE correlationId = ?1";
    export.db.execute(sql, [free]).unwrap();
    let symbol = export.string("c10::free(void*)");
    export.insert("CUDA_CALLCHAINS", &[("id", &9), ("symbol", &symbol), ("stackDepth", &0)]);
    export.python(THREAD, 29, 2, &[("step", "train.py", 12)]);
    let capture = export.capture();
    assert_eq!(capture.stacks[capture.calls[0].stack.unwrap()], ["c10::free(void*)", "step (train.py:12)"]);
}

#[test]
fn an_export_that_lost_python_stacks_says_so() {
    let mut export = training(Version::Old, 2);
    assert!(export.capture().notes.iter().all(|note| !note.contains("Python")));
    export.python(THREAD, 10, 2, &[("step", "train.py", 12)]);
    let notes = export.capture().notes;
    assert!(notes.iter().any(|note| note.contains("Python") && note.contains("2024.6")), "{notes:?}");
    // Damaged payloads are not stacks either.
    let mut export = training(Version::New, 2);
    export.python(THREAD, 10, 2, &[("step", "train.py", 12)]);
    for data in ["x''", "x'01000000'", "zeroblob(40)", "zeroblob(4000)", "replace(hex(zeroblob(99)), '0', 'f')"] {
        export.db.execute(&format!("UPDATE NVTX_EVENTS SET binaryData = {data} WHERE eventType = 34"), []).unwrap();
        assert!(export.capture().notes.iter().any(|note| note.contains("Python")), "{data}");
    }
}

#[test]
fn names_of_streams_and_threads_are_read() {
    let mut export = Export::new(Version::Old);
    export.kernel_on(13, "k", (0, 1), (2, 3));
    export.insert("TARGET_INFO_NVTX_CUDA_STREAM", &[("name", &"compute"), ("deviceId", &0), ("streamId", &13)]);
    export.insert("NVTX_EVENTS", &[("start", &0), ("eventType", &39), ("globalTid", &THREAD), ("text", &"trainer")]);
    let capture = export.capture();
    assert_eq!(capture.streams.get(&13).map(String::as_str), Some("compute"));
    assert_eq!(capture.threads.get(&THREAD).map(String::as_str), Some("trainer"));
    assert_eq!(THREAD >> 24, PROCESS);
}

#[test]
fn files_that_are_not_exports_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let text = file(directory.path(), "text.sqlite", "no database, whatever its name says ".repeat(100).as_bytes());
    assert!(matches!(read(&text), Err(Error::Database { .. })));
    let other = directory.path().join("other.sqlite");
    rusqlite::Connection::open(&other).unwrap().execute("CREATE TABLE t (a)", []).unwrap();
    assert!(matches!(read(&other), Err(Error::Empty { .. })));
    assert!(matches!(read(directory.path()), Err(Error::Extracted { .. })));
    assert!(matches!(read(&directory.path().join("missing")), Err(Error::Io { .. })));
    let export = training(Version::Old, 25);
    let bytes = std::fs::read(&export.path).unwrap();
    for cut in [100, 4096, bytes.len() / 2, bytes.len() - 1] {
        let cut = file(directory.path(), "cut.sqlite", &bytes[..cut]);
        let error = read(&cut).map(|capture| attribute(&capture).waits.len());
        assert!(error.is_ok() || !error.unwrap_err().to_string().contains('\n'));
    }
}
