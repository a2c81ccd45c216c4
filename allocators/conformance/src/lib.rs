//! The conformance suite: the contract of every allocator, as checks that any test harness can run on any backend.
//!
//! ```
//! use vramlab_policies::backends::naive;
//! use vramlab_conformance::{Device, conformance};
//!
//! let checks = conformance(&naive::BACKEND, &[Device::Null]);
//! let first = checks.into_iter().next().unwrap();
//! assert_eq!(first.name(), "naive_on_null::zero_bytes_are_refused");
//! first.run(); // panics where the backend does not keep its contract
//! ```
//!
//! A test of another crate passes them to its harness; `experiments/examples/out-of-tree/tests/conformance.rs` does so with
//! `libtest-mimic`. The checks demand exactly the [`Capabilities`] of the backend.
//!
//! Sizes follow the backend: one that reserves 64 MiB for a first request gets larger devices and larger requests.

mod blocks;
mod captures;
mod demand;
mod faults;
mod guests;
mod order;
mod private_pools;
mod scale;
mod sharing;
mod stress;
mod subject;
mod support;
mod threads;

pub use support::{Random, check_nothing_held, check_stats};

use demand::Outcome as _;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use subject::Subject;
use support::{GIB, MIB};
use vramlab_device::{CudaDriver, Driver, NullDriver, StreamId, sim::SimMemory};
use vramlab_policies::backends::{Capabilities, GraphCapture, Needs, SegmentUse, Selection};

vramlab_device::named! {
    /// A device that checks run on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Device {
        /// The simulated GPU with host memory: written data can be read back.
        Sim "sim",
        /// The simulated GPU without memory.
        SimWithoutMemory "sim_without_memory",
        /// The null device.
        Null "null",
        /// The first GPU of the machine. Where there is none, its checks report that they cannot run.
        Cuda "cuda",
    }
}

/// One check of the suite.
pub struct Check {
    name: String,
    missing: Option<&'static str>,
    body: Box<dyn FnOnce() + Send>,
}

impl Check {
    /// Its name: `caching_on_sim::live_blocks_are_disjoint`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The reason why it cannot run on this machine, if any. Run nevertheless, it fails.
    #[must_use]
    pub fn missing(&self) -> Option<&'static str> {
        self.missing
    }

    /// Runs it.
    ///
    /// # Panics
    /// When the backend does not keep its contract. The message is one line: the last call, its outcome, and the rule that the
    /// outcome breaks.
    pub fn run(self) {
        (self.body)();
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Check").field("name", &self.name).field("missing", &self.missing).finish_non_exhaustive()
    }
}

/// Checks on the GPU run one at a time, so that each observes only its own use of the device's memory.
static GPU: Mutex<()> = Mutex::new(());

/// A backend with settings, and a device with some room.
struct Bench {
    selection: Selection,
    device: Device,
    driver: Arc<dyn Driver>,
    /// Factor between the usual sizes and those for this backend.
    scale: u64,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl fmt::Debug for Bench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {:?}", self.selection, self.device)
    }
}

impl Bench {
    /// A simulated device has `room` bytes for a backend with usual segments, and more in proportion to the backend's
    /// [scale](scale::scale). A GPU has its own memory. Panics without a GPU.
    fn open(selection: Selection, device: Device, room: u64) -> Self {
        let scale = scale::scale(&selection);
        demand::Asked::Nothing.note();
        let room = room.saturating_mul(scale);
        let mut turn = None;
        let driver: Arc<dyn Driver> = match device {
            Device::Sim => support::sim(room, SimMemory::Host),
            Device::SimWithoutMemory => support::sim(room, SimMemory::None),
            Device::Null => Arc::new(NullDriver::new(room)),
            Device::Cuda => {
                turn = Some(GPU.lock().unwrap_or_else(PoisonError::into_inner));
                Arc::new(CudaDriver::new(0).granted())
            }
        };
        Self { selection, device, driver, scale, _turn: turn }
    }

    fn build(&self) -> Subject<'_> {
        Subject::new(self)
    }

    fn stream(&self) -> StreamId {
        self.driver.stream_create().granted()
    }

    fn streams<const N: usize>(&self) -> [StreamId; N] {
        std::array::from_fn(|_| self.stream())
    }

    fn capabilities(&self) -> Capabilities {
        self.selection.capabilities()
    }

    /// A size for this backend: `usual` for one with usual segments.
    fn scaled(&self, usual: u64) -> u64 {
        usual * self.scale
    }

    fn has_memory(&self) -> bool {
        matches!(self.device, Device::Sim | Device::Cuda)
    }

    /// Tolerance for the device's free memory when nothing is reserved: a GPU's driver keeps some for itself.
    fn slack(&self) -> u64 {
        if self.device == Device::Cuda { 64 * MIB } else { 0 }
    }
}

/// A check: its name, the room of its simulated device, and its function.
type Entry = (&'static str, u64, fn(&Bench));

macro_rules! entries {
    ($room:expr => $($file:ident::$body:ident)+) => { &[$((stringify!($body), $room, $file::$body as fn(&Bench))),+] };
}

/// Checks of every backend, on every device.
const ALWAYS: &[Entry] = entries! { 64 * GIB =>
    blocks::zero_bytes_are_refused
    blocks::a_huge_request_is_refused_and_the_allocator_stays_usable
    blocks::alignment_up_to_256_is_kept_and_512_refused
    blocks::live_blocks_are_disjoint
    blocks::patterns_survive_in_live_blocks
    blocks::freed_memory_is_used_again_by_its_stream
    blocks::freed_memory_stays_with_its_stream_where_that_is_said
    blocks::statistics_agree_with_what_was_done
    blocks::peaks_are_kept_and_start_again
    blocks::trim_returns_idle_memory
    blocks::a_recorded_use_delays_the_reuse_only
    blocks::a_foreign_block_is_refused
    blocks::the_peak_ledger_sums_to_what_is_not_in_use
    blocks::the_peak_ledger_follows_a_reset
    blocks::snapshots_are_whole
    blocks::dropping_returns_everything
    blocks::reports_and_names_are_complete
    guests::the_default_stream_is_one_like_others
    guests::a_stream_that_was_forgotten_costs_no_block
    guests::the_limit_changes_while_it_runs
    threads::threads_on_streams_of_their_own
    threads::a_block_may_be_freed_on_another_thread
};
/// Checks of every backend, on a device that is soon full.
const WHEN_FULL: &[Entry] = entries! { 64 * MIB => blocks::out_of_memory_is_reported_and_passes };
/// Checks of backends that serve requests in captures.
const CAPTURES: &[Entry] = entries! { 64 * GIB =>
    captures::captured_memory_is_apart_and_pinned_until_release
    captures::memory_freed_in_a_capture_serves_that_capture
    captures::blocks_left_in_a_capture_are_an_error
    captures::a_block_from_before_is_freed_at_the_end_of_the_capture
    captures::block_used_by_a_captured_stream_is_freed_outside_the_graph
    captures::a_capture_reuses_what_its_streams_have_left
    captures::memory_of_a_released_capture_comes_back
    captures::captures_live_side_by_side
    captures::captures_out_of_order_are_refused
};
const CAPTURES_WHEN_FULL: &[Entry] = entries! { 64 * MIB => captures::a_capture_that_runs_out_of_memory_loses_nothing };
/// Checks of backends that refuse captures.
const NO_CAPTURES: &[Entry] = entries! { 64 * GIB => captures::captures_are_refused };
/// Checks of backends with private pools.
const POOLS: &[Entry] = entries! { 64 * GIB =>
    private_pools::a_private_pool_shares_no_memory
    private_pools::memory_of_a_private_pool_stays_until_it_is_released
    private_pools::a_recorded_use_delays_the_reuse_in_a_private_pool
    private_pools::a_named_pool_serves_beside_the_others
    private_pools::private_pools_out_of_order_are_refused
};
const CHECKPOINTS: &[Entry] = entries! { 64 * GIB => private_pools::a_pool_goes_back_to_its_checkpoint };
/// Checks of backends with private pools that refuse checkpoints.
const NO_CHECKPOINTS: &[Entry] = entries! { 64 * GIB => private_pools::checkpoints_are_refused };
const POOLS_AND_CAPTURES: &[Entry] = entries! { 64 * GIB =>
    guests::a_capture_of_the_program_is_left_alone
    guests::a_capture_of_the_program_reuses_what_its_streams_have_left
};
/// Checks of backends that refuse private pools.
const NO_POOLS: &[Entry] = entries! { 64 * GIB => private_pools::private_pools_are_refused };
/// Checks of backends whose memory is mapped in pages.
const PAGES: &[Entry] = entries! { 64 * GIB =>
    sharing::every_page_of_a_block_is_exported
    sharing::pinned_pages_are_neither_moved_nor_unmapped
    sharing::pins_are_counted_and_an_allocator_that_ends_gives_them_up
};
/// Checks of all other backends.
const NO_PAGES: &[Entry] = entries! { 64 * GIB => sharing::memory_that_is_not_in_pages_is_neither_exported_nor_pinned };
/// Checks on a device whose calls can be made to fail.
const FAULTS: &[Entry] = entries! { 0 =>
    faults::every_driver_call_may_fail_once
    faults::a_fault_while_dropping_leaks_nothing
};
/// Checks on a device whose clocks tell when work ends.
const ORDER: &[Entry] = entries! { 0 =>
    order::a_recorded_use_ends_before_the_memory_is_used_again
    order::work_of_a_stream_ends_before_another_gets_its_memory
};
const CAPTURE_FAULTS: &[Entry] = entries! { 0 => faults::every_driver_call_may_fail_once_around_a_capture };
const STRESS: &[Entry] = entries! { 0 => stress::many_threads_with_the_checker };
const STRESS_LIMITED: &[Entry] = entries! { 0 => stress::many_threads_with_the_checker_under_a_limit };
const SPEED: &[Entry] = entries! { 0 => stress::many_threads_at_full_speed };
const SPEED_LIMITED: &[Entry] = entries! { 0 => stress::many_threads_at_full_speed_under_a_limit };
/// Replaces all other checks on a device that lacks a required feature.
const LACKING: &[Entry] = entries! { GIB => blocks::a_device_that_lacks_what_is_needed_is_refused };

/// Whether a device has the required features. A missing GPU has all features: its checks cannot run anyway.
fn has(device: Device, needs: Needs) -> bool {
    let (pools, vmm) = match device {
        Device::Cuda => {
            let gpu = CudaDriver::probe().ok().and_then(|gpus| gpus.into_iter().next());
            gpu.map_or((true, true), |gpu| (gpu.pools, gpu.vmm))
        }
        Device::Null => (true, true),
        Device::Sim | Device::SimWithoutMemory => {
            let memory = if device == Device::Sim { SimMemory::Host } else { SimMemory::None };
            let sim = support::sim(GIB, memory);
            (sim.pools().is_some(), sim.vmm().is_some())
        }
    };
    match needs {
        Needs::Nothing => true,
        Needs::Pools => pools,
        Needs::Vmm => vmm,
    }
}

/// The checks for a backend with these settings on a device.
fn demanded(selection: &Selection, device: Device) -> Vec<&'static [Entry]> {
    let Capabilities { graph_capture, needs, private_pools, checkpoints, .. } = selection.capabilities();
    if !has(device, needs) {
        return vec![LACKING];
    }
    let captures = graph_capture != GraphCapture::Refused;
    let limited = selection.backend().has_setting(stress::LIMIT);
    let mut out = vec![ALWAYS, WHEN_FULL];
    out.extend(if captures { vec![CAPTURES, CAPTURES_WHEN_FULL] } else { vec![NO_CAPTURES] });
    out.push(if private_pools { POOLS } else { NO_POOLS });
    out.extend(private_pools.then_some(if checkpoints { CHECKPOINTS } else { NO_CHECKPOINTS }));
    out.extend((private_pools && captures).then_some(POOLS_AND_CAPTURES));
    out.push(if selection.capabilities().segments == SegmentUse::Expandable { PAGES } else { NO_PAGES });
    match device {
        Device::SimWithoutMemory => {
            out.extend([FAULTS, ORDER]);
            out.extend(captures.then_some(CAPTURE_FAULTS));
        }
        Device::Sim => {
            out.push(STRESS);
            out.extend(limited.then_some(STRESS_LIMITED));
        }
        Device::Null => {
            out.push(SPEED);
            out.extend(limited.then_some(SPEED_LIMITED));
        }
        Device::Cuda => {}
    }
    out
}

/// The suite on some devices, for a backend with its default settings (`&BACKEND`) or for a [`Selection`]. The name of each check
/// begins with the selection's text, with `_` for every other character than letters and digits.
#[must_use]
pub fn conformance(of: impl Into<Selection>, devices: &[Device]) -> Vec<Check> {
    let (selection, mut out) = (of.into(), Vec::new());
    let prefix = selection.to_string().replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    for &device in devices {
        let no_gpu = if device == Device::Cuda { CudaDriver::probe().err().map(|_| "no CUDA device") } else { None };
        for &(name, room, body) in demanded(&selection, device).into_iter().flatten() {
            let selection = selection.clone();
            out.push(Check {
                name: format!("{prefix}_on_{device}::{name}"),
                missing: no_gpu,
                body: Box::new(move || body(&Bench::open(selection, device, room))),
            });
        }
    }
    out
}
