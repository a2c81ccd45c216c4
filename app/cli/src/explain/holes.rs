//! Where reserved memory went: by part, by stream and pool, and which blocks keep what is free.

use super::View;
use super::explanation::{Explanation, Keeper, Part, Pending, PendingStream, Pinned, Stranded, StreamUse, WhereItWent};
use super::moments::{line_of, moment};
use super::survey::{Survey, Waits};
use crate::recording::START;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use vramlab::histories::memory::{BEFORE, Block, Contents, Memory, Pool, Segment};
use vramlab::{Bytes, Ledger};

/// Segments that are described, and blocks of each.
const SEGMENTS: usize = 1000;
const KEEPERS: usize = 100;

/// A segment counts as mostly free from this share on.
const MOSTLY: f64 = 0.5;

fn pool_name(pool: Pool) -> &'static str {
    if pool.small { "small" } else { "large" }
}

/// Where it went at the moment after an event, as a request on that event's stream sees it.
pub(super) fn where_it_went(
    view: &mut View<'_>,
    memory: &Memory,
    survey: &Survey,
    index: usize,
    at: &'static str,
    found: &Explanation,
) -> WhereItWent {
    let (one_stream, allocations) = (found.streams < 2, found.allocations);
    let event = view.recording.events.get(index).map(|event| event.stream);
    let mut uses: BTreeMap<Pool, StreamUse> = BTreeMap::new();
    let mut pinned: Vec<(u64, Segment, Contents)> = Vec::new();
    for (&start, segment) in memory.segments() {
        let inside = memory.contents(start, segment);
        let pool = segment.pool();
        let row = uses.entry(pool).or_insert_with(|| StreamUse {
            stream: pool.stream,
            pool: pool_name(pool),
            largest_hole_bytes: memory.largest_hole(pool),
            ..StreamUse::default()
        });
        row.segments += 1;
        row.reserved_bytes += segment.bytes;
        row.active_bytes += inside.active;
        row.pending_bytes += inside.pending;
        if inside.blocks == 0 {
            row.soft_bytes += inside.free;
        } else {
            row.hard_bytes += inside.free;
            // CAST: a share of bytes.
            if inside.free as f64 > MOSTLY * segment.bytes as f64 {
                pinned.push((start, *segment, inside));
            }
        }
    }
    let mut streams: Vec<StreamUse> = uses.into_values().collect();
    streams.sort_by_key(|row| (Reverse(row.reserved_bytes), row.stream, row.pool));
    // Before the first event, as a request sees it on the stream that has most.
    let stream = event.or(streams.first().map(|row| row.stream)).unwrap_or(0);
    pinned.sort_by_key(|(start, _, inside)| (Reverse(inside.free), *start));
    let pinned_segments = pinned.len() as u64;
    let pinned_free_bytes = pinned.iter().map(|(_, _, inside)| inside.free).sum();
    pinned.truncate(SEGMENTS);
    let pinned = pinned.iter().map(|segment| describe(view, memory, index, segment)).collect();
    WhereItWent {
        at,
        moment: moment(view, memory, index),
        stream,
        parts: parts(&memory.ledger(stream), one_stream),
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
) -> Pinned {
    let mut blocks: Vec<_> = memory.blocks_in(*address, segment).collect();
    blocks.sort_by_key(|(addr, block)| (Reverse(block.bytes), *addr));
    blocks.truncate(KEEPERS);
    let keeper = |(address, block): (u64, &Block)| {
        let (line, nearby) = line_of(block, &mut view.lines);
        let born = (block.born != BEFORE).then_some(block.born as usize);
        let time = |index: usize| view.recording.since_start(index);
        Keeper {
            address,
            bytes: block.bytes,
            line,
            nearby,
            pending: block.pending.is_some(),
            age_events: born.map(|born| index.saturating_sub(born) as u64),
            age_ns: born.and_then(|born| Some(time(index)?.saturating_sub(time(born)?))),
        }
    };
    Pinned {
        address: *address,
        bytes: segment.bytes,
        free_bytes: inside.free,
        stream: segment.stream,
        pool: pool_name(segment.pool()),
        blocks: inside.blocks,
        keepers: blocks.into_iter().map(keeper).collect(),
    }
}

/// The five parts between what was asked for and what is reserved, and what was asked for itself.
fn parts(ledger: &Ledger, one_stream: bool) -> Vec<Part> {
    let Ledger { reserved, requested, internal, soft, hard, stream, pending, .. } = *ledger;
    let part = |name, bytes, what: &str| {
        // CAST: shares for display.
        let share = if reserved == 0 { 0.0 } else { 100.0 * bytes as f64 / reserved as f64 };
        Part { name, bytes, sentence: format!("{} ({share:.1} %) {what}", Bytes(bytes)) }
    };
    let waits = match one_stream {
        true => "is freed, but the frees had not completed",
        false => "is freed but waits for other streams (record_stream)",
    };
    vec![
        part("requested", requested, "is what the program asked for and holds"),
        part("internal", internal, "is lost inside blocks: requests are rounded up, and small rests are not split off"),
        part("soft", soft, "is free in whole segments: empty_cache, or a retry, gives it back"),
        part("hard", hard, "is free between blocks that are in use: it cannot go back, and serves only what fits"),
        part("stream", stream, "is free in other streams' segments, which this stream cannot use"),
        part("pending", pending, waits),
    ]
}

/// Fewer requests on other streams do not show that a stream is used no more.
const GOES_ON: u64 = 10;

/// Free memory of streams on which nothing is asked for after this moment, of so many requests in all.
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
        // Near the end of a history every stream but one has had its last request.
        let rest = recording.events.len() / 10;
        let over = last.is_none_or(|last| index != START && last <= index && recording.events.len() - last > rest);
        let goes_on = recording.events.get(index).is_some_and(|event| event.stream == row.stream);
        if !over || goes_on || requests_since < GOES_ON || row.soft_bytes + row.hard_bytes == 0 {
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
        peak_bytes,
        peak_event: if peak_bytes > 0 && event != START { view.recording.number(event) } else { 0 },
        streams,
        peak_active_instant_bytes: survey.peak_allocated,
        replayed_reserved_bytes: None,
        replayed_instant_reserved_bytes: None,
    }
}
