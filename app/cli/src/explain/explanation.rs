//! What `explain` found out about a history: everything that it prints, draws and writes as JSON.

use super::causes::Cause;
use super::purposes::Purposed;
use crate::explain::phases::Phase;
use crate::gpus::Gpus;
use serde::Serialize;

/// One history explained; the keys are described in `analysis/schema.md`.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Explanation {
    pub(crate) trace: String,
    /// How it was read.
    pub(crate) format: &'static str,
    #[serde(flatten)]
    pub(crate) gpus: Gpus,
    pub(crate) events: u64,
    pub(crate) allocations: u64,
    /// Whether any event has stack frames.
    pub(crate) frames: bool,
    /// Ranges that the program had named.
    pub(crate) annotations: u64,
    /// Streams of its events and blocks. A stream that other streams' frees wait for, and that asks for nothing, is not seen.
    pub(crate) streams: u64,
    /// What is missing of a file that was cut short.
    pub(crate) cut: Option<String>,
    /// Blocks from before the first event, as far as the history tells.
    pub(crate) blocks_before: u64,
    /// Segments from before the first event.
    pub(crate) segments_before: u64,
    /// `--limit`, or the limit that the history names.
    pub(crate) limit_bytes: Option<u64>,
    /// When most was active.
    pub(crate) peak_active: Moment,
    /// After the request that took reserved memory to its peak.
    pub(crate) peak_reserved: Moment,
    pub(crate) end: Moment,
    /// Requests that were refused, of more than a hundred the last.
    pub(crate) out_of_memory: Vec<Refused>,
    /// Number of all of them.
    pub(crate) refused: u64,
    /// What held memory at the peak of active, and at the moment of `reserved` where that is another.
    pub(crate) who: Vec<Who>,
    /// What grew between two moments: those that `--between` names, else the lowest points of the second and of the
    /// last quarter.
    pub(crate) grew: Option<Grew>,
    /// Where reserved memory went when memory ran out last, else at the first moment within half a percent of the peak of
    /// reserved: the last segments are often taken when little is in use.
    pub(crate) reserved: WhereItWent,
    /// Phases that the program's outermost annotations part, else its longest pauses; none where nothing parts it.
    pub(crate) phases: Vec<Phase>,
    /// Peaks of active memory, the highest first; between two of them it fell below four fifths.
    pub(crate) peaks: Vec<Moment>,
    /// Requests during which memory went back to the device, of more than a hundred the last.
    pub(crate) retries: Vec<Retry>,
    /// Number of all of them.
    pub(crate) num_retries: u64,
    /// Other occasions on which memory went back.
    pub(crate) num_releases: u64,
    /// At most 512 points of the curves.
    pub(crate) timeline: Vec<Point>,
    /// Sizes for which memory was taken from the device, the largest sum first.
    pub(crate) shapes: Vec<Shape>,
    /// What else was used on the GPU at the moment of `reserved`; `null` where `vramlab run` did not sample it.
    pub(crate) beside: Option<Beside>,
    /// Pinned memory of the host; `null` where the snapshot has none. PyTorch 2.14 records it with
    /// `record_pinned_host_memory=True`.
    pub(crate) pinning: Option<Pinning>,
}

/// Memory of the GPU as its driver counts it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Beside {
    pub(crate) total_bytes: u64,
    /// Used by all processes, at most.
    pub(crate) peak_used_bytes: u64,
    /// Used by all processes then.
    pub(crate) used_bytes: u64,
    /// Of these, what PyTorch had not reserved.
    pub(crate) not_pytorch_bytes: u64,
    /// Of these, the process's own: its context and libraries. `null` where the driver does not tell processes apart.
    pub(crate) own_bytes: Option<u64>,
    /// Of these, other processes'.
    pub(crate) others_bytes: Option<u64>,
}

/// Pinned memory of the host, which PyTorch keeps and rounds to powers of two.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pinning {
    pub(crate) segments: u64,
    /// Held at the end.
    pub(crate) bytes: u64,
    /// Of these, in use or waiting for a stream.
    pub(crate) active_bytes: u64,
    /// Held at most, as far as the recording shows.
    pub(crate) peak_bytes: u64,
    /// Of `bytes`, what rounding costs at most: what was asked for is not recorded.
    pub(crate) rounding_most_bytes: u64,
}

/// What was held right after an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Moment {
    /// Number of the event among those of the GPU, from 1; 0 for what was there before.
    pub(crate) event: u64,
    /// Since the first event; `null` in logs without times.
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
    /// Innermost range that the program had named.
    pub(crate) annotation: Option<String>,
    /// Last line of the user's code that is known.
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
    /// `peak_active`, `peak_reserved`, `near_peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    pub(crate) moment: Moment,
    /// By line, the largest first.
    pub(crate) lines: Vec<Share>,
    /// By call, from the outside in. Of a stack with more than 56 lines one node stands for those in the middle, and of a tree of
    /// more than 4,096 calls one for the smallest of each call; its name counts them.
    pub(crate) tree: Node,
    /// By what it is for, the largest first, where frames, annotations or PyTorch's categories tell it of a block at least.
    pub(crate) purposes: Vec<Purposed>,
    /// By bytes asked for, the largest sum first.
    pub(crate) sizes: Vec<SizeShare>,
    /// By PyTorch's category, where there are some.
    pub(crate) categories: Vec<Named>,
    /// By what the program said with `_set_memory_metadata`, where it said something.
    pub(crate) notes: Vec<Named>,
}

/// What a line holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Share {
    /// Innermost frame of the user's code; the node of autograd where the backward pass has none.
    pub(crate) line: String,
    /// Below it the innermost frame of a library, else of PyTorch, else the operator; a workspace by its name.
    pub(crate) inside: Option<String>,
    /// Whether the block has no frames, as those of the backward pass: the line is then the last one before it.
    pub(crate) nearby: bool,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    /// Events since the oldest of them was allocated.
    pub(crate) oldest_events: u64,
}

/// A call and what it holds, the calls inside it included.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: u64,
    /// The calls inside it.
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
    /// By line, the one that grew most first.
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
    /// `peak_reserved`, `near_peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    pub(crate) moment: Moment,
    /// Stream of the request for which memory is looked at.
    pub(crate) stream: u64,
    /// Parts of the ledger; they add up to the reserved bytes.
    pub(crate) parts: Vec<Part>,
    /// By stream and pool.
    pub(crate) streams: Vec<StreamUse>,
    /// Free memory of streams on which nothing more is asked for, for a tenth of the history and ten requests on other streams
    /// at least.
    pub(crate) stranded: Vec<Stranded>,
    /// Frees that waited for other streams.
    pub(crate) pending: Pending,
    /// Segments that are more than half free and cannot go back, the one with most free bytes first.
    pub(crate) pinned: Vec<Pinned>,
    /// Number of all such segments.
    pub(crate) pinned_segments: u64,
    /// What is free in them.
    pub(crate) pinned_free_bytes: u64,
}

/// A part of the reserved bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Part {
    /// `requested`, `internal`, `soft`, `hard`, `stream` or `pending`.
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
    pub(crate) sentence: String,
}

/// What a stream has in one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct StreamUse {
    pub(crate) stream: u64,
    /// `small` or `large`.
    pub(crate) pool: &'static str,
    pub(crate) segments: u64,
    pub(crate) reserved_bytes: u64,
    /// In blocks that are in use or wait for other streams.
    pub(crate) active_bytes: u64,
    /// Of these: freed, and waiting.
    pub(crate) pending_bytes: u64,
    /// Free, in segments that are wholly free.
    pub(crate) soft_bytes: u64,
    /// Free, in other segments.
    pub(crate) hard_bytes: u64,
    /// Largest request that is served without a call of the driver.
    pub(crate) largest_hole_bytes: u64,
}

/// Memory that no allocation can use any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Stranded {
    pub(crate) stream: u64,
    /// Free bytes in its segments.
    pub(crate) free_bytes: u64,
    /// Of those, what `empty_cache` would give back.
    pub(crate) returnable_bytes: u64,
    /// Event of the last request.
    pub(crate) last_request: u64,
    /// Requests on other streams since.
    pub(crate) requests_since: u64,
    /// The line that made it.
    pub(crate) line: Option<String>,
}

/// Frees that wait for other streams.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Pending {
    pub(crate) deferred_frees: u64,
    /// Most bytes that waited at once.
    pub(crate) peak_bytes: u64,
    /// Event at which these did.
    pub(crate) peak_event: u64,
    /// By the stream of the blocks.
    pub(crate) streams: Vec<PendingStream>,
    /// Peak of active bytes if no free waited.
    pub(crate) peak_active_instant_bytes: u64,
    /// What the same policy reserves at its peak in a replay with frees as recorded; `null` where no free waited.
    pub(crate) replayed_reserved_bytes: Option<u64>,
    /// What it reserves when frees complete at once.
    pub(crate) replayed_instant_reserved_bytes: Option<u64>,
}

/// Pending frees of one stream's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PendingStream {
    pub(crate) stream: u64,
    pub(crate) deferred_frees: u64,
    /// Most bytes that waited at once.
    pub(crate) peak_bytes: u64,
    /// Events for which the longest waited.
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
    /// `small` or `large`.
    pub(crate) pool: &'static str,
    /// Blocks that keep it.
    pub(crate) blocks: u64,
    /// These blocks, the largest first.
    pub(crate) keepers: Vec<Keeper>,
}

/// A block that keeps a segment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Keeper {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The line that allocated it.
    pub(crate) line: String,
    pub(crate) nearby: bool,
    /// Whether it was freed, and waits.
    pub(crate) pending: bool,
    /// Events since it was allocated; `null` for what was there before the first event.
    pub(crate) age_events: Option<u64>,
    /// Time since it was allocated.
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
    /// Why nothing that was free would do.
    pub(crate) cause: Cause,
    /// Whether the request was served then.
    pub(crate) succeeded: bool,
    #[serde(flatten)]
    pub(crate) moment: Moment,
}

/// A point of the curves; a stretch of events is drawn by the one at which most was active.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Point {
    /// Number of the event at which most was active in its stretch.
    pub(crate) event: u64,
    pub(crate) time_ns: u64,
    pub(crate) reserved_bytes: u64,
    /// In blocks that are in use or wait for other streams.
    pub(crate) active_bytes: u64,
    /// Asked for in the blocks that the program holds.
    pub(crate) requested_bytes: u64,
    /// Smallest over the stretch.
    pub(crate) largest_hole_bytes: u64,
    /// Used on the GPU by all processes, where `vramlab run` sampled it.
    pub(crate) device_used_bytes: Option<u64>,
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
    /// The most frequent cause.
    pub(crate) cause: Cause,
    /// All causes, with the number of each.
    pub(crate) causes: Vec<(Cause, u64)>,
    /// The line that asks most often.
    pub(crate) line: Option<String>,
}
