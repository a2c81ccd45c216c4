//! Reserved-memory breakdown: by part, by stream and pool, and the blocks that keep mostly free segments reserved.

use super::View;
use super::explanation::{
    Explanation, KeepingBlock, Part, Pending, PendingStream, ReservedBreakdown, SparseSegment, Stranded, StreamUse,
};
use super::moments::{line_of, moment};
use super::survey::{Survey, Waits, has_private_pools};
use crate::recording::{Recording, START};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use vramlab::histories::formats::Action;
use vramlab::histories::memory::{BEFORE, Block, Contents, Memory, Pool, Segment};
use vramlab::{Bytes, Ledger};

/// Maximum number of mostly free segments described, and of blocks of each.
const SEGMENTS: usize = 1000;
const KEEPERS: usize = 100;

/// Free share from which a segment counts as mostly free.
const MOSTLY: f64 = 0.5;

pub(super) fn pool_name(pool: Pool) -> &'static str {
    if pool.small { "small" } else { "large" }
}

/// The breakdown at the moment after an event, as seen by a request on that event's stream.
pub(super) fn breakdown(
    view: &mut View<'_>,
    memory: &Memory,
    survey: &Survey,
    index: usize,
    at: &'static str,
    explanation: &Explanation,
) -> ReservedBreakdown {
    let (one_stream, allocations) = (explanation.streams < 2, explanation.allocations);
    let event_stream = view.recording.events.get(index).map(|event| event.stream);
    let private = PrivateSegments::new(view.recording, index);
    let refused = (at == "out_of_memory").then(|| has_private_pools(view.recording));
    let mut uses: BTreeMap<(Pool, Option<PoolId>), StreamUse> = BTreeMap::new();
    let mut sparse: Vec<(u64, Segment, Contents)> = Vec::new();
    for (&start, segment) in memory.segments() {
        let inside = memory.contents(start, segment);
        let pool = segment.pool();
        let private_pool = private.pool(start);
        let row = uses.entry((pool, private_pool)).or_insert_with(|| StreamUse {
            stream: pool.stream,
            pool: pool_name(pool),
            private_pool: private_pool.map(|(major, minor)| format!("{major}.{minor}")),
            ..StreamUse::default()
        });
        row.largest_hole_bytes = row.largest_hole_bytes.max(inside.largest_hole);
        row.segments += 1;
        row.reserved_bytes += segment.bytes;
        row.active_bytes += inside.active;
        row.pending_bytes += inside.pending;
        let soft = memory.releasable(start, segment, &inside);
        *(if private_pool.is_some() { &mut row.kept_bytes } else { &mut row.soft_bytes }) += soft;
        row.hard_bytes += inside.free - soft;
        // CAST: a share of bytes.
        if inside.blocks > 0 && !segment.expandable && inside.free as f64 > MOSTLY * segment.bytes as f64 {
            sparse.push((start, *segment, inside));
        }
    }
    let mut streams: Vec<StreamUse> = uses.into_values().collect();
    streams.sort_by_key(|row| (Reverse(row.reserved_bytes), row.stream, row.pool));
    // At START there is no event; take the stream with the most memory.
    let stream = event_stream.or(streams.first().map(|row| row.stream)).unwrap_or(0);
    sparse.sort_by_key(|(start, _, inside)| (Reverse(inside.free), *start));
    let pinned_segments = sparse.len() as u64;
    let pinned_free_bytes = sparse.iter().map(|(_, _, inside)| inside.free).sum();
    sparse.truncate(SEGMENTS);
    let pinned = sparse.iter().map(|segment| describe(view, memory, index, segment)).collect();
    let ledger = memory.ledger(stream);
    let mut kept: BTreeMap<&str, u64> = BTreeMap::new();
    for row in streams.iter().filter(|row| row.stream == stream && row.kept_bytes > 0) {
        *kept.entry(row.private_pool.as_deref().unwrap_or_default()).or_default() += row.kept_bytes;
    }
    let expandable = memory.segments().values().any(|segment| segment.expandable);
    let moment = moment(view, memory, index);
    let parts = match moment.reserved_bytes {
        Some(_) => parts(&ledger, one_stream, expandable, &kept, refused),
        None => Vec::new(),
    };
    ReservedBreakdown {
        at,
        moment,
        stream,
        parts,
        stranded: stranded(view, &streams, survey, index, allocations),
        streams,
        pending: pending(view, survey),
        pinned,
        pinned_segments,
        pinned_free_bytes,
    }
}

fn describe(
    view: &mut View<'_>,
    memory: &Memory,
    index: usize,
    (address, segment, inside): &(u64, Segment, Contents),
) -> SparseSegment {
    let mut blocks: Vec<_> = memory.blocks_in(*address, segment).collect();
    blocks.sort_by_key(|(addr, block)| (Reverse(block.bytes), *addr));
    blocks.truncate(KEEPERS);
    let keeper = |(address, block): (u64, &Block)| {
        let (line, nearby) = line_of(block, &mut view.lines);
        let born = (block.born != BEFORE).then_some(block.born as usize);
        let time = |index: usize| view.recording.since_start(index);
        KeepingBlock {
            address,
            bytes: block.bytes,
            line,
            nearby,
            pending: block.pending.is_some(),
            age_events: born.map(|born| index.saturating_sub(born) as u64),
            age_ns: born.and_then(|born| Some(time(index)?.saturating_sub(time(born)?))),
        }
    };
    SparseSegment {
        address: *address,
        bytes: segment.bytes,
        free_bytes: inside.free,
        stream: segment.stream,
        pool: pool_name(segment.pool()),
        blocks: inside.blocks,
        keepers: blocks.into_iter().map(keeper).collect(),
    }
}

/// PyTorch's id of a memory pool.
pub(super) type PoolId = (u64, u64);

/// The segments of private pools: start, end and pool of each.
pub(super) struct PrivateSegments(BTreeMap<u64, (u64, PoolId)>);

impl PrivateSegments {
    /// Those that the events up to `index` name (PyTorch 2.12 and later), and for other addresses those of the final snapshot.
    pub(super) fn new(recording: &Recording, index: usize) -> Self {
        let segments = recording.summary.ending().unwrap_or_default().iter();
        let private = segments.filter(|segment| segment.device == recording.device).filter_map(|segment| {
            let id = segment.pool_id.filter(|id| *id != (0, 0))?;
            Some((segment.address, (segment.address.saturating_add(segment.total_size), id)))
        });
        let mut out = Self(private.collect());
        let named = recording.summary.segment_pools.iter().filter(|named| named.device == recording.device);
        for named in named {
            let Some(at) = usize::try_from(named.event).ok().and_then(|number| number.checked_sub(1)) else { continue };
            let Some(event) = recording.events.get(at).filter(|_| index != START && at <= index) else { continue };
            out.0.remove(&event.addr);
            let taken = matches!(event.action, Action::SegmentAlloc | Action::SegmentMap);
            if taken && named.pool != (0, 0) {
                out.0.insert(event.addr, (event.addr.saturating_add(event.bytes), named.pool));
            }
        }
        out
    }

    /// Free bytes in those of them that have a stream and a size class.
    pub(super) fn free_bytes(&self, memory: &Memory, pool: Pool) -> u64 {
        self.free(memory, pool, |_| true).0
    }

    /// Free bytes and the largest free block of those that have a stream and a size class and belong to one private pool.
    pub(super) fn free_in(&self, memory: &Memory, pool: Pool, id: PoolId) -> (u64, u64) {
        self.free(memory, pool, |other| other == id)
    }

    fn free(&self, memory: &Memory, pool: Pool, is_meant: impl Fn(PoolId) -> bool) -> (u64, u64) {
        let known = self.0.iter().filter(|(_, (_, id))| is_meant(*id));
        let segments = known.filter_map(|(start, _)| Some((*start, memory.segments().get(start)?)));
        let alike = segments.filter(|(_, segment)| segment.pool() == pool);
        let contents = alike.map(|(start, segment)| memory.contents(start, segment));
        contents.fold((0, 0), |(free, largest), inside| (free + inside.free, largest.max(inside.largest_hole)))
    }

    /// The largest free block with a stream and a size class outside of them. O(n) in the blocks, if there are any.
    pub(super) fn largest_outside(&self, memory: &Memory, pool: Pool) -> u64 {
        if self.0.is_empty() {
            return memory.largest_hole(pool);
        }
        let others =
            memory.segments().iter().filter(|(start, segment)| segment.pool() == pool && self.pool(**start).is_none());
        others.map(|(start, segment)| memory.contents(*start, segment).largest_hole).max().unwrap_or(0)
    }

    /// The private pool of the segment at an address.
    pub(super) fn pool(&self, address: u64) -> Option<PoolId> {
        let (_, (end, id)) = self.0.range(..=address).next_back()?;
        (address < *end).then_some(*id)
    }
}

/// Memory of the pools at a moment, for a recording that names private pools.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pools {
    /// `peak_reserved`, `near_peak_reserved` or `out_of_memory`.
    pub(crate) at: &'static str,
    /// Number of the event, from 1; 0 before recording started.
    pub(crate) event: u64,
    /// The default pool, then private pools by id.
    pub(crate) pools: Vec<PoolUse>,
}

/// Memory of a pool.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct PoolUse {
    /// PyTorch's id, such as `0.1`; `null` for the default pool.
    pub(crate) pool: Option<String>,
    pub(crate) segments: u64,
    pub(crate) reserved_bytes: u64,
    /// In active blocks; includes pending frees.
    pub(crate) active_bytes: u64,
    /// In free segments, and in whole free pages of expandable segments.
    pub(crate) free_bytes: u64,
    /// Other free bytes: in partly used segments.
    pub(crate) partly_used_bytes: u64,
}

/// The pools after an event, by PyTorch's id; `None` if the recording names no private pool with memory then.
pub(super) fn pools(recording: &Recording, memory: &Memory, index: usize, at: &'static str) -> Option<Pools> {
    let private = PrivateSegments::new(recording, index);
    let mut uses: BTreeMap<Option<PoolId>, PoolUse> = BTreeMap::new();
    for (&start, segment) in memory.segments() {
        let inside = memory.contents(start, segment);
        let pool = private.pool(start);
        let row = uses.entry(pool).or_insert_with(|| PoolUse {
            pool: pool.map(|(major, minor)| format!("{major}.{minor}")),
            ..PoolUse::default()
        });
        let soft = memory.releasable(start, segment, &inside);
        row.segments += 1;
        row.reserved_bytes += segment.bytes;
        row.active_bytes += inside.active;
        row.free_bytes += soft;
        row.partly_used_bytes += inside.free - soft;
    }
    let event = if index == START { 0 } else { recording.number(index) };
    uses.keys().any(Option::is_some).then(|| Pools { at, event, pools: uses.into_values().collect() })
}

/// The sentence about free segments of private pools, which neither `empty_cache` nor a retry releases. `pools`: the bytes of each.
fn kept_sentence(pools: &BTreeMap<&str, u64>, refused: bool) -> String {
    let list: Vec<String> = pools.iter().map(|(pool, bytes)| format!("{} in {pool}", Bytes(*bytes))).collect();
    let list = list.join(", ");
    match refused {
        // PyTorch releases its cache before it reports that memory ran out.
        true => format!(
            "free segments that the failed request did not release; live private pools (CUDA graphs, MemPools) keep such segments: {list}"
        ),
        false => format!(
            "empty_cache or a retry releases free segments, except {} in private pools (CUDA graphs, MemPools) while these exist: {list}",
            Bytes(pools.values().sum())
        ),
    }
}

/// The breakdown's parts: requested bytes, and the parts between requested and reserved.
///
/// `kept`: bytes of free segments by private pool. `refused`: memory ran out, and whether the recording shows private pools.
fn parts(
    ledger: &Ledger,
    one_stream: bool,
    expandable: bool,
    kept: &BTreeMap<&str, u64>,
    refused: Option<bool>,
) -> Vec<Part> {
    let Ledger { reserved, requested, internal, soft, hard, stream, pending, .. } = *ledger;
    let part = |name, bytes, text: &str| {
        // CAST: shares for display.
        let share = if reserved == 0 { 0.0 } else { 100.0 * bytes as f64 / reserved as f64 };
        Part { name, bytes, sentence: format!("{} ({share:.1} %): {text}", Bytes(bytes)) }
    };
    let waits = match one_stream {
        true => "freed blocks whose frees had not completed",
        false => "freed blocks that other streams may still use (record_stream)",
    };
    let free = match refused {
        // Where the segments of a private pool have no name, the free ones may be among these.
        Some(true) if kept.is_empty() => {
            "free segments that the failed request did not release; live private pools (CUDA graphs, MemPools) keep such segments"
        }
        Some(_) => "free segments and whole free pages that the failed request did not release",
        None => "free segments and whole free pages; empty_cache or a retry releases them",
    };
    let shared = match expandable {
        true => "free blocks that share a page or a segment with active blocks; not releasable",
        false => "free blocks in segments with active blocks; releasable only if expandable",
    };
    let kept_bytes = kept.values().sum();
    vec![
        part("requested", requested, "requested by the program in live blocks"),
        part(
            "internal",
            internal,
            "lost inside live blocks: requests are rounded up, and small remainders are not split off",
        ),
        part("soft", soft.saturating_sub(kept_bytes), free),
        part("kept", kept_bytes, &kept_sentence(kept, refused.is_some())),
        part("hard", hard, shared),
        part("stream", stream, "free blocks in other streams' segments; not available to this stream"),
        part("pending", pending, waits),
    ]
}

/// Minimum number of later requests on other streams that shows that a stream is no longer used.
const LATER_REQUESTS: u64 = 10;

/// Free memory of streams without requests after this moment. `allocations`: the number of requests in the recording.
fn stranded(
    view: &mut View<'_>,
    streams: &[StreamUse],
    survey: &Survey,
    index: usize,
    allocations: u64,
) -> Vec<Stranded> {
    let recording = view.recording;
    let mut out: BTreeMap<u64, Stranded> = BTreeMap::new();
    for row in streams {
        let (last, number) = survey.last_request.get(&row.stream).copied().unzip();
        let requests_since = allocations - number.unwrap_or(0);
        // Near the end of a recording every stream but one has made its last request.
        let tenth = recording.events.len() / 10;
        let unused = last.is_none_or(|last| index != START && last <= index && recording.events.len() - last > tenth);
        let current = recording.events.get(index).is_some_and(|event| event.stream == row.stream);
        if !unused || current || requests_since < LATER_REQUESTS || row.soft_bytes + row.hard_bytes == 0 {
            continue;
        }
        let stack = last.and_then(|last| recording.events.get(last)).map(|event| event.origin.stack);
        let stranded = out.entry(row.stream).or_insert_with(|| Stranded {
            stream: row.stream,
            free_bytes: 0,
            returnable_bytes: 0,
            last_request: last.map_or(0, |last| recording.number(last)),
            requests_since,
            line: stack.filter(|stack| !stack.is_empty()).and_then(|stack| view.lines.line_of(stack)),
        });
        stranded.free_bytes += row.soft_bytes + row.hard_bytes;
        stranded.returnable_bytes += row.soft_bytes;
    }
    let mut out: Vec<Stranded> = out.into_values().collect();
    out.sort_by_key(|stranded| (Reverse(stranded.free_bytes), stranded.stream));
    out
}

fn pending(view: &mut View<'_>, survey: &Survey) -> Pending {
    let stream = |(stream, waits): (&u64, &Waits)| {
        let framed = waits.stacks.iter().filter(|(stack, _)| !stack.is_empty());
        let most = framed.max_by_key(|(stack, bytes)| (**bytes, **stack));
        PendingStream {
            stream: *stream,
            deferred_frees: waits.frees,
            peak_bytes: waits.peak,
            longest_events: waits.longest,
            line: most.and_then(|(stack, _)| view.lines.line_of(*stack)),
        }
    };
    let mut streams: Vec<PendingStream> = survey.waits.iter().map(stream).collect();
    streams.sort_by_key(|row| (Reverse(row.peak_bytes), row.stream));
    let (event, peak_bytes) = survey.pending_peak;
    Pending {
        deferred_frees: streams.iter().map(|row| row.deferred_frees).sum(),
        unfinished_frees: survey.waits.values().map(|waits| waits.unfinished).sum(),
        peak_bytes,
        peak_event: if peak_bytes > 0 && event != START { view.recording.number(event) } else { 0 },
        streams,
        peak_active_instant_bytes: survey.peak_allocated,
        replayed_reserved_bytes: None,
        replayed_instant_reserved_bytes: None,
    }
}
