//! Exports that lack something, that are damaged, or that are not exports.

use crate::common::{Export, PROCESS, THREAD, Version, file, open, training};
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
