//! One suite for every backend on every device: what `DeviceAllocator` promises, whatever is behind it.
//!
//! A CUDA device is used when there is one; without, its tests say on the real stderr that they were skipped.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "conformance/bodies.rs"]
mod bodies;
#[path = "conformance/captures.rs"]
mod captures;
mod common;
#[path = "conformance/threads.rs"]
mod threads;

use allocators::{BackendKind, CudaDriver, CudaUnavailable, DeviceAllocator, Driver, NullDriver, SimMemory};
use std::fmt;
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device that the suite runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    SimHost,
    SimBare,
    Null,
    Cuda,
}

/// Tests on the GPU run one at a time, so that each sees its own use of the device's memory only.
static GPU: Mutex<()> = Mutex::new(());

/// A backend's kind, and a device with some room.
struct Bench {
    kind: BackendKind,
    device: Device,
    driver: Arc<dyn Driver>,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl fmt::Debug for Bench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {:?}", self.kind, self.device)
    }
}

impl Bench {
    /// A simulated device has `room` bytes; a GPU has what it has. `None` without a GPU.
    fn open(kind: BackendKind, device: Device, room: u64) -> Option<Self> {
        let mut turn = None;
        let driver: Arc<dyn Driver> = match device {
            Device::SimHost => common::sim(room, SimMemory::Host),
            Device::SimBare => common::sim(room, SimMemory::None),
            Device::Null => Arc::new(NullDriver::new(room)),
            Device::Cuda => {
                turn = Some(GPU.lock().unwrap_or_else(PoisonError::into_inner));
                match CudaDriver::new(0) {
                    Ok(driver) => Arc::new(driver),
                    Err(why) => {
                        say_skipped(kind, &why);
                        return None;
                    }
                }
            }
        };
        Some(Self { kind, device, driver, _turn: turn })
    }

    fn build(&self) -> Arc<dyn DeviceAllocator> {
        common::build(self.kind, &self.driver)
    }

    fn has_memory(&self) -> bool {
        matches!(self.device, Device::SimHost | Device::Cuda)
    }

    /// What the device's free memory may differ by though nothing is held: a GPU's driver keeps some for itself.
    fn slack(&self) -> u64 {
        if self.device == Device::Cuda { 64 * common::MIB } else { 0 }
    }
}

/// Once for each backend, and past the capture of the test harness: a skipped test should be seen.
fn say_skipped(kind: BackendKind, why: &CudaUnavailable) {
    static SAID: Mutex<Vec<BackendKind>> = Mutex::new(Vec::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if !said.contains(&kind) {
        said.push(kind);
        let line = format!("\nskipped: no CUDA device, so the tests of '{kind}' on CUDA did nothing ({why})\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

fn run(kind: BackendKind, device: Device, room: u64, body: fn(&Bench)) {
    if let Some(bench) = Bench::open(kind, device, room) {
        body(&bench);
    }
}

macro_rules! suite {
    ($($module:ident: $backend:ident on $device:ident;)+) => { $(
        mod $module {
            use super::{Device, bodies, captures, run, threads};
            use allocators::BackendKind;
            suite! { @tests $backend, $device, 64 << 30;
                bodies::zero_bytes_are_refused
                bodies::a_huge_request_is_refused_and_the_allocator_stays_usable
                bodies::alignment_up_to_256_is_kept_and_512_refused
                bodies::live_blocks_are_disjoint
                bodies::patterns_survive_in_live_blocks
                bodies::freed_memory_is_used_again_by_its_stream
                bodies::statistics_agree_with_what_was_done
                bodies::peaks_are_kept_and_start_again
                bodies::trim_returns_idle_memory
                bodies::a_recorded_use_delays_the_reuse_only
                bodies::a_foreign_block_is_refused
                bodies::the_peak_ledger_sums_to_what_is_not_in_use
                bodies::the_peak_ledger_follows_a_reset
                bodies::snapshots_are_whole
                bodies::dropping_returns_everything
                bodies::reports_and_names_are_complete
                threads::threads_on_streams_of_their_own
                threads::a_block_may_be_freed_on_another_thread
            }
            suite! { @tests $backend, $device, 64 << 30;
                captures::captured_memory_is_apart_and_pinned_until_release
                captures::memory_freed_in_a_capture_serves_that_capture
                captures::blocks_left_in_a_capture_are_an_error
                captures::a_block_from_before_is_freed_at_the_end_of_the_capture
                captures::a_block_that_a_captured_stream_uses_is_freed_outside_of_the_graph
                captures::memory_of_a_released_capture_comes_back
                captures::captures_live_side_by_side
                captures::captures_out_of_order_are_refused
            }
            suite! { @tests $backend, $device, 64 << 20;
                bodies::out_of_memory_is_reported_and_passes
                captures::a_capture_that_runs_out_of_memory_loses_nothing
            }
        }
    )+ };
    (@tests $backend:ident, $device:ident, $room:expr; $($file:ident::$body:ident)+) => { $(
        #[test]
        fn $body() {
            run(BackendKind::$backend, Device::$device, $room, $file::$body);
        }
    )+ };
}

suite! {
    naive_on_sim: Naive on SimHost;
    naive_on_sim_without_memory: Naive on SimBare;
    naive_on_null: Naive on Null;
    naive_on_cuda: Naive on Cuda;
    caching_on_sim: Caching on SimHost;
    caching_on_sim_without_memory: Caching on SimBare;
    caching_on_null: Caching on Null;
    caching_on_cuda: Caching on Cuda;
    stream_ordered_on_sim: StreamOrdered on SimHost;
    stream_ordered_on_sim_without_memory: StreamOrdered on SimBare;
    stream_ordered_on_null: StreamOrdered on Null;
    stream_ordered_on_cuda: StreamOrdered on Cuda;
}
