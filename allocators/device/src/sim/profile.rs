//! Device profiles: the cost of each call on a GPU, as JSON. The H200's is built in.

use crate::input::{WRITTEN, read_text};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// A cost in nanoseconds as a function of bytes: points `[bytes, ns]` in ascending order, connected by straight lines; constant
/// before the first point, and beyond the last with the slope of the last line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CostBySize(Vec<(u64, u64)>);

impl CostBySize {
    /// A cost from points in ascending order of bytes; [`Profile::from_json`] checks the order.
    #[must_use]
    pub fn new(points: Vec<(u64, u64)>) -> Self {
        Self(points)
    }

    /// The cost for `bytes`.
    #[must_use]
    pub fn at(&self, bytes: u64) -> u64 {
        let points = &self.0;
        let upper = points.partition_point(|&(size, _)| size < bytes);
        if upper == 0 || points.len() == 1 {
            return points[0].1;
        }
        let (left, right) = if upper == points.len() { (upper - 2, upper - 1) } else { (upper - 1, upper) };
        let ((x0, y0), (x1, y1)) = (points[left], points[right]);
        // CAST: costs and sizes are far below 2^53, and the result is rounded to whole nanoseconds.
        let slope = (y1 as f64 - y0 as f64) / (x1 - x0) as f64;
        (y0 as f64 + slope * (bytes as f64 - x0 as f64)).round().max(0.0) as u64
    }
}

/// Plain memory: `cuMemAlloc` and `cuMemFree`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlainMemory {
    /// The driver allocates memory in pages of this size and packs smaller blocks into them.
    pub page_bytes: u64,
    /// Blocks are rounded up to this many bytes.
    pub align_bytes: u64,
    /// Host cost of an allocation that needs new pages, while a kernel runs.
    pub alloc_ns: CostBySize,
    /// Host cost of an allocation that fits in a mapped page.
    pub alloc_in_page_ns: u64,
    /// Host cost of a free that releases pages, once the device is idle.
    pub free_ns: CostBySize,
    /// Host cost of a free that leaves its page in use, once the device is idle.
    pub free_in_page_ns: u64,
    /// Whether a free waits until the whole device is idle.
    pub free_drains_device: bool,
}

/// Stream-ordered pools.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolMemory {
    /// A pool reserves memory from the device in multiples of this.
    pub granule_bytes: u64,
    /// Blocks are rounded up to this many bytes.
    pub align_bytes: u64,
    /// Host cost of creating a pool.
    pub create_ns: u64,
    /// Host cost of an allocation served from reserved memory of the pool.
    pub alloc_ns: u64,
    /// Additional host cost for each granule that an allocation reserves.
    pub grow_ns_per_granule: u64,
    /// Host cost of a free.
    pub free_ns: u64,
    /// Time that frees take in their stream between two pieces of work, however many there are. Allocations take none: in captures
    /// of an H200 the gap before a kernel is as long behind allocations as without them.
    pub stream_ns: u64,
    /// Additional host cost of a synchronise or trim for each released granule.
    pub release_ns_per_granule: u64,
    /// Host cost of reading or writing an attribute.
    pub attribute_ns: u64,
}

/// Virtual memory management.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VirtualMemory {
    /// Granularity of every size and address.
    pub granularity_bytes: u64,
    /// Host cost of `cuMemAddressReserve`.
    pub reserve_ns: CostBySize,
    /// Host cost of `cuMemCreate`.
    pub create_ns: CostBySize,
    /// Host cost of `cuMemMap`.
    pub map_ns: CostBySize,
    /// Host cost of `cuMemSetAccess`.
    pub set_access_ns: CostBySize,
    /// Host cost of `cuMemUnmap`.
    pub unmap_ns: CostBySize,
    /// Host cost of `cuMemRelease`.
    pub release_ns: CostBySize,
}

/// Queues, events and synchronisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Queues {
    /// Host cost of a kernel launch.
    pub launch_ns: u64,
    /// Time from the end of the launch call until an idle device starts the kernel.
    pub start_latency_ns: u64,
    /// A launch blocks while this many operations of its stream are unfinished.
    pub depth: usize,
    /// Host cost of a stream synchronise, beyond the wait.
    pub stream_synchronize_ns: u64,
    /// Host cost of a device synchronise, beyond the wait.
    pub device_synchronize_ns: u64,
    /// Host cost of creating a stream.
    pub stream_create_ns: u64,
    /// Host cost of creating an event.
    pub event_create_ns: u64,
    /// Host cost of destroying an event.
    pub event_destroy_ns: u64,
    /// Host cost of recording an event.
    pub event_record_ns: u64,
    /// Host cost of querying an event.
    pub event_query_ns: u64,
    /// Host cost of making a stream wait for an event.
    pub event_wait_ns: u64,
    /// Host cost of `cuMemGetInfo`.
    pub mem_get_info_ns: u64,
}

/// Graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphCosts {
    /// Host cost of a launch, which does not depend on the number of nodes.
    pub launch_ns: u64,
    /// Device time between two nodes of a launch that follow one another, beyond their own.
    pub node_gap_ns: u64,
}

impl Default for GraphCosts {
    /// An H200's.
    fn default() -> Self {
        // Graphs of 1, 20 and 100 kernels were launched in 1.0 us (p99: 1.4 us), and 100 empty kernels in a chain ran at
        // 0.51 us each, with driver 580.159 and CUDA 13.0.
        Self { launch_ns: 1_000, node_gap_ns: 510 }
    }
}

/// Links between GPUs of one host. An all-reduce takes `base_ns + 2 (n - 1) hop_ns + 2 (n - 1) / n * bytes / bytes_per_ns`: a
/// ring of n ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCosts {
    /// Device time of a collective without data on one rank.
    pub base_ns: u64,
    /// Latency of one hop of the ring.
    pub hop_ns: u64,
    /// Bandwidth of each rank's links in one direction (NCCL's bus bandwidth).
    pub bytes_per_ns: f64,
}

impl Default for LinkCosts {
    /// An H200's on NVLink. Latencies are those of NCCL 2.30's own cost model for a ring with its low-latency protocol on NVLink. The
    /// bandwidth is that of two H200s with NVLink multicast off: an all-reduce of 256 MiB took 916 us.
    fn default() -> Self {
        Self { base_ns: 6_600, hop_ns: 600, bytes_per_ns: 295.5 }
    }
}

impl LinkCosts {
    /// Device time of an all-reduce of this many bytes over this many ranks, from the start of the last rank.
    #[must_use]
    pub fn all_reduce_ns(&self, ranks: u64, bytes: u64) -> u64 {
        let hops = 2 * ranks.saturating_sub(1);
        // CAST: a cost model; the inputs are far below 2^53, and whole nanoseconds are enough.
        let transfer = hops as f64 / ranks.max(1) as f64 * bytes as f64 / self.bytes_per_ns;
        self.base_ns + hops * self.hop_ns + transfer.round() as u64
    }
}

/// Copies and fills.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copies {
    /// Host cost of a copy from pageable memory.
    pub pageable_to_device_ns: CostBySize,
    /// Host cost of queueing a copy from page-locked memory.
    pub pinned_to_device_ns: u64,
    /// Device time of a copy to the device.
    pub to_device_ns: CostBySize,
    /// Host cost of a copy to the host, beyond the wait for the stream.
    pub to_host_ns: CostBySize,
    /// Host cost of a fill.
    pub memset_ns: u64,
    /// Host cost of page-locking memory.
    pub host_alloc_ns: CostBySize,
    /// Host cost of returning page-locked memory.
    pub host_free_ns: CostBySize,
}

/// How long a kernel runs: `fixed_ns + (waves x iterations - 1) x iteration_ns + bytes / bytes_per_ns`, where
/// `waves = ceil(blocks / blocks_per_wave)`. The two terms add up because a block waits for the data of a trip before
/// it computes on them: of timings of every kernel at many shapes a sum misses less than the longer of the two does. The
/// first trip is in `fixed_ns`, for it has no other before it. That is with its data in the L2 cache. With all of them in
/// memory the figures of `from_memory` stand in; between the two the time is interpolated by the share of bytes that was
/// not in the cache (see [`Profile::l2_bytes`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelCost {
    /// Time that every launch takes on the device, the first trip of its blocks' main loop included.
    pub fixed_ns: f64,
    /// Time of each further trip.
    pub iteration_ns: f64,
    /// Thread blocks that run at once.
    pub blocks_per_wave: u64,
    /// Bandwidth.
    pub bytes_per_ns: f64,
    /// Rate where the data come from memory; absent: as from the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_memory: Option<MemoryCost>,
}

/// The cost of a kernel when all its data come from memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryCost {
    /// Time that every launch takes on the device, the first trip of its blocks' main loop included.
    pub fixed_ns: f64,
    /// Time of each further trip.
    pub iteration_ns: f64,
    /// Bandwidth.
    pub bytes_per_ns: f64,
}

impl KernelCost {
    /// Device time of one launch in nanoseconds; `missed` is the share of its bytes that come from memory, 0 to 1.
    #[must_use]
    pub fn ns(&self, blocks: u64, iterations: u64, bytes: u64, missed: f64) -> f64 {
        // CAST: a cost model; the inputs are far below 2^53.
        let further = (blocks.div_ceil(self.blocks_per_wave) * iterations).saturating_sub(1) as f64;
        let time = |fixed_ns: f64, iteration_ns: f64, bytes_per_ns: f64| {
            fixed_ns + further * iteration_ns + bytes as f64 / bytes_per_ns
        };
        let hot = time(self.fixed_ns, self.iteration_ns, self.bytes_per_ns);
        match &self.from_memory {
            Some(cold) if missed > 0.0 => {
                hot + missed * (time(cold.fixed_ns, cold.iteration_ns, cold.bytes_per_ns) - hot)
            }
            _ => hot,
        }
    }
}

/// Everything the simulated device needs to know of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name of the GPU.
    pub name: String,
    /// Where and when it was measured.
    pub source: String,
    /// Memory of the device in bytes.
    pub total_bytes: u64,
    /// Memory that a fresh context already uses, in bytes.
    pub context_bytes: u64,
    /// What the L2 cache holds of the data touched last, in bytes. Absent: all data count as in the cache. It is less
    /// than the cache's size on the data sheet. No command measures it; `fit-kernels --l2-bytes` sets it. The H200's was
    /// chosen by captures of training steps at width 2048: a product whose weights were last used 17 MB of other data
    /// before takes as long as from the cache, one after 24 MB nearly as long as from memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2_bytes: Option<u64>,
    /// Host time of the program for each of its driver calls, beyond what the call itself costs above and below: the
    /// trainer's own code between two calls, and what a call takes longer there, with cold caches, than in a loop over
    /// it alone. [`SimDriver::run_program`](super::SimDriver::run_program) charges it; `fit-program` takes it from
    /// recorded runs of the trainer in which the host was the bottleneck.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub program_ns_per_call: u64,
    /// The part of that for a call which takes or gives memory, where a program does less around it than around a launch.
    /// Absent: as for every other call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_ns_per_memory_call: Option<u64>,
    /// Plain memory.
    pub plain: PlainMemory,
    /// Stream-ordered pools; absent on a device without them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolMemory>,
    /// Virtual memory management; absent on a device without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmm: Option<VirtualMemory>,
    /// Queues, events and synchronisation.
    pub queues: Queues,
    /// Graphs; absent: as on an H200. No command measures them, so they are kept from the base profile.
    #[serde(default)]
    pub graphs: GraphCosts,
    /// Links between GPUs; absent: as between H200s on NVLink. `experiments calibrate` measures them on a machine with several GPUs.
    #[serde(default)]
    pub links: LinkCosts,
    /// Copies and fills.
    pub copies: Copies,
    /// Cost of a kernel that is not in `kernels`.
    pub default_kernel: KernelCost,
    /// Cost by kernel name.
    pub kernels: BTreeMap<String, KernelCost>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// Why a profile cannot be used; names the field or the line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; the built-in profile allocators/device/src/profiles/h200.json is a complete example")]
pub struct ProfileError(String);

impl Profile {
    /// The built-in profile of an NVIDIA H200.
    ///
    /// # Panics
    /// Never: a test parses the embedded file.
    #[must_use]
    pub fn h200() -> Self {
        Self::from_json(include_str!("../profiles/h200.json")).expect("the built-in profile should be valid")
    }

    /// The profile in a file, of at most 1 MiB.
    ///
    /// # Errors
    /// Those of the file and of [`from_json`](Self::from_json), with the file's name.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let file = path.display();
        let text = read_text(path, WRITTEN).map_err(|error| ProfileError(format!("cannot read {file}: {error}")))?;
        Self::from_json(&text).map_err(|ProfileError(error)| ProfileError(format!("{file}: {error}")))
    }

    /// Reads a profile; unknown fields are refused.
    ///
    /// # Errors
    /// [`ProfileError`] naming the line and column, or the field whose value makes no sense.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let profile: Self =
            serde_json::from_str(text).map_err(|error| ProfileError(format!("not a device profile: {error}")))?;
        profile.check().map_err(ProfileError)?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), String> {
        let value = serde_json::to_value(self).map_err(|error| error.to_string())?;
        if let Some(wrong) = wrong_cost("", &value) {
            return Err(wrong);
        }
        let power = |value: u64, field: &str| {
            if value.is_power_of_two() {
                Ok(())
            } else {
                Err(format!("{field}: must be a power of two, found {value}"))
            }
        };
        power(self.plain.page_bytes, "plain.page_bytes")?;
        power(self.plain.align_bytes, "plain.align_bytes")?;
        if self.plain.align_bytes < 256 || self.plain.align_bytes > self.plain.page_bytes {
            return Err("plain.align_bytes: must lie between 256 and plain.page_bytes".into());
        }
        if let Some(pool) = &self.pool {
            power(pool.granule_bytes, "pool.granule_bytes")?;
            power(pool.align_bytes, "pool.align_bytes")?;
            if pool.align_bytes < 256 || pool.align_bytes > pool.granule_bytes {
                return Err("pool.align_bytes: must lie between 256 and pool.granule_bytes".into());
            }
        }
        if let Some(vmm) = &self.vmm {
            power(vmm.granularity_bytes, "vmm.granularity_bytes")?;
        }
        if self.l2_bytes.is_some_and(|bytes| bytes < super::l2::SECTOR || bytes > self.total_bytes) {
            return Err(format!("l2_bytes: must be at least {} and at most total_bytes", super::l2::SECTOR));
        }
        if !self.links.bytes_per_ns.is_finite() || self.links.bytes_per_ns <= 0.0 {
            return Err("links.bytes_per_ns: must be positive".into());
        }
        if self.queues.depth == 0 {
            return Err("queues.depth: must be at least 1".into());
        }
        if self.total_bytes <= self.context_bytes || self.total_bytes > 1 << 46 {
            return Err("total_bytes: must exceed context_bytes and be at most 64 TiB".into());
        }
        let named = self.kernels.iter().map(|(name, cost)| (name.as_str(), cost));
        for (name, cost) in named.chain([("default_kernel", &self.default_kernel)]) {
            let time = |value: f64| value.is_finite() && (0.0..1e12).contains(&value);
            let rate = |value: f64| value.is_finite() && value > 0.0;
            let usable = time(cost.fixed_ns) && time(cost.iteration_ns) && rate(cost.bytes_per_ns);
            let from_memory = cost
                .from_memory
                .is_none_or(|cold| time(cold.fixed_ns) && time(cold.iteration_ns) && rate(cold.bytes_per_ns));
            if !usable || !from_memory || cost.blocks_per_wave == 0 {
                return Err(format!(
                    "kernel '{name}': times must be finite and not negative, blocks_per_wave and bytes_per_ns positive"
                ));
            }
        }
        Ok(())
    }

    /// Device time of one launch; `missed` is the share of its bytes that are not in the L2 cache.
    #[must_use]
    pub fn kernel_ns(&self, kernel: &str, blocks: u64, iterations: u64, bytes: u64, missed: f64) -> u64 {
        let cost = self.kernels.get(kernel).unwrap_or(&self.default_kernel);
        // CAST: whole nanoseconds are enough.
        cost.ns(blocks, iterations, bytes, missed).round() as u64
    }
}

/// The fault of the first invalid cost. A cost is a field in nanoseconds, by its name.
fn wrong_cost(path: &str, value: &Value) -> Option<String> {
    // A quarter of an hour for one call is a mistake, and far from overflowing a clock.
    let too_long = |ns: &Value| ns.as_u64().is_some_and(|ns| ns > 1_000_000_000_000);
    let wrong = |field: &Value| match field {
        Value::Array(points) if points.is_empty() => Some("at least one [bytes, ns] point is needed"),
        Value::Array(points) if !points.is_sorted_by(|a, b| a[0].as_u64() < b[0].as_u64()) => {
            Some("the points must be in ascending order of bytes")
        }
        Value::Array(points) if points.iter().any(|point| too_long(&point[1])) => Some("a cost must be below 10^12 ns"),
        ns if too_long(ns) => Some("a cost must be below 10^12 ns"),
        _ => None,
    };
    value.as_object()?.iter().find_map(|(key, field)| {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let is_cost = key.ends_with("_ns") || key.contains("_ns_per_");
        let why = wrong(field).filter(|_| is_cost);
        why.map(|why| format!("{path}: {why}")).or_else(|| wrong_cost(&path, field))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_interpolate_and_extrapolate() {
        let cost = CostBySize(vec![(100, 10), (200, 30), (400, 30), (500, 40)]);
        for (bytes, ns) in [(0, 10), (100, 10), (150, 20), (200, 30), (300, 30), (450, 35), (600, 50)] {
            assert_eq!(cost.at(bytes), ns, "{bytes}");
        }
        assert_eq!(CostBySize(vec![(5, 7)]).at(1_000_000), 7);
    }

    #[test]
    fn the_built_in_profile_round_trips() {
        let profile = Profile::h200();
        let text = serde_json::to_string(&profile).unwrap();
        assert_eq!(Profile::from_json(&text).unwrap(), profile);
    }

    #[test]
    fn a_miss_costs_what_its_share_is_and_older_profiles_have_none() {
        let mut cost = KernelCost {
            fixed_ns: 100.0,
            iteration_ns: 10.0,
            blocks_per_wave: 2,
            bytes_per_ns: 10.0,
            from_memory: None,
        };
        // Two waves of five trips, nine of them beyond the first, and ten bytes.
        assert_eq!((cost.ns(3, 5, 10, 0.0), cost.ns(3, 5, 10, 1.0)), (191.0, 191.0));
        cost.from_memory = Some(MemoryCost { fixed_ns: 150.0, iteration_ns: 25.0, bytes_per_ns: 2.0 });
        assert_eq!((cost.ns(3, 5, 10, 0.0), cost.ns(3, 5, 10, 0.5), cost.ns(3, 5, 10, 1.0)), (191.0, 285.5, 380.0));
        // The first trip is in the fixed time, and no launch has fewer.
        assert_eq!((cost.ns(1, 1, 1000, 0.0), cost.ns(1, 0, 1000, 0.0)), (200.0, 200.0));
        let mut old = serde_json::to_value(Profile::h200()).unwrap();
        let fields = old.as_object_mut().unwrap();
        fields.retain(|key, _| {
            !["l2_bytes", "program_ns_per_call", "program_ns_per_memory_call", "graphs", "links"]
                .contains(&key.as_str())
        });
        let old = Profile::from_json(&serde_json::to_string(&old).unwrap()).unwrap();
        assert_eq!((old.l2_bytes, old.program_ns_per_call), (None, 0));
        assert_eq!((old.graphs.launch_ns, old.graphs.node_gap_ns), (1_000, 510));
        assert_eq!(old.links, Profile::h200().links);
    }

    #[test]
    fn an_all_reduce_takes_its_hops_and_its_share_of_the_bytes() {
        let links = LinkCosts { base_ns: 100, hop_ns: 10, bytes_per_ns: 2.0 };
        // Two ranks send half of the bytes twice, four ranks a quarter six times; one rank sends nothing.
        let times = [1, 2, 4].map(|ranks| links.all_reduce_ns(ranks, 800));
        assert_eq!(times, [100, 100 + 20 + 400, 100 + 60 + 600]);
    }

    #[test]
    fn broken_profiles_name_the_field() {
        let good = serde_json::to_value(Profile::h200()).unwrap();
        let cases: [(&str, serde_json::Value, &str); 11] = [
            ("/links/bytes_per_ns", 0.into(), "links.bytes_per_ns"),
            ("/graphs/node_gap_ns", (1u64 << 63).into(), "graphs.node_gap_ns"),
            (
                "/default_kernel/from_memory",
                serde_json::json!({"fixed_ns": 1, "iteration_ns": 1, "bytes_per_ns": 0}),
                "default_kernel",
            ),
            ("/l2_bytes", 1.into(), "l2_bytes"),
            ("/program_ns_per_call", (1u64 << 63).into(), "program_ns_per_call"),
            ("/pool/grow_ns_per_granule", (1u64 << 63).into(), "pool.grow_ns_per_granule"),
            ("/copies/to_host_ns", serde_json::json!([[1, 1], [2, u64::MAX]]), "copies.to_host_ns"),
            ("/queues/depth", 0.into(), "queues.depth"),
            ("/plain/page_bytes", 3.into(), "plain.page_bytes"),
            ("/plain/alloc_ns", serde_json::json!([[2, 1], [1, 1]]), "plain.alloc_ns"),
            ("/default_kernel/bytes_per_ns", 0.into(), "default_kernel"),
        ];
        for (pointer, value, field) in cases {
            let mut broken = good.clone();
            // A field may be one that the built-in profile leaves out.
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            broken.pointer_mut(parent).unwrap()[key] = value;
            let error = Profile::from_json(&broken.to_string()).unwrap_err().to_string();
            assert!(error.contains(field) && !error.contains('\n'), "{error}");
        }
        let mut unknown = good;
        unknown["surprise"] = 1.into();
        assert!(Profile::from_json(&unknown.to_string()).unwrap_err().to_string().contains("surprise"));
        assert!(Profile::from_json("{").unwrap_err().to_string().contains("line 1"));
    }
}
