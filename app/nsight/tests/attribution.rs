//! Which call waited for which work, on exports made by hand.

use crate::common::{Export, OTHER_THREAD, Version, training};
use vramlab_nsight::names::Scope;
use vramlab_nsight::{Evidence, places};

const SYNC: &str = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION";
const EVENT: &str = "CUPTI_ACTIVITY_KIND_CUDA_EVENT";

fn old() -> Export {
    Export::new(Version::Old)
}

fn evidence(export: &Export, name: &str) -> Evidence {
    let (capture, attribution) = export.attribution();
    let number = capture.call_names.iter().position(|call| call.name == name).unwrap();
    attribution.evidence[number].clone()
}

fn wait(call: &str, work: &str, waited: i64) -> (String, String, i64) {
    (call.to_owned(), work.to_owned(), waited)
}

#[test]
fn a_free_waits_for_the_kernel_queued_before_it() {
    for version in [Version::Old, Version::New] {
        let export = training(version, 25);
        let (capture, attribution) = export.attribution();
        assert_eq!(attribution.waits.len(), 25);
        let fourth = attribution.waits[3];
        assert_eq!((fourth.waited_ns, fourth.blocked_ns, fourth.return_ns), (150, 156, 10));
        let (call, work) = (&capture.calls[fourth.call], &capture.work[fourth.work]);
        assert_eq!(capture.path(call.range), "epoch 1/step 4/forward/free 4 KiB");
        assert_eq!(capture.launch_path(work), "epoch 1/step 4/forward");
        assert_eq!((call.bytes, capture.work_name(work), work.queued), (Some(4096), "relu", 3000));
        let free = evidence(&export, "cuMemFree");
        assert_eq!((free.calls, free.outstanding, free.returned_before, free.waits_for), (50, 25, 0, Scope::Device));
        assert_eq!((free.idle_calls, free.idle_cost_ns, free.grounds()), (25, Some(4), "seen"));
        let alloc = evidence(&export, "cuMemAlloc");
        assert_eq!((alloc.outstanding, alloc.returned_before, alloc.waits_for), (25, 25, Scope::Nothing));
        assert_eq!(capture.step_count(), 25);
    }
}

#[test]
fn observation_outweighs_the_documents() {
    let mut export = old();
    for at in (0..25_000).step_by(1000) {
        export.kernel("k", (at, at + 5), (at + 10, at + 500));
        export.call("cuMemFree_v2", at + 20, at + 30); // returns while the kernel runs
        export.call("cuOddCall", at + 40, at + 510); // never returns before the kernel's end
    }
    assert_eq!(evidence(&export, "cuMemFree").waits_for, Scope::Nothing);
    assert_eq!(evidence(&export, "cuOddCall").waits_for, Scope::Device);
    assert!(export.waits().iter().all(|(call, _, _)| call == "cuOddCall"));
}

#[test]
fn a_wait_for_one_stream_ignores_the_others() {
    let mut export = old();
    export.kernel_on(7, "long", (0, 5), (10, 900));
    export.kernel_on(8, "short", (6, 9), (12, 100));
    let wait_call = export.call("cuStreamSynchronize", 20, 110);
    export.detail(SYNC, wait_call, Some(8), 0, 0);
    assert_eq!(export.waits(), [wait("cuStreamSynchronize", "short", 80)]);
}

#[test]
fn without_sync_records_a_stream_is_the_device() {
    let mut export = old();
    export.kernel("k", (0, 5), (10, 100));
    export.call("cudaStreamSynchronize_v3020", 20, 110);
    assert!(export.capture().notes.iter().any(|note| note.contains("taken for one for the device")));
    assert_eq!(export.waits(), [wait("cudaStreamSynchronize", "k", 80)]);
}

#[test]
fn an_event_used_twice_is_two_events() {
    let mut export = Export::new(Version::New);
    export.kernel("first", (0, 2), (5, 100));
    let record = export.call("cuEventRecord", 3, 4);
    export.detail(EVENT, record, Some(7), 1, 10);
    export.kernel("second", (5, 7), (100, 400));
    let record = export.call("cuEventRecord", 8, 9);
    export.detail(EVENT, record, Some(7), 1, 11);
    let sync = export.call("cuEventSynchronize", 20, 105);
    export.detail(SYNC, sync, None, 1, 10);
    assert_eq!(export.waits(), [wait("cuEventSynchronize", "first", 80)]);
}

#[test]
fn a_device_wait_reaches_every_stream() {
    let mut export = old();
    export.kernel_on(7, "a", (0, 5), (10, 300));
    export.kernel_on(8, "b", (6, 9), (12, 100));
    export.call("cuCtxSynchronize", 20, 310);
    assert_eq!(export.waits(), [wait("cuCtxSynchronize", "a", 280)]);
}

#[test]
fn copies_that_the_host_needs_wait_for_themselves() {
    let mut export = old();
    export.copy("cudaMemcpy_v3020", (0, 100), (20, 90), 1);
    export.copy("cuMemcpyDtoHAsync_v2", (200, 300), (220, 290), 0);
    export.copy("cuMemcpyDtoHAsync_v2", (400, 410), (404, 408), 1);
    let copy = "copy device to host";
    assert_eq!(export.waits(), [wait("cudaMemcpy", copy, 90), wait("cuMemcpyDtoHAsync", copy, 90)]);
    assert_eq!(evidence(&export, "cuMemcpyDtoHAsync").waits_for, Scope::Own);
}

#[test]
fn news_under_way_holds_a_call_up() {
    let mut export = old();
    export.kernel("k", (0, 5), (10, 48));
    export.call("cuMemFree_v2", 50, 60); // the kernel is over, but no call has waited for it
    export.call("cuMemFree_v2", 70, 74);
    let (_, attribution) = export.attribution();
    let waits: Vec<_> = attribution.waits.iter().map(|wait| (wait.waited_ns, wait.blocked_ns)).collect();
    assert_eq!(waits, [(0, 6)]);
}

#[test]
fn a_long_return_is_work_of_the_call() {
    let mut export = old();
    for (at, back) in [(0, 6), (1000, 6), (2000, 60)] {
        export.kernel("k", (at, at + 5), (at + 10, at + 100));
        export.call("cuMemFree_v2", at + 50, at + 100 + back);
        export.call("cuMemFree_v2", at + 300, at + 304);
    }
    let (_, attribution) = export.attribution();
    assert!(attribution.waits.iter().all(|wait| wait.blocked_ns == 52));
    assert_eq!(attribution.waits.iter().map(|wait| wait.return_ns).collect::<Vec<_>>(), [6, 6, 60]);
}

#[test]
fn a_launch_waits_where_the_queue_is_full() {
    let mut export = old();
    export.db.execute_batch("BEGIN").unwrap();
    for place in 0..1010 {
        let launch = match place {
            1005 => (4020, 5500),
            1006.. => (5500 + place, 5503 + place),
            _ => (place * 4, place * 4 + 3),
        };
        export.kernel("k", launch, (5000 + place * 100, 5090 + place * 100));
    }
    export.db.execute_batch("COMMIT").unwrap();
    // At 4020 all 1,005 are outstanding; the kernels at 5000 to 5490 end inside the call.
    let (_, attribution) = export.attribution();
    let waits: Vec<_> = attribution.waits.iter().map(|wait| (wait.waited_ns, wait.return_ns)).collect();
    assert_eq!(waits, [(5490 - 4020, 10)]);
}

#[test]
fn processes_do_not_mix() {
    let mut export = old();
    export.kernel("k", (0, 5), (10, 100));
    export.call_on((99 << 24) | 5, "cuCtxSynchronize", 20, 110);
    assert_eq!(export.waits(), []);
}

#[test]
fn ranges_of_threads_do_not_mix() {
    let mut export = old();
    export.range("first", 0, 1000);
    export.range_on(OTHER_THREAD, "second", 0, 1000);
    export.call("cuCtxSynchronize", 20, 110);
    export.call_on(OTHER_THREAD, "cuCtxSynchronize", 20, 110);
    let capture = export.capture();
    let mut paths: Vec<String> = capture.calls.iter().map(|call| capture.path(call.range)).collect();
    paths.sort();
    assert_eq!(paths, ["first", "second"]);
}

#[test]
fn a_graph_launch_is_work_unless_its_nodes_are_there() {
    let mut export = Export::new(Version::New);
    let launch = export.call("cudaGraphLaunch_v10000", 0, 5);
    export.graph(launch, (10, 500));
    export.call("cudaFree_v3020", 20, 510);
    assert_eq!(export.waits(), [wait("cudaFree", "graph 3", 480)]);
    export.run("node", launch, (10, 90), 7);
    assert_eq!(export.waits(), [wait("cudaFree", "node", 70)]);
}

#[test]
fn times_of_each_name_add_up() {
    let export = training(Version::New, 25);
    let (capture, attribution) = export.attribution();
    for (number, evidence) in attribution.evidence.iter().enumerate() {
        let own = attribution.waits.iter().filter(|wait| capture.calls[wait.call].name == number);
        assert_eq!(evidence.blocked_ns, own.map(|wait| wait.blocked_ns).sum::<i64>());
        assert!(evidence.blocked_ns <= evidence.total_ns);
    }
}

#[test]
fn memory_is_grouped_by_place() {
    let export = training(Version::New, 25);
    let (capture, attribution) = export.attribution();
    let places = places::memory(&capture, &attribution);
    let paths: Vec<&str> = places.iter().map(|place| place.path.as_str()).collect();
    assert_eq!(paths, ["epoch/step/forward"]);
    assert_eq!((places[0].operations, places[0].operations_ns), (25, 25 * 170));
    assert_eq!(places[0].paths.get("driver_free"), Some(&25));
    assert_eq!(places[0].calls.get("cuMemFree"), Some(&50));
    assert_eq!(places[0].blocked_ns, 25 * 156);
    assert_eq!(places::general("steps 9 to 16/free 1.5 MiB"), "steps");
    assert_eq!(places::general("stepping stone"), "stepping stone");
}
