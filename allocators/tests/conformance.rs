//! One suite for every backend on every device: what `DeviceAllocator` promises, whatever is behind it.
//!
//! A CUDA device is used when there is one; without, its tests are ignored.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "conformance/bodies.rs"]
mod bodies;
#[path = "conformance/captures.rs"]
mod captures;
mod common;
#[path = "conformance/threads.rs"]
mod threads;
#[path = "common/trials.rs"]
mod trials;

use std::fmt;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab::backends;
use vramlab::{Backend, CudaDriver, DeviceAllocator, Driver, NullDriver, SimMemory};

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
    kind: &'static Backend,
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
    /// A simulated device has `room` bytes; a GPU has what it has. Panics without a GPU.
    fn open(kind: &'static Backend, device: Device, room: u64) -> Self {
        let mut turn = None;
        let driver: Arc<dyn Driver> = match device {
            Device::SimHost => common::sim(room, SimMemory::Host),
            Device::SimBare => common::sim(room, SimMemory::None),
            Device::Null => Arc::new(NullDriver::new(room)),
            Device::Cuda => {
                turn = Some(GPU.lock().unwrap_or_else(PoisonError::into_inner));
                Arc::new(CudaDriver::new(0).unwrap())
            }
        };
        Self { kind, device, driver, _turn: turn }
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

/// A test and how much room a simulated device has for it.
type Test = (&'static str, u64, fn(&Bench));

macro_rules! tests {
    ($($room:expr => $($file:ident::$body:ident)+;)+) => {
        [$($((stringify!($body), $room, $file::$body as fn(&Bench))),+),+]
    };
}

const TESTS: &[Test] = &tests! {
    64 << 30 =>
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
    ;
    64 << 30 =>
        captures::captured_memory_is_apart_and_pinned_until_release
        captures::memory_freed_in_a_capture_serves_that_capture
        captures::blocks_left_in_a_capture_are_an_error
        captures::a_block_from_before_is_freed_at_the_end_of_the_capture
        captures::a_block_that_a_captured_stream_uses_is_freed_outside_of_the_graph
        captures::memory_of_a_released_capture_comes_back
        captures::captures_live_side_by_side
        captures::captures_out_of_order_are_refused
    ;
    64 << 20 =>
        bodies::out_of_memory_is_reported_and_passes
        captures::a_capture_that_runs_out_of_memory_loses_nothing
    ;
};

const DEVICES: [(&str, Device); 4] = [
    ("on_sim", Device::SimHost),
    ("on_sim_without_memory", Device::SimBare),
    ("on_null", Device::Null),
    ("on_cuda", Device::Cuda),
];

fn main() -> ExitCode {
    let no_gpu = CudaDriver::probe().err().map(|_| "no CUDA device");
    let mut all = Vec::new();
    for kind in backends::all() {
        for (place, device) in DEVICES {
            for (name, room, body) in TESTS {
                let missing = no_gpu.filter(|_| device == Device::Cuda);
                let name = format!("{}_{place}::{name}", kind.name.replace('-', "_"));
                all.push(trials::trial(name, missing, move || body(&Bench::open(kind, device, *room))));
            }
        }
    }
    trials::run(all)
}
