//! What a replay found.

use super::counting::Requests;
use std::collections::BTreeMap;
use vramlab_policies::contract::Ledger;
use vramlab_policies::contract::Stats;

/// What a replay found. Figures are those right after the last operation; blocks that the history leaves live are
/// still held then.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayReport {
    /// Allocations that were tried, the prologue included.
    pub allocations: u64,
    /// Allocations that failed for lack of memory; what the history does with their blocks is left out.
    pub failed_allocations: u64,
    /// Number of the first allocation that failed, from 1, and the allocator's words.
    pub first_failure: Option<(u64, String)>,
    /// Allocations that came at another address than the recorded one, or the one that another allocator put them at, failed
    /// ones included; `None` when addresses are the device's own.
    pub address_mismatches: Option<u64>,
    /// Segment events that differ from the recorded ones, or from what another allocator took from its device, in kind, order,
    /// address or size; `None` when addresses are the device's own.
    pub segment_mismatches: Option<u64>,
    /// The backend's settings in effect.
    pub settings: serde_json::Value,
    /// The backend's statistics.
    pub stats: Stats,
    /// Where reserved minus requested went when reserved was highest.
    pub ledger: Ledger,
    /// Driver calls made while the history was replayed, by name; streams and teardown are not counted.
    pub driver_calls: BTreeMap<&'static str, u64>,
    /// The host's time in these calls by the device's clock, waits included; `None` on a device whose calls cost nothing.
    pub driver_ns: Option<u64>,
    /// Requests by how they were served ([`Path::name`](vramlab_policies::Path::name)), each with the driver calls inside it.
    pub requests: BTreeMap<&'static str, Requests>,
    /// Time spent in driver calls by the simulated clock; `None` on a device with real time.
    pub simulated_ns: Option<u64>,
    /// The machine's time for the whole list of operations.
    pub host_ns: u64,
    /// Operations: allocations, frees, uses and trims.
    pub operations: u64,
    /// Whether the allocator kept the private pools of the history apart. If not, one pool served all.
    pub private_pools: bool,
}

impl ReplayReport {
    /// Peak active over peak reserved; `None` when nothing was reserved.
    #[must_use]
    pub fn utilisation(&self) -> Option<f64> {
        let reserved = self.stats.reserved_bytes.all.peak;
        // CAST: bytes of a device are below 2^53.
        (reserved > 0).then(|| self.stats.active_bytes.all.peak as f64 / reserved as f64)
    }

    /// The machine's time for one operation, in nanoseconds; `None` without operations.
    #[must_use]
    pub fn host_ns_per_op(&self) -> Option<f64> {
        // CAST: as above.
        (self.operations > 0).then(|| self.host_ns as f64 / self.operations as f64)
    }
}
