//! The small tables of a capture: written, read again, damaged.

use crate::common::{Export, OTHER_THREAD, PROCESS, Version, training};
use std::path::Path;
use vramlab_nsight::{Error, attribute, extract, idle, places, read};

fn extracted(export: &Export) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    extract(&export.capture(), directory.path()).unwrap();
    directory
}

#[test]
fn extracted_tables_give_the_same_answers() {
    for version in [Version::Old, Version::New] {
        let mut export = training(version, 25);
        let failed = export.call_on(OTHER_THREAD, "cuMemAlloc_v2", 25_000, 25_010);
        let sql = "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET returnValue = 2 WHERE correlationId = ?1";
        export.db.execute(sql, [failed]).unwrap();
        export.copy("cudaMemcpy_v3020", (26_000, 26_100), (26_020, 26_090), 0);
        export.insert("PROFILER_OVERHEAD", &[("start", &205), ("end", &215), ("globalTid", &OTHER_THREAD)]);
        let (capture, attribution) = export.attribution();
        let directory = extracted(&export);
        let again = read(directory.path()).unwrap();
        let repeated = attribute(&again);
        assert_eq!(format!("{:?}", repeated.waits), format!("{:?}", attribution.waits));
        assert_eq!(format!("{:?}", repeated.evidence), format!("{:?}", attribution.evidence));
        assert_eq!(format!("{:?}", idle::by_cause(&again, None)), format!("{:?}", idle::by_cause(&capture, None)));
        assert_eq!(format!("{:?}", idle::launches(&again)), format!("{:?}", idle::launches(&capture)));
        let places = [places::memory(&again, &repeated), places::memory(&capture, &attribution)];
        assert_eq!(format!("{:?}", places[0]), format!("{:?}", places[1]));
        assert_eq!(again.calls.iter().filter(|call| !call.ok).count(), 1);
        assert_eq!(again.overhead.len(), 1);
        assert_eq!(again.notes, capture.notes);
        // A directory that was extracted from extracted tables is the same to the last byte.
        let second = tempfile::tempdir().unwrap();
        extract(&again, second.path()).unwrap();
        for file in std::fs::read_dir(directory.path()).unwrap() {
            let file = file.unwrap();
            assert_eq!(
                std::fs::read(file.path()).unwrap(),
                std::fs::read(second.path().join(file.file_name())).unwrap()
            );
        }
    }
}

#[test]
fn extracted_tables_have_no_ids_of_the_machine() {
    let export = training(Version::New, 3);
    let capture = read(extracted(&export).path()).unwrap();
    assert!(capture.calls.iter().all(|call| (call.process, call.thread) == (0, 0)));
    assert!(capture.work.iter().all(|work| work.process == 0), "{PROCESS}");
    assert_eq!(capture.calls[0].start, 0);
}

#[test]
fn ranges_and_marks_may_be_missing() {
    let directory = extracted(&training(Version::Old, 25));
    for name in ["ranges.csv.xz", "marks.csv.xz"] {
        std::fs::remove_file(directory.path().join(name)).unwrap();
    }
    let capture = read(directory.path()).unwrap();
    assert_eq!(attribute(&capture).waits.len(), 25);
    assert!(capture.notes.iter().any(|note| note.contains("without NVTX ranges")), "{:?}", capture.notes);
}

#[test]
fn damaged_tables_are_refused_in_one_line() {
    let refused = |change: &dyn Fn(&Path), part: &str| {
        let directory = extracted(&training(Version::Old, 2));
        change(directory.path());
        let error = read(directory.path()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(part) && !text.contains('\n'), "{text}");
        assert!(matches!(error, Error::Extracted { .. } | Error::Io { .. }));
    };
    let table = |rows: &'static str| {
        move |directory: &Path| {
            let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 6);
            std::io::Write::write_all(&mut xz, rows.as_bytes()).unwrap();
            std::fs::write(directory.join("ranges.csv.xz"), xz.finish().unwrap()).unwrap();
        }
    };
    refused(&|directory| std::fs::remove_file(directory.join("capture.json")).unwrap(), "no capture.json");
    refused(&|directory| std::fs::remove_file(directory.join("work.csv.xz")).unwrap(), "work.csv.xz");
    refused(&|directory| std::fs::write(directory.join("capture.json"), "[]").unwrap(), "capture.json");
    refused(
        &|directory| std::fs::write(directory.join("capture.json"), r#"{"schema_version":9}"#).unwrap(),
        "version 9",
    );
    refused(&|directory| std::fs::write(directory.join("calls.csv.xz"), "text").unwrap(), "calls.csv.xz");
    refused(&table("after,duration,text,thread\n1,2,x\n"), "ranges.csv.xz");
    refused(&table("after,duration,text,thread\n1,-2,x,0\n"), "line 2");
    refused(&table("after,duration,text,thread\n9223372036854775807,1,x,0\n"), "line 2");
    refused(&table("start,duration,text,thread\n1,2,x,0\n"), "after");
    refused(
        &|directory| {
            let path = directory.join("calls.csv.xz");
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        },
        "calls.csv.xz",
    );
}
