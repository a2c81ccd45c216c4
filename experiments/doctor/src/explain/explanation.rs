//! What `explain` found out about a history: everything that it prints, draws and writes as JSON.

use super::causes::Cause;
use serde::Serialize;

/// One history explained; the keys are described in `analysis/schema.md`.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Explanation {
    pub(crate) trace: String,
    pub(crate) format: &'static str,
    pub(crate) gpu: u16,
    /// Events of other GPUs that stand before the first in the file.
    #[serde(skip)]
    pub(crate) skipped: u64,
    pub(crate) events: u64,
    pub(crate) allocations: u64,
    /// Whether any event has stack frames.
    pub(crate) frames: bool,
    pub(crate) annotations: u64,
    /// What is missing of a file that was cut short.
    pub(crate) cut: Option<String>,
    /// Blocks and segments from before the first event.
    pub(crate) blocks_before: u64,
    pub(crate) segments_before: u64,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) peak_active: Moment,
    pub(crate) peak_reserved: Moment,
    pub(crate) end: Moment,
    /// Requests that were refused, the last hundred.
    pub(crate) out_of_memory: Vec<Refused>,
    pub(crate) refused: u64,
    pub(crate) who: Vec<Who>,
    pub(crate) grew: Option<Grew>,
    pub(crate) reserved: WhereItWent,
    pub(crate) peaks: Vec<Moment>,
    /// The last hundred.
    pub(crate) retries: Vec<Retry>,
    /// Requests during which memory went back to the device, and all other occasions on which it did.
    pub(crate) num_retries: u64,
    pub(crate) num_releases: u64,
    pub(crate) timeline: Vec<Point>,
    pub(crate) shapes: Vec<Shape>,
}

/// What was held right after an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Moment {
    /// Number of the event in the file, from 1; 0 for what was there before.
    pub(crate) event: u64,
    /// Since the first event; `None` in logs without times.
    pub(crate) time_ns: Option<u64>,
    pub(crate) reserved_bytes: u64,
    /// In blocks that are in use or wait for other streams, as the allocator rounded them.
    pub(crate) active_bytes: u64,
    /// Asked for in the blocks that the program holds.
    pub(crate) requested_bytes: u64,
    /// Of `active_bytes`: freed, and waiting for other streams.
    pub(crate) pending_bytes: u64,
    /// Largest request for the large pool of the stream of the event that is served without a call of the driver.
    pub(crate) largest_hole_bytes: u64,
    /// The innermost range that the program had named.
    pub(crate) annotation: Option<String>,
    /// The line that ran.
    pub(crate) line: Option<String>,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Refused {
    pub(crate) asked_bytes: u64,
    pub(crate) stream: u64,
    /// Free on the device, where the log says it.
    pub(crate) device_free_bytes: Option<u64>,
    /// Why nothing that was free would do.
    pub(crate) cause: Cause,
    /// Free bytes in the request's stream and pool, in all.
    pub(crate) free_bytes: u64,
    #[serde(flatten)]
    pub(crate) moment: Moment,
}

/// Who held memory at a moment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Who {
    /// `peak_active`, `peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    pub(crate) moment: Moment,
    /// By line, the largest first.
    pub(crate) lines: Vec<Share>,
    /// By call, from the outside in.
    pub(crate) tree: Node,
    /// By bytes asked for, the largest sum first.
    pub(crate) sizes: Vec<SizeShare>,
    /// By PyTorch's category and by the program's own notes, where there are some.
    pub(crate) categories: Vec<Named>,
    pub(crate) notes: Vec<Named>,
}

/// What a line holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Share {
    pub(crate) line: String,
    /// The innermost place in a library that the line went through.
    pub(crate) inside: Option<String>,
    /// Whether the line is not the block's own but the last one before it: the block has no frames.
    pub(crate) nearby: bool,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    /// Events since the oldest of them came.
    pub(crate) oldest_events: u64,
}

/// A call and what it holds, the calls inside it included.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
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
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
}

/// What grew between two moments.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Grew {
    pub(crate) from: Moment,
    pub(crate) to: Moment,
    /// As `--between` named them; empty where they were chosen.
    pub(crate) named: Vec<String>,
    pub(crate) lines: Vec<Growth>,
}

/// How much more a line holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Growth {
    pub(crate) line: String,
    pub(crate) inside: Option<String>,
    pub(crate) nearby: bool,
    pub(crate) before_bytes: u64,
    pub(crate) after_bytes: u64,
    pub(crate) before_blocks: u64,
    pub(crate) after_blocks: u64,
}

/// Where reserved memory went.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct WhereItWent {
    /// `peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    pub(crate) moment: Moment,
    pub(crate) stream: u64,
    pub(crate) parts: Vec<Part>,
    pub(crate) streams: Vec<StreamUse>,
    /// Free memory of streams that nothing is asked for on any more.
    pub(crate) stranded: Vec<Stranded>,
    pub(crate) pending: Pending,
    /// Segments that are mostly free and cannot go back, the one with most free bytes first.
    pub(crate) pinned: Vec<Pinned>,
    pub(crate) pinned_segments: u64,
    pub(crate) pinned_free_bytes: u64,
}

/// A part of the reserved bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
    pub(crate) sentence: String,
}

/// What a stream has in one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct StreamUse {
    pub(crate) stream: u64,
    pub(crate) pool: &'static str,
    pub(crate) segments: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) active_bytes: u64,
    pub(crate) pending_bytes: u64,
    /// In segments that are wholly free, and in those that are not.
    pub(crate) soft_bytes: u64,
    pub(crate) hard_bytes: u64,
    pub(crate) largest_hole_bytes: u64,
}

/// Memory that no allocation can use any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Stranded {
    pub(crate) stream: u64,
    pub(crate) free_bytes: u64,
    /// Of those, what would go back to the device if the cache were emptied.
    pub(crate) returnable_bytes: u64,
    /// The event of the last request.
    pub(crate) last_request: u64,
    pub(crate) line: Option<String>,
}

/// Frees that wait for other streams.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Pending {
    pub(crate) deferred_frees: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) peak_event: u64,
    pub(crate) streams: Vec<PendingStream>,
    /// Peak of active bytes if no free waited.
    pub(crate) peak_active_instant_bytes: u64,
    /// What the same policy reserves at its peak when frees complete as recorded, and when they complete at once.
    pub(crate) replayed_reserved_bytes: Option<u64>,
    pub(crate) replayed_instant_reserved_bytes: Option<u64>,
}

/// Pending frees of one stream's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PendingStream {
    pub(crate) stream: u64,
    pub(crate) deferred_frees: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) longest_events: u64,
    /// The line that allocated most of the bytes.
    pub(crate) line: Option<String>,
}

/// A segment that is mostly free, and what keeps it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Pinned {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) stream: u64,
    pub(crate) pool: &'static str,
    pub(crate) blocks: u64,
    /// The largest first.
    pub(crate) keepers: Vec<Keeper>,
}

/// A block that keeps a segment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Keeper {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) line: String,
    pub(crate) nearby: bool,
    pub(crate) pending: bool,
    /// Since it was allocated; `None` for what was there before the first event.
    pub(crate) age_events: Option<u64>,
    pub(crate) age_ns: Option<u64>,
}

/// A request during which memory went back to the device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Retry {
    pub(crate) asked_bytes: u64,
    pub(crate) stream: u64,
    pub(crate) released_bytes: u64,
    pub(crate) released_segments: u64,
    /// `retry`, `empty_cache`, `garbage_collection`, or `retry_or_empty_cache` where the log does not tell.
    pub(crate) kind: &'static str,
    pub(crate) cause: Cause,
    pub(crate) succeeded: bool,
    #[serde(flatten)]
    pub(crate) moment: Moment,
}

/// A point of the curves; a stretch of events is drawn by the one at which most was active.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Point {
    pub(crate) event: u64,
    pub(crate) time_ns: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) active_bytes: u64,
    pub(crate) requested_bytes: u64,
    /// Smallest over the stretch.
    pub(crate) largest_hole_bytes: u64,
}

/// Requests of one size.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Shape {
    pub(crate) requested_bytes: u64,
    /// As the allocator rounds it.
    pub(crate) rounded_bytes: u64,
    pub(crate) requests: u64,
    /// Requests for which memory was taken from the device.
    pub(crate) misses: u64,
    /// Bytes that were taken.
    pub(crate) taken_bytes: u64,
    /// The most frequent cause, and all of them.
    pub(crate) cause: Cause,
    pub(crate) causes: Vec<(Cause, u64)>,
    /// The line that asks most often.
    pub(crate) line: Option<String>,
}
