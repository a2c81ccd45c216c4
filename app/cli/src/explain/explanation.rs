//! The result of `explain`: all that it prints, draws and writes as JSON.

use super::causes::Cause;
use super::frames::Code;
use super::purposes::PurposeShare;
use crate::explain::phases::Phase;
use crate::gpus::Gpus;
use crate::host::HostMemoryUse;
use serde::Serialize;

/// Explanation of one recording; `analysis/schema.md` describes the keys.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Explanation {
    pub(crate) trace: String,
    /// The format in which it was read.
    pub(crate) format: &'static str,
    /// Whether that is a snapshot of PyTorch.
    #[serde(skip)]
    pub(crate) of_pytorch: bool,
    #[serde(flatten)]
    pub(crate) gpus: Gpus,
    pub(crate) events: u64,
    pub(crate) allocations: u64,
    /// Whether any event has stack frames.
    pub(crate) frames: bool,
    /// Number of starts and ends of annotations.
    pub(crate) annotations: u64,
    /// Number of streams with events or blocks. A stream that allocates nothing is not counted, even if frees wait for it.
    pub(crate) streams: u64,
    /// Where the file was truncated, and what is missing.
    pub(crate) cut: Option<String>,
    /// Events whose action is unknown, as of a later version of PyTorch: what they changed is missing here.
    pub(crate) unknown_events: Option<String>,
    /// Known blocks that were allocated before recording started.
    pub(crate) blocks_before: u64,
    /// Known segments that were allocated before recording started.
    pub(crate) segments_before: u64,
    /// The memory limit: `--limit`, or the recorded one.
    pub(crate) limit_bytes: Option<u64>,
    /// Whether the recording has expandable segments.
    #[serde(skip)]
    pub(crate) expandable: bool,
    /// The moment of peak active memory.
    pub(crate) peak_active: Moment,
    /// The moment of peak reserved memory; if reserved stayed at its peak, the moment with the most active memory.
    pub(crate) peak_reserved: Moment,
    pub(crate) end: Moment,
    /// Refused requests, at most the last hundred.
    pub(crate) out_of_memory: Vec<Refused>,
    /// Number of refused requests.
    pub(crate) refused: u64,
    /// Holders of memory at the active peak, and at the moment of `reserved` if that differs.
    pub(crate) who: Vec<Holders>,
    /// Growth between two moments: those given with `--between`, else two repetitions of an annotation or of the recording's
    /// pattern; `null` with fewer than four repetitions.
    pub(crate) grew: Option<GrowthBetween>,
    /// Reserved-memory breakdown when memory last ran out; else at the moment with the most active memory among those with
    /// reserved memory within half a percent of its peak, because the last segments are often allocated when little is active.
    pub(crate) reserved: ReservedBreakdown,
    /// Phases, separated by the outermost annotations, else by the longest pauses; empty without either.
    pub(crate) phases: Vec<Phase>,
    /// Separate peaks of active memory, the highest first: between two of them it fell below four fifths.
    pub(crate) peaks: Vec<Moment>,
    /// Requests during which PyTorch released cached memory, at most the last hundred.
    pub(crate) retries: Vec<Retry>,
    /// Number of such requests.
    pub(crate) num_retries: u64,
    /// Those of them where nothing shows whether memory was full or the program called `empty_cache` right before the request.
    pub(crate) num_unclear_retries: u64,
    /// Number of other cache releases.
    pub(crate) num_releases: u64,
    /// Range of the largest free block, each size at its first event; `null` if unknown.
    pub(crate) largest_hole: Option<LargestHole>,
    /// Curves over the recording, at most 512 points.
    pub(crate) timeline: Vec<Point>,
    /// Requested sizes with cache misses, the largest sum of segment bytes first.
    pub(crate) shapes: Vec<Shape>,
    /// Other memory used on the GPU at the moment of `reserved`; `null` if `vramlab run` did not sample it, or if
    /// reserved memory is unknown.
    pub(crate) beside: Option<DeviceUse>,
    /// Pinned host memory; `null` if the snapshot has none. PyTorch 2.14 records it with `record_pinned_host_memory=True`.
    pub(crate) pinning: Option<PinnedHost>,
    /// Who pins host memory and what waits; `null` if the recording has no events of it.
    pub(crate) host: Option<HostMemoryUse>,
}

/// GPU memory as reported by its driver.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceUse {
    pub(crate) total_bytes: u64,
    /// Peak used by all processes.
    pub(crate) peak_used_bytes: u64,
    /// Used by all processes at the moment.
    pub(crate) used_bytes: u64,
    /// Part of `used_bytes` that PyTorch had not reserved.
    pub(crate) not_pytorch_bytes: u64,
    /// Part of `not_pytorch_bytes` used by this process: its context and libraries. `null` if the driver does not report memory by
    /// process.
    pub(crate) own_bytes: Option<u64>,
    /// Part of `not_pytorch_bytes` that NCCL allocated in this process; `null` if that is unknown.
    pub(crate) nccl_bytes: Option<u64>,
    /// Part of `not_pytorch_bytes` used by other processes.
    pub(crate) others_bytes: Option<u64>,
}

/// Pinned host memory, which PyTorch caches and rounds up to powers of two.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PinnedHost {
    pub(crate) segments: u64,
    /// Pinned at the end.
    pub(crate) bytes: u64,
    /// Part of `bytes` that is active or pending.
    pub(crate) active_bytes: u64,
    /// Recorded peak.
    pub(crate) peak_bytes: u64,
    /// Upper bound on the part of `bytes` due to rounding; the requested sizes are not recorded.
    pub(crate) rounding_most_bytes: u64,
}

/// Memory right after an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Moment {
    /// Number of the event among the GPU's events, from 1; 0 for the start of the recording.
    pub(crate) event: u64,
    /// Since the first event; `null` where times are not recorded, or go backwards, and before the first event.
    pub(crate) time_ns: Option<u64>,
    /// `null` if unknown: the recording has no segments, or none of the live blocks'.
    pub(crate) reserved_bytes: Option<u64>,
    /// In active blocks, rounded sizes; includes pending frees.
    pub(crate) active_bytes: u64,
    /// Requested sizes of the live blocks.
    pub(crate) requested_bytes: u64,
    /// Part of `active_bytes` in deferred frees.
    pub(crate) pending_bytes: u64,
    /// Largest free block in the large pool of the event's stream; `null` if `reserved_bytes` is.
    pub(crate) largest_hole_bytes: Option<u64>,
    /// Innermost annotation.
    pub(crate) annotation: Option<String>,
    /// Last recorded line of the user's code.
    pub(crate) line: Option<String>,
    /// Whether the event itself has no frames; `line` is then that of an earlier event.
    pub(crate) nearby: bool,
}

/// A refused request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Refused {
    pub(crate) asked_bytes: u64,
    pub(crate) stream: u64,
    /// Size of the segment for this request, or of its pages in an expandable segment.
    pub(crate) segment_bytes: u64,
    /// Free on the device; `null` if not recorded.
    pub(crate) device_free_bytes: Option<u64>,
    /// The reason why free memory did not serve the request; `null` if reserved memory is unknown.
    pub(crate) cause: Option<Cause>,
    /// The private pool (CUDA graph, MemPool) of the request, such as `0.1`: that of the last allocation on its stream, if the
    /// recording names pools. `null` for the default pool.
    pub(crate) private_pool: Option<String>,
    /// All free bytes in the request's stream and pool; `null` if reserved memory is unknown.
    pub(crate) free_bytes: Option<u64>,
    /// Largest free block in the request's stream and pool, without private pools of others; `null` if `free_bytes` is.
    pub(crate) largest_free_bytes: Option<u64>,
    /// Part of `free_bytes` in private pools (CUDA graphs, MemPools), if the recording names them; only of the last refused request.
    pub(crate) private_free_bytes: u64,
    #[serde(flatten)]
    pub(crate) moment: Moment,
}

/// Holders of memory at a moment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Holders {
    /// `peak_active`, `peak_reserved`, `near_peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    pub(crate) moment: Moment,
    /// Memory by line, the largest first.
    pub(crate) lines: Vec<Share>,
    /// Memory by call, outermost first. In a stack with more than 56 lines one node stands for those in the middle; in a tree with
    /// more than 4,096 calls one node stands for the smallest children of a call. Such a node's name counts the omitted calls.
    pub(crate) tree: Node,
    /// Memory by purpose, the largest first; empty if no block's purpose is known.
    pub(crate) purposes: Vec<PurposeShare>,
    /// Memory by requested size, the largest sum first.
    pub(crate) sizes: Vec<SizeShare>,
    /// Memory by PyTorch's category; empty without categories.
    pub(crate) categories: Vec<NamedShare>,
    /// Memory by the program's `_set_memory_metadata` text; empty without such texts.
    pub(crate) notes: Vec<NamedShare>,
}

/// Memory held by a line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Share {
    /// Innermost frame of the user's code; in the backward pass, which has none, the autograd node.
    pub(crate) line: String,
    /// Whose code `line` is: `program`, `library` or `torch`; `null` if it is not a line.
    pub(crate) code: Option<Code>,
    /// The innermost library frame that the line called, else PyTorch's, else the operator; the name of a workspace.
    pub(crate) inside: Option<String>,
    /// Whether the blocks have no frames, as in the backward pass; `line` is then the last recorded line before them.
    pub(crate) nearby: bool,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    /// Age of the oldest block in events.
    pub(crate) oldest_events: u64,
}

/// Memory held by a call, including the calls inside it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// Whose code it is: `program`, `library` or `torch`; `null` if it is not a line.
    pub(crate) code: Option<Code>,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    /// Calls inside this call.
    pub(crate) children: Vec<Node>,
}

/// Blocks of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SizeShare {
    pub(crate) requested_bytes: u64,
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

/// Bytes under a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NamedShare {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

/// Growth between two moments.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct GrowthBetween {
    pub(crate) from: Moment,
    pub(crate) to: Moment,
    /// The moments as given to `--between`; empty if chosen automatically.
    pub(crate) named: Vec<String>,
    /// Growth by line, the largest first.
    pub(crate) lines: Vec<LineGrowth>,
}

/// Growth of the memory held by a line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LineGrowth {
    pub(crate) line: String,
    pub(crate) inside: Option<String>,
    pub(crate) nearby: bool,
    pub(crate) before_bytes: u64,
    pub(crate) after_bytes: u64,
    pub(crate) before_blocks: u64,
    pub(crate) after_blocks: u64,
}

/// Reserved-memory breakdown.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ReservedBreakdown {
    /// `peak_reserved`, `near_peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    pub(crate) moment: Moment,
    /// The stream from which `stream` (other streams' memory) is counted.
    pub(crate) stream: u64,
    /// The parts; they add up to the reserved bytes. Empty if those are unknown.
    pub(crate) parts: Vec<Part>,
    /// Memory by stream and pool.
    pub(crate) streams: Vec<StreamUse>,
    /// Free memory on streams without further requests: for at least a tenth of the recording and ten requests on other streams.
    pub(crate) stranded: Vec<Stranded>,
    /// Deferred frees.
    pub(crate) pending: Pending,
    /// Segments that are more than half free but partly used, so not releasable; the one with the most free bytes first.
    pub(crate) pinned: Vec<SparseSegment>,
    /// Number of such segments.
    pub(crate) pinned_segments: u64,
    /// Free bytes in such segments.
    pub(crate) pinned_free_bytes: u64,
}

/// One part of the reserved-memory breakdown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Part {
    /// `requested`, `internal` (rounding), `soft` (free, releasable), `kept` (free segments of private pools, which
    /// neither `empty_cache` nor a retry releases), `hard` (free, partly used segments),
    /// `stream` (free on other streams) or `pending` (deferred frees).
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
    pub(crate) sentence: String,
}

/// Memory of a stream in one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct StreamUse {
    pub(crate) stream: u64,
    /// `small` or `large`.
    pub(crate) pool: &'static str,
    /// The private pool (CUDA graph, MemPool), such as `0.1`; `null` for the default pool, and for segments that the final snapshot
    /// does not contain.
    pub(crate) private_pool: Option<String>,
    pub(crate) segments: u64,
    pub(crate) reserved_bytes: u64,
    /// In active blocks; includes pending frees.
    pub(crate) active_bytes: u64,
    /// Part of `active_bytes` in deferred frees.
    pub(crate) pending_bytes: u64,
    /// Free and releasable: whole free segments, and whole free pages of expandable segments.
    pub(crate) soft_bytes: u64,
    /// The same in a private pool: neither `empty_cache` nor a retry releases them.
    pub(crate) kept_bytes: u64,
    /// Other free bytes: in partly used segments.
    pub(crate) hard_bytes: u64,
    /// Largest free block.
    pub(crate) largest_hole_bytes: u64,
}

/// Free memory on a stream that no later request can use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Stranded {
    pub(crate) stream: u64,
    /// Free bytes in its segments.
    pub(crate) free_bytes: u64,
    /// Part of `free_bytes` that `empty_cache` would release.
    pub(crate) returnable_bytes: u64,
    /// Event of its last request.
    pub(crate) last_request: u64,
    /// Requests on other streams since.
    pub(crate) requests_since: u64,
    /// The line of its last request.
    pub(crate) line: Option<String>,
}

/// Deferred frees: frees that wait for other streams.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Pending {
    pub(crate) deferred_frees: u64,
    /// Part of `deferred_frees` that had not completed by the end of the recording.
    pub(crate) unfinished_frees: u64,
    /// Peak pending bytes.
    pub(crate) peak_bytes: u64,
    /// Event of that peak.
    pub(crate) peak_event: u64,
    /// Deferred frees by the stream of the blocks.
    pub(crate) streams: Vec<PendingStream>,
    /// Peak active bytes without deferred frees.
    pub(crate) peak_active_instant_bytes: u64,
    /// Peak reserved bytes of a replay under the recorded policy; `null` without deferred frees.
    pub(crate) replayed_reserved_bytes: Option<u64>,
    /// Peak reserved bytes of that replay if frees complete immediately.
    pub(crate) replayed_instant_reserved_bytes: Option<u64>,
}

/// Deferred frees of one stream's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PendingStream {
    pub(crate) stream: u64,
    pub(crate) deferred_frees: u64,
    /// Peak pending bytes.
    pub(crate) peak_bytes: u64,
    /// Longest wait in events; that of a free that had not completed ends with the recording.
    pub(crate) longest_events: u64,
    /// The line that allocated most of these bytes.
    pub(crate) line: Option<String>,
}

/// A mostly free segment, and the blocks that keep it reserved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct SparseSegment {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) stream: u64,
    /// `small` or `large`.
    pub(crate) pool: &'static str,
    /// Number of its blocks.
    pub(crate) blocks: u64,
    /// Its blocks, the largest first.
    pub(crate) keepers: Vec<KeepingBlock>,
}

/// A block that keeps a segment reserved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct KeepingBlock {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The line that allocated it.
    pub(crate) line: String,
    pub(crate) nearby: bool,
    /// Whether its free is pending.
    pub(crate) pending: bool,
    /// Age in events; `null` if allocated before recording started.
    pub(crate) age_events: Option<u64>,
    /// Age in nanoseconds; `null` where times are not recorded.
    pub(crate) age_ns: Option<u64>,
}

/// A request during which PyTorch released cached memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Retry {
    pub(crate) asked_bytes: u64,
    pub(crate) stream: u64,
    pub(crate) released_bytes: u64,
    pub(crate) released_segments: u64,
    /// `retry`, `garbage_collection`, or `retry_or_empty_cache` if the recording does not distinguish them.
    pub(crate) kind: &'static str,
    /// The reason why free memory did not serve the request.
    pub(crate) cause: Cause,
    /// Whether the request was served after the release.
    pub(crate) succeeded: bool,
    #[serde(flatten)]
    pub(crate) moment: Moment,
}

/// A point of the curves; it stands for a range of events and shows the one with the most active memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Point {
    /// Number of the event with the most active memory in the range.
    pub(crate) event: u64,
    /// Since the first event; `null` where times are not recorded, or go backwards.
    pub(crate) time_ns: Option<u64>,
    /// `null` if unknown.
    pub(crate) reserved_bytes: Option<u64>,
    /// In active blocks; includes pending frees.
    pub(crate) active_bytes: u64,
    /// Requested sizes of the live blocks.
    pub(crate) requested_bytes: u64,
    /// Largest free block; its minimum over the range; `null` if unknown.
    pub(crate) largest_hole_bytes: Option<u64>,
    /// Used on the GPU by all processes; `null` if `vramlab run` did not sample it.
    pub(crate) device_used_bytes: Option<u64>,
}

/// Range of the largest free block. A new segment counts after the request that allocated it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LargestHole {
    pub(crate) min_bytes: u64,
    /// Number of the event of `min_bytes`; 0 for the start of the recording.
    pub(crate) min_event: u64,
    pub(crate) max_bytes: u64,
    /// Number of the event of `max_bytes`; 0 for the start of the recording.
    pub(crate) max_event: u64,
}

impl LargestHole {
    pub(super) fn new(event: u64, bytes: u64) -> Self {
        Self { min_bytes: bytes, min_event: event, max_bytes: bytes, max_event: event }
    }

    /// Extends the range by the size after an event.
    pub(super) fn take(&mut self, event: u64, bytes: u64) {
        if bytes < self.min_bytes {
            (self.min_bytes, self.min_event) = (bytes, event);
        }
        if bytes > self.max_bytes {
            (self.max_bytes, self.max_event) = (bytes, event);
        }
    }
}

/// Requests of one size.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Shape {
    pub(crate) requested_bytes: u64,
    /// Size after the allocator's rounding.
    pub(crate) rounded_bytes: u64,
    pub(crate) requests: u64,
    /// Number of cache misses: requests that allocated a segment.
    pub(crate) misses: u64,
    /// Segment bytes allocated by these misses.
    pub(crate) taken_bytes: u64,
    /// The most frequent cause.
    pub(crate) cause: Cause,
    /// All causes, with the number of each.
    pub(crate) causes: Vec<(Cause, u64)>,
    /// The line with the most requests.
    pub(crate) line: Option<String>,
}
