//! The second half of the screen: reserved-memory breakdown, phases, peaks, releases and cache misses.

use super::{numbered, place, reserved_name, size_if_known, table, when};
use crate::explain::ExplainArgs;
use crate::explain::causes::Cause;
use crate::explain::explanation::{Explanation, LargestHole, Refused, Retry, SparseSegment, Stranded};
use crate::host::HostMemoryUse;
use crate::words::{counted, grouped, percent, size};
use std::collections::BTreeMap;
use terminal::{Column, Page, duration};

/// The reason for a refused request; a second sentence where a setting removes it.
pub(super) fn refusal(explanation: &Explanation, last: &Refused) -> Vec<String> {
    let moment = &last.moment;
    let mut before = match explanation.refused {
        ..2 => String::new(),
        count => format!("; {} before it", counted(count - 1, "refused request")),
    };
    if let following @ 1.. = explanation.events.saturating_sub(moment.event) {
        before += &format!("; the recording continues for {}", counted(following, "event"));
    }
    if last.cause == Some(Cause::Impossible) {
        let signed = last.asked_bytes.cast_signed();
        let wrong = match signed {
            ..0 => format!("the requested size is wrong, {signed} as a signed number"),
            0.. => "the requested size is wrong, such as a negative or overflowed number in the program".to_owned(),
        };
        return vec![format!("no GPU has as much memory: {wrong}{before}")];
    }
    let two_places = two_places(explanation, last);
    let mut out = reserved_when_refused(last, two_places.is_some())
        .unwrap_or_else(|| format!("{} active; reserved memory is unknown", size(moment.active_bytes)));
    let limit = explanation.limit_bytes.zip(moment.reserved_bytes);
    match (limit, last.device_free_bytes) {
        (Some((limit, reserved)), _) => {
            let unreserved = limit.saturating_sub(reserved);
            out += &format!("; the limit of {} leaves {} unreserved", size(limit), size(unreserved));
            out += &below_segment(last, unreserved);
        }
        (None, Some(free)) if free > last.segment_bytes => {
            out += &format!(
                "; the GPU had {} free, so a process limit refused it (set_per_process_memory_fraction)",
                size(free)
            );
        }
        (None, Some(free)) => out += &format!("; the GPU had {} free{}", size(free), below_segment(last, free)),
        (None, None) => {}
    }
    out += &before;
    std::iter::once(out).chain(two_places).collect()
}

/// Reserved memory when a request was refused, and why it did not serve it; `None` if unknown.
fn reserved_when_refused(last: &Refused, two_places: bool) -> Option<String> {
    let moment = &last.moment;
    let (reserved, free, largest) = (moment.reserved_bytes?, last.free_bytes?, last.largest_free_bytes?);
    let cause = match last.cause? {
        _ if two_places => "neither place alone was enough",
        Cause::Pieces if free.saturating_sub(last.private_free_bytes) < last.asked_bytes => Cause::Growth.words(),
        cause => cause.words(),
    };
    let private = match last.private_free_bytes {
        0 => String::new(),
        bytes => format!(" ({} of it in private pools, which serve only their own requests)", size(bytes)),
    };
    let known = if moment.active_bytes > reserved { " in the segments that the recording shows" } else { "" };
    let pool = match &last.private_pool {
        Some(id) => format!("private pool {id} (CUDA graph or MemPool, that of the last allocation on its stream)"),
        None => "stream and pool".to_owned(),
    };
    Some(format!(
        "{} reserved{known}, {} active; {} free in its {pool}{private}, largest free block {}: {cause}",
        size(reserved),
        size(moment.active_bytes),
        size(free),
        size(largest),
    ))
}

/// Why memory that is large enough for a request does not serve it: it is smaller than the request's segment.
fn below_segment(last: &Refused, free: u64) -> String {
    match (last.asked_bytes..last.segment_bytes).contains(&free) {
        true => format!(", less than the {} segment that the request needs", size(last.segment_bytes)),
        false => String::new(),
    }
}

/// PyTorch's requests up to this size have pages of [`SMALL_PAGE`] in expandable segments, others of [`PAGE`].
const SMALL: u64 = 1 << 20;
const SMALL_PAGE: u64 = 2 << 20;
const PAGE: u64 = 20 << 20;

/// A refused request for which enough memory was free in total, but neither in segments nor on the GPU alone.
fn two_places(explanation: &Explanation, last: &Refused) -> Option<String> {
    let limit = explanation.limit_bytes.zip(last.moment.reserved_bytes);
    let limit = limit.map(|(limit, reserved)| limit.saturating_sub(reserved));
    let unreserved = last.device_free_bytes.into_iter().chain(limit).min()?;
    let (cached, asked) = (last.free_bytes?.saturating_sub(last.private_free_bytes), last.asked_bytes);
    let split = cached < asked && unreserved < asked && cached.saturating_add(unreserved) >= asked;
    // Expandable segments grow by whole pages.
    let page = if asked <= SMALL { SMALL_PAGE } else { PAGE };
    let combines = cached.saturating_add(unreserved / page * page) >= asked;
    split.then(|| {
        let fix = if explanation.expandable || !combines { "" } else { "; expandable_segments:True can combine them" };
        format!(
            "{} were free, in two places: {} in segments, {} on the GPU{fix}",
            size(cached + unreserved),
            size(cached),
            size(unreserved)
        )
    })
}

/// Labels of the breakdown's parts, by their names in JSON.
fn label(name: &str) -> &str {
    match name {
        "internal" => "rounding",
        "soft" => "free",
        "hard" => "partly used",
        "stream" => "other streams",
        name => name,
    }
}

/// The columns of a label.
const LABEL: usize = 16;

/// The reserved-memory breakdown.
pub(super) fn breakdown(explanation: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let breakdown = &explanation.reserved;
    let Some(reserved) = breakdown.moment.reserved_bytes.filter(|bytes| *bytes > 0) else { return };
    let at = match breakdown.at {
        "out_of_memory" => "when memory ran out",
        "near_peak_reserved" => "within 0.5 % of its peak",
        _ => "at the peak",
    };
    let (name, reserved) = (reserved_name(explanation), size(reserved));
    page.title(match explanation.events {
        0 => format!("{name} when the snapshot was taken: {reserved}"),
        _ => format!("{name} {at}: {reserved} ({})", when(&breakdown.moment)),
    });
    for part in breakdown.parts.iter().filter(|part| part.bytes > 0) {
        page.labelled(&format!("  {}", label(part.name)), LABEL, &part.sentence);
    }
    if let Some(sentence) = device_use(explanation) {
        page.labelled("  not PyTorch", LABEL, &sentence);
    }
    if let Some(sentence) = pinned_host(explanation) {
        page.labelled("  pinned host", LABEL, &sentence);
    }
    for sentence in explanation.host.iter().flat_map(HostMemoryUse::sentences) {
        page.labelled("", LABEL, &sentence);
    }
    if breakdown.streams.len() > 1 {
        let columns = [
            Column::left("stream"),
            Column::left("pool"),
            Column::right("reserved"),
            Column::right("active"),
            Column::right("pending").priority(2),
            Column::right("free"),
            Column::right("kept").priority(1),
            Column::right("partly used"),
            Column::right("largest free block").priority(1),
        ];
        let rows = breakdown.streams.iter().take(usize::from(args.top).max(4)).map(|row| {
            [
                format!("{:#x}", row.stream),
                row.private_pool.as_ref().map_or(row.pool.to_owned(), |id| format!("{}, private {id}", row.pool)),
                size(row.reserved_bytes),
                size(row.active_bytes),
                size(row.pending_bytes),
                size(row.soft_bytes),
                size(row.kept_bytes),
                size(row.hard_bytes),
                size(row.largest_hole_bytes),
            ]
        });
        table(page, columns, rows);
    }
    for stranded in breakdown.stranded.iter().take(usize::from(args.top)) {
        page.note(self::stranded(stranded));
    }
    for sentence in pending(explanation).into_iter().take(2 + usize::from(args.top).min(3)) {
        page.note(sentence);
    }
    sparse_segments(explanation, args, page);
}

/// GPU memory used outside PyTorch's allocator.
pub(super) fn device_use(explanation: &Explanation) -> Option<String> {
    let device = explanation.beside.as_ref()?;
    let mut out = format!("{} used on the GPU outside PyTorch's allocator", size(device.not_pytorch_bytes));
    let others = device.others_bytes.map_or(String::new(), |others| format!(", {} by other processes", size(others)));
    out += &match (device.own_bytes, device.nccl_bytes) {
        (Some(own), None) => {
            format!(": {} by this process (CUDA context, libraries such as cuBLAS and NCCL){others}", size(own))
        }
        (Some(own), Some(nccl)) => format!(
            ": {} by NCCL, {} by this process's CUDA context and other libraries{others}",
            size(nccl),
            size(own.saturating_sub(nccl))
        ),
        (None, Some(nccl)) => format!(
            ": {} by this process's NCCL, {} by CUDA contexts, other libraries and other processes",
            size(nccl),
            size(device.not_pytorch_bytes.saturating_sub(nccl))
        ),
        (None, None) => " (CUDA contexts, libraries such as cuBLAS and NCCL, other processes)".to_owned(),
    };
    let free = device.total_bytes.saturating_sub(device.used_bytes);
    Some(out + &format!("; {} of {} free", size(free), size(device.total_bytes)))
}

/// Pinned host memory.
pub(super) fn pinned_host(explanation: &Explanation) -> Option<String> {
    let pinned = explanation.pinning.as_ref()?;
    let mut out = format!(
        "{} of host memory pinned in {}, {} active",
        size(pinned.bytes),
        counted(pinned.segments, "segment"),
        size(pinned.active_bytes)
    );
    if pinned.peak_bytes > pinned.bytes {
        out += &format!("; peak {}", size(pinned.peak_bytes));
    }
    if pinned.rounding_most_bytes > 0 {
        out += &format!(
            "; up to {} due to rounding to powers of two (limit it with pinned_max_round_threshold_mb, PyTorch 2.13)",
            size(pinned.rounding_most_bytes)
        );
    }
    Some(out)
}

/// A sentence about free memory that no later request can use.
pub(super) fn stranded(stranded: &Stranded) -> String {
    let last = match (&stranded.line, stranded.last_request) {
        (_, 0) => "no request on it is recorded".to_owned(),
        (Some(line), event) => format!("its last request is event {}, at {line}", grouped(event)),
        (None, event) => format!("its last request is event {}", grouped(event)),
    };
    format!(
        "stranded: {} free on stream {:#x}, which is no longer used ({last}; {} on other streams follow); empty_cache would \
         release {}",
        size(stranded.free_bytes),
        stranded.stream,
        counted(stranded.requests_since, "request"),
        size(stranded.returnable_bytes)
    )
}

/// The cost of deferred frees: two sentences about all, then one about each stream.
pub(super) fn pending(explanation: &Explanation) -> Vec<String> {
    let pending = &explanation.reserved.pending;
    // Without events the wait times are unknown; the breakdown shows the pending bytes.
    if pending.peak_bytes == 0 || explanation.events == 0 {
        return Vec::new();
    }
    let mut out = vec![format!(
        "{} {}; peak pending {} (event {})",
        counted(pending.deferred_frees, "free"),
        if explanation.streams < 2 {
            "did not complete when requested (the reason is unknown: only one stream is recorded)"
        } else {
            "waited for other streams (record_stream)"
        },
        size(pending.peak_bytes),
        grouped(pending.peak_event)
    )];
    match pending.unfinished_frees {
        0 => {}
        all if all == pending.deferred_frees => out.push("none of them completed within the recording".to_owned()),
        some => out.push(format!("{some} of them had not completed by the end of the recording")),
    }
    let active = explanation.peak_active.active_bytes;
    let mut text =
        format!("peak active {} ({} without deferred frees)", size(active), size(pending.peak_active_instant_bytes));
    let replayed = pending.replayed_reserved_bytes.zip(pending.replayed_instant_reserved_bytes);
    // A replay that reserves less than was recorded does not reproduce the waits.
    let recorded = explanation.peak_reserved.reserved_bytes;
    let reproduced = replayed.filter(|(peak, _)| recorded.is_none_or(|recorded| *peak >= recorded / 100 * 99));
    if let Some((peak, instant)) = reproduced {
        text += &format!("; peak reserved in replay {} ({})", size(peak), size(instant));
    }
    out.push(text);
    for row in pending.streams.iter().filter(|row| row.peak_bytes > 0) {
        let line = row.line.as_ref().map_or_else(String::new, |line| format!("; most bytes from {line}"));
        out.push(format!(
            "blocks of stream {:#x}: {}, peak pending {}, longest wait {}{line}",
            row.stream,
            counted(row.deferred_frees, "deferred free"),
            size(row.peak_bytes),
            counted(row.longest_events, "event")
        ));
    }
    out
}

fn sparse_segments(explanation: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let breakdown = &explanation.reserved;
    // Below half a percent of reserved memory the table is omitted; --json has it.
    let reserved = breakdown.moment.reserved_bytes.unwrap_or_default();
    if breakdown.pinned.is_empty() || breakdown.pinned_free_bytes < reserved / 200 {
        return;
    }
    page.title(format!(
        "Blocks that keep mostly free segments reserved: {} free in {}",
        size(breakdown.pinned_free_bytes),
        counted(breakdown.pinned_segments, "segment")
    ));
    let columns = [
        Column::right("segment"),
        Column::right("free"),
        Column::right("blocks"),
        Column::right("active"),
        Column::right("age"),
        Column::text("kept by"),
    ];
    let rows = breakdown.pinned.iter().take(usize::from(args.top)).map(|row| {
        let (line, age) = keeper(row);
        let used = row.bytes - row.free_bytes;
        [size(row.bytes), size(row.free_bytes), row.blocks.to_string(), size(used), age, line]
    });
    table(page, columns, rows);
    page.note(match explanation.events {
        0 => "kept by: the line of the segment's largest block",
        _ => "kept by: the line of the segment's largest block; age: that block's",
    });
}

/// The largest block of a segment and its age.
fn keeper(row: &SparseSegment) -> (String, String) {
    let Some(first) = row.keepers.first() else { return (String::new(), "-".to_owned()) };
    let mut line = place(&first.line, None, first.nearby);
    if first.pending {
        line += ", free pending";
    }
    let others: Vec<&String> =
        row.keepers.iter().map(|keeper| &keeper.line).filter(|line| **line != first.line).collect();
    if !others.is_empty() {
        line += &match others.len() {
            1 => " and a block of another line".to_owned(),
            count => format!(" and {count} blocks of other lines"),
        };
    }
    let age = match (first.age_ns, first.age_events) {
        (Some(ns), _) => duration(ns),
        (None, Some(events)) => counted(events, "event"),
        (None, None) => "unknown".to_owned(),
    };
    (line, age)
}

/// Phases, peaks, free blocks and cache releases.
pub(super) fn peaks(explanation: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let top = usize::from(args.top);
    phases(explanation, page);
    if explanation.peaks.len() > 1 {
        page.title("Highest peaks of active memory");
        let columns = [
            Column::right("event"),
            Column::right("time").priority(1),
            Column::right("active"),
            Column::right("reserved"),
            Column::right("largest free block"),
            Column::text("annotation, line"),
        ];
        let rows = explanation.peaks.iter().take(top).map(|moment| {
            let place: Vec<&str> = moment.annotation.iter().chain(&moment.line).map(String::as_str).collect();
            [
                grouped(moment.event),
                moment.time_ns.map_or_else(|| "-".to_owned(), duration),
                size(moment.active_bytes),
                size_if_known(moment.reserved_bytes),
                size_if_known(moment.largest_hole_bytes),
                place.join(", "),
            ]
        });
        table(page, columns, rows);
    }
    largest_free_block(explanation, page);
    if explanation.num_retries > 0 {
        page.title(format!(
            "PyTorch released cached memory during {}; the last ones:",
            counted(explanation.num_retries, "request")
        ));
        for retry in explanation.retries.iter().rev().take(top) {
            page.note(self::retry(retry));
        }
    }
    if explanation.num_releases > 0 {
        page.note(format!("empty_cache released memory {}", counted(explanation.num_releases, "time")));
    }
}

/// The phases of the program with their peaks.
fn phases(explanation: &Explanation, page: &mut Page) {
    let Some(decides) = explanation.phases.iter().find(|phase| phase.decides) else { return };
    page.title(format!("Phases; the peak is in: {}", decides.named()));
    let columns = [
        Column::text("phase"),
        Column::right("events"),
        Column::right("time").priority(1),
        Column::right("peak active"),
        Column::right("peak reserved"),
    ];
    let rows = explanation.phases.iter().map(|phase| {
        [
            phase.named(),
            format!("{} to {}", grouped(phase.first_event), grouped(phase.last_event)),
            phase.time_ns.map_or_else(|| "-".to_owned(), duration),
            size(phase.peak_active_bytes),
            size_if_known(phase.peak_reserved_bytes),
        ]
    });
    table(page, columns, rows);
}

/// The largest free block: at the peak, at the end, and its range.
fn largest_free_block(explanation: &Explanation, page: &mut Page) {
    // Without events there is one moment, which the breakdown shows.
    let range = explanation.largest_hole.as_ref().filter(|_| explanation.events > 0);
    let Some(&LargestHole { min_bytes, min_event, max_bytes, max_event }) = range else { return };
    let (shown, end) = (&explanation.reserved, &explanation.end);
    let at = match shown.at {
        "out_of_memory" => "when memory ran out",
        "near_peak_reserved" => "near the peak",
        _ => "at the peak",
    };
    page.title(format!(
        "Largest free block: {} {at}, {} at the end; maximum {} ({}), minimum {} ({})",
        size_if_known(shown.moment.largest_hole_bytes),
        size_if_known(end.largest_hole_bytes),
        size(max_bytes),
        numbered(max_event),
        size(min_bytes),
        numbered(min_event)
    ));
    if let Some((limit, reserved)) = explanation.limit_bytes.zip(end.reserved_bytes) {
        let unreserved = limit.saturating_sub(reserved);
        page.note(format!("the limit of {} leaves {} unreserved at the end", size(limit), size(unreserved)));
    }
}

/// A sentence about a cache release during a request.
pub(super) fn retry(retry: &Retry) -> String {
    let kind = match retry.kind {
        "garbage_collection" => "garbage collection",
        "retry_or_empty_cache" => "retry (or empty_cache right before it)",
        other => other,
    };
    format!(
        "{kind} at {}: {} requested, {}; {} ({}) released, {}",
        when(&retry.moment),
        size(retry.asked_bytes),
        retry.cause.words(),
        size(retry.released_bytes),
        counted(retry.released_segments, "segment"),
        if retry.succeeded { "request served" } else { "request refused" }
    )
}

/// Cache misses by requested size.
pub(super) fn misses(explanation: &Explanation, args: &ExplainArgs, page: &mut Page) {
    if explanation.shapes.is_empty() {
        return;
    }
    let taken: u64 = explanation.shapes.iter().map(|shape| shape.taken_bytes).sum();
    let misses: u64 = explanation.shapes.iter().map(|shape| shape.misses).sum();
    page.title(format!(
        "Cache misses: {} of {} allocated {} of segments",
        counted(misses, "request"),
        explanation.allocations,
        size(taken)
    ));
    let columns = [
        Column::right("size"),
        Column::right("requests"),
        Column::right("misses"),
        Column::right("segments"),
        Column::left("main cause"),
        Column::text("line").priority(1),
    ];
    let rows = explanation.shapes.iter().take(usize::from(args.top)).map(|shape| {
        [
            size(shape.requested_bytes),
            shape.requests.to_string(),
            shape.misses.to_string(),
            size(shape.taken_bytes),
            shape.cause.words().to_owned(),
            shape.line.clone().unwrap_or_default(),
        ]
    });
    table(page, columns, rows);
    let mut causes: BTreeMap<Cause, u64> = BTreeMap::new();
    for (cause, count) in explanation.shapes.iter().flat_map(|shape| &shape.causes) {
        *causes.entry(*cause).or_default() += count;
    }
    let mut causes: Vec<(Cause, u64)> = causes.into_iter().collect();
    causes.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let list = causes.iter().map(|(cause, count)| format!("{}: {count} ({})", cause.words(), percent(*count, misses)));
    page.note(format!("all misses: {}", list.collect::<Vec<String>>().join("; ")));
}
