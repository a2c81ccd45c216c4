//! Idle times of the device, and how launches arrive.

use crate::common::{Export, OTHER_THREAD, THREAD, Version};
use std::collections::BTreeMap;
use vramlab_nsight::idle::{ARRIVING, HOST_CODE, PROFILER, busy_ns, by_cause, launches};

#[test]
fn idle_time_goes_to_the_calls_of_the_launching_thread() {
    let mut export = Export::new(Version::Old);
    export.kernel("a", (0, 5), (10, 100));
    export.call("cuMemFree_v2", 50, 130);
    export.call("cuMemAlloc_v2", 140, 200);
    export.call_on(OTHER_THREAD, "cuMemAlloc_v2", 150, 160); // of a thread that does not launch
    export.insert("PROFILER_OVERHEAD", &[("start", &205), ("end", &215), ("globalTid", &THREAD)]);
    export.kernel("b", (240, 245), (250, 300));
    let capture = export.capture();
    let causes: BTreeMap<String, i64> =
        by_cause(&capture, None).into_iter().map(|row| (row.cause, row.total_ns)).collect();
    let expected = [("mem_free", 30), ("mem_alloc", 60), (PROFILER, 10), (HOST_CODE, 40), (ARRIVING, 10)];
    assert_eq!(causes, expected.into_iter().map(|(cause, ns)| (cause.to_owned(), ns)).collect());
}

#[test]
fn streams_are_merged() {
    let mut export = Export::new(Version::Old);
    export.kernel_on(7, "a", (0, 1), (10, 100));
    export.kernel_on(8, "b", (2, 3), (50, 200));
    export.kernel_on(7, "c", (4, 5), (210, 300));
    let capture = export.capture();
    let causes: Vec<_> = by_cause(&capture, None).into_iter().map(|row| (row.cause, row.total_ns)).collect();
    assert_eq!(causes, [(ARRIVING.to_owned(), 10)]);
    assert_eq!(busy_ns(&capture), 190 + 90);
}

#[test]
fn gaps_and_latencies_are_of_one_stream() {
    let mut export = Export::new(Version::Old);
    export.kernel_on(7, "a", (0, 1), (10, 100));
    export.kernel_on(8, "b", (2, 3), (50, 200));
    export.kernel_on(7, "a", (40, 45), (110, 120));
    let rows = launches(&export.capture());
    let a = rows.iter().find(|row| row.name == "a").unwrap();
    assert_eq!((a.count, a.total_ns, a.median_gap_ns, a.queued_behind), (2, 100, Some(10), 1));
    assert_eq!(a.median_latency_ns, Some((10 + 70) / 2));
    assert_eq!(rows.iter().find(|row| row.name == "b").unwrap().median_gap_ns, None);
}
