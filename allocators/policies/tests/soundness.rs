//! Safe code cannot cause undefined behaviour: handles are checked wherever it matters, and only their owner can destroy their
//! objects. The documentation's examples (`Block`, the handles) show the compile errors.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;
#[path = "../../device/tests/common/trials.rs"]
mod trials;

use common::{GIB, MIB, build, capturing, sim};
use std::process::ExitCode;
use std::sync::Arc;
use trials::trials;
use vramlab_device::{CudaDriver, Driver, DriverError, GraphId, NullDriver, StreamId, sim::SimMemory};
use vramlab_policies::backends::caching;
use vramlab_policies::{AllocError, Capture, Memory};

/// Values without an object, at the edges and in the range of drivers' handles.
const FORGED: [u64; 5] = [0, 3, 0x7f00_dead_b000, i64::MAX as u64, u64::MAX];

fn refused<T: std::fmt::Debug>(result: Result<T, DriverError>) {
    assert_eq!(result.unwrap_err().code, DriverError::INVALID_HANDLE);
}

/// Every safe call of a driver that takes a stream or an event that is not its own.
fn refuses_foreign(driver: &dyn Driver, other: &dyn Driver) {
    let (stream, event) = (driver.stream_create().unwrap(), driver.event_create(true).unwrap());
    let forged = FORGED.map(|raw| {
        // SAFETY: the test is that a driver refuses handles that it did not make; none has an object.
        unsafe { (StreamId::from_raw(raw), vramlab_device::EventId::from_raw(raw), GraphId::from_raw(raw)) }
    });
    let mut foreign: Vec<_> = forged.to_vec();
    // More of them than this driver has, so that numbers that count up do not happen to be its own.
    let theirs = (0..8).map(|_| (other.stream_create().unwrap(), other.event_create(false).unwrap())).last().unwrap();
    foreign.push((theirs.0, theirs.1, forged[0].2));
    for (stranger, strange, graph) in foreign {
        refused(driver.stream_synchronize(stranger));
        refused(driver.stream_wait_event(stranger, event));
        refused(driver.stream_wait_event(stream, strange));
        refused(driver.event_record(event, stranger));
        refused(driver.event_record(strange, stream));
        refused(driver.event_query(strange));
        refused(driver.event_synchronize(strange));
        refused(driver.event_elapsed_ns(strange, event));
        refused(driver.event_elapsed_ns(event, strange));
        let graphs = driver.graphs().unwrap();
        refused(graphs.capture_begin(stranger));
        // SAFETY: there is no such graph, so none of its memory was released.
        refused(unsafe { graphs.graph_launch(graph, stream) });
        if let Some(pools) = driver.pools() {
            let pool = pools.pool_create(vramlab_device::PoolSettings::default()).unwrap();
            refused(pools.mem_alloc_async(pool, MIB, stranger));
            for raw in FORGED {
                // SAFETY: as above.
                let strange = unsafe { vramlab_device::PoolId::from_raw(raw | 1 << 20) };
                refused(pools.mem_alloc_async(strange, MIB, stream));
                refused(pools.pool_counters(strange));
                refused(pools.pool_trim_to(strange, 0));
            }
        }
    }
    driver.stream_synchronize(stream).unwrap();
    driver.event_record(event, stream).unwrap();
}

fn the_simulated_device_refuses_handles_that_it_did_not_make() {
    refuses_foreign(sim(GIB, SimMemory::None).as_ref(), sim(GIB, SimMemory::None).as_ref());
}

fn cuda_sees_no_handle_that_its_driver_did_not_make() {
    let (driver, other) = (CudaDriver::new(0).unwrap(), CudaDriver::new(0).unwrap());
    refuses_foreign(&driver, &other);
    // A driver that is opened after another one was dropped gets no stream of that one, though the context may be the same.
    let old = other.stream_create().unwrap();
    drop(other);
    refused(driver.raw_stream(old));
    refused(CudaDriver::new(0).unwrap().stream_synchronize(old));
}

fn a_capture_of_another_allocator_cannot_be_ended() {
    for kind in capturing() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(GIB));
        let (mine, theirs) = (build(kind, &driver), build(kind, &driver));
        let stream = driver.stream_create().unwrap();
        let (own, other) = (mine.capture_begin(stream).unwrap(), theirs.capture_begin(stream).unwrap());
        assert_ne!(own, other, "{kind}: the number of one capture would end the other");
        assert!(matches!(mine.capture_end(other), Err(AllocError::Capture { .. })), "{kind}");
        mine.capture_end(own).unwrap();
        assert!(matches!(mine.capture_release(other), Err(AllocError::Capture { .. })), "{kind}");
        mine.capture_release(own).unwrap();
    }
}

fn a_graph_that_is_gone_is_not_launched() {
    let drivers: [Arc<dyn Driver>; 2] = [sim(GIB, SimMemory::Host), Arc::new(NullDriver::new(GIB))];
    for driver in drivers {
        let memory = Memory::new(build(&caching::BACKEND, &driver));
        let stream = driver.stream_create().unwrap();
        let capture = Capture::begin(&memory, &driver, stream).unwrap();
        drop(memory.allocate(MIB, stream).unwrap());
        let mut graph = capture.end().unwrap();
        graph.launch(stream).unwrap();
        let error = graph.launch_nth(1, stream).unwrap_err();
        assert_eq!((error.code, error.context.as_str()), (DriverError::INVALID_HANDLE, "no graph 1 of 1"));
        graph.launch(stream).unwrap();
        graph.release().unwrap();
    }
}

fn main() -> ExitCode {
    let no_gpu = CudaDriver::probe().err().map(|_| "no CUDA device");
    trials::run(trials! {
        None =>
            the_simulated_device_refuses_handles_that_it_did_not_make
            a_capture_of_another_allocator_cannot_be_ended
            a_graph_that_is_gone_is_not_launched;
        no_gpu =>
            cuda_sees_no_handle_that_its_driver_did_not_make;
    })
}
