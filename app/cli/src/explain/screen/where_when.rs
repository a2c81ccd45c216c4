//! The second half of the page: where reserved memory went, when, and which sizes miss.

use super::{place, table, when as said};
use crate::explain::ExplainArgs;
use crate::explain::causes::Cause;
use crate::explain::explanation::{Explanation, Pinned, Refused, Retry, Stranded};
use crate::words::{counted, percent, size};
use std::collections::BTreeMap;
use terminal::{Column, Page, duration};

/// Why a request was refused, in a sentence.
pub(super) fn refusal(found: &Explanation, last: &Refused) -> String {
    let moment = &last.moment;
    let mut out = format!(
        "{} were reserved and {} in use; {} was free for its stream and size, the largest piece {}: {}",
        size(moment.reserved_bytes),
        size(moment.active_bytes),
        size(last.free_bytes),
        size(moment.largest_hole_bytes),
        last.cause.words()
    );
    match (found.limit_bytes, last.device_free_bytes) {
        (Some(limit), _) => {
            let room = limit.saturating_sub(moment.reserved_bytes);
            out += &format!("; the limit of {} leaves {}", size(limit), size(room));
        }
        (None, Some(free)) if free > last.asked_bytes => {
            out += &format!(
                "; the device had {} free, so a limit of the process refused it (set_per_process_memory_fraction)",
                size(free)
            );
        }
        (None, Some(free)) => out += &format!("; the device had {} free", size(free)),
        (None, None) => {}
    }
    if found.refused > 1 {
        out += &format!("; {} before it", counted(found.refused - 1, "refused request"));
    }
    out
}

/// Where reserved memory went.
pub(super) fn where_it_went(found: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let went = &found.reserved;
    let reserved = went.moment.reserved_bytes;
    if reserved == 0 {
        return;
    }
    let at = match went.at {
        "out_of_memory" => "when memory ran out",
        "near_peak_reserved" => "when it came within 0.5 % of its peak",
        _ => "at the peak",
    };
    let reserved = size(reserved);
    page.title(match found.events {
        0 => format!("Where {reserved} reserved went when the snapshot was taken"),
        _ => format!("Where {reserved} reserved went {at} ({})", said(&went.moment)),
    });
    for part in went.parts.iter().filter(|part| part.bytes > 0) {
        page.labelled(&format!("  {:<10}", part.name), 12, &part.sentence);
    }
    if let Some(sentence) = beside(found) {
        page.labelled(&format!("  {:<10}", "beside"), 12, &sentence);
    }
    if let Some(sentence) = pinning(found) {
        page.labelled(&format!("  {:<10}", "host"), 12, &sentence);
    }
    if went.streams.len() > 1 {
        let columns = [
            Column::left("stream"),
            Column::left("pool"),
            Column::right("reserved"),
            Column::right("active"),
            Column::right("waits").priority(2),
            Column::right("soft"),
            Column::right("hard"),
            Column::right("largest hole").priority(1),
        ];
        let rows = went.streams.iter().take(usize::from(args.top).max(4)).map(|row| {
            [
                format!("{:#x}", row.stream),
                row.pool.to_owned(),
                size(row.reserved_bytes),
                size(row.active_bytes),
                size(row.pending_bytes),
                size(row.soft_bytes),
                size(row.hard_bytes),
                size(row.largest_hole_bytes),
            ]
        });
        table(page, columns, rows);
    }
    for stranded in went.stranded.iter().take(usize::from(args.top)) {
        page.note(self::stranded(stranded));
    }
    for sentence in pending(found).into_iter().take(2 + usize::from(args.top).min(3)) {
        page.note(sentence);
    }
    pinned(found, args, page);
}

/// What is used on the GPU beside PyTorch's.
pub(super) fn beside(found: &Explanation) -> Option<String> {
    let beside = found.beside.as_ref()?;
    let mut out = format!("{} more are used on the GPU", size(beside.not_pytorch_bytes));
    if let Some((own, others)) = beside.own_bytes.zip(beside.others_bytes) {
        out += &format!(
            ": {} by this process (its CUDA context, and libraries such as cuBLAS and NCCL), {} by others",
            size(own),
            size(others)
        );
    } else {
        out += " (CUDA contexts, libraries such as cuBLAS and NCCL, other processes)";
    }
    let free = beside.total_bytes.saturating_sub(beside.used_bytes);
    Some(out + &format!("; {} of {} are free", size(free), size(beside.total_bytes)))
}

/// Pinned memory of the host.
pub(super) fn pinning(found: &Explanation) -> Option<String> {
    let pinning = found.pinning.as_ref()?;
    let mut out = format!(
        "{} of the host's memory are pinned in {}, {} in use",
        size(pinning.bytes),
        counted(pinning.segments, "segment"),
        size(pinning.active_bytes)
    );
    if pinning.peak_bytes > pinning.bytes {
        out += &format!("; {} at most", size(pinning.peak_bytes));
    }
    if pinning.rounding_most_bytes > 0 {
        out += &format!(
            "; up to {} are rounding to powers of two (pinned_max_round_threshold_mb, PyTorch 2.13)",
            size(pinning.rounding_most_bytes)
        );
    }
    Some(out)
}

/// Memory that no allocation can use any more, in a sentence.
pub(super) fn stranded(stranded: &Stranded) -> String {
    let last = match (&stranded.line, stranded.last_request) {
        (_, 0) => "nothing is asked for on it".to_owned(),
        (Some(line), event) => format!("its last request is event {event}, at {line}"),
        (None, event) => format!("its last request is event {event}"),
    };
    format!(
        "stranded: {} free in stream {:#x}, which is used no more ({last}, and {} on other streams follow); empty_cache would give \
         {} back",
        size(stranded.free_bytes),
        stranded.stream,
        counted(stranded.requests_since, "request"),
        size(stranded.returnable_bytes)
    )
}

/// What frees cost that wait: two sentences on all, then one on each stream.
pub(super) fn pending(found: &Explanation) -> Vec<String> {
    let pending = &found.reserved.pending;
    // Without events it is not known which frees waited, and the ledger has what waits.
    if pending.peak_bytes == 0 || found.events == 0 {
        return Vec::new();
    }
    let mut out = vec![format!(
        "{} {}, at most {} at once (event {})",
        counted(pending.deferred_frees, "free"),
        if found.streams < 2 {
            "completed later than they were requested (one stream is recorded, so what they waited for is not told)"
        } else {
            "waited for other streams (record_stream)"
        },
        size(pending.peak_bytes),
        pending.peak_event
    )];
    let active = found.peak_active.active_bytes;
    let mut text = format!(
        "peak in use {} as recorded, {} had they completed at once",
        size(active),
        size(pending.peak_active_instant_bytes)
    );
    if let (Some(recorded), Some(instant)) = (pending.replayed_reserved_bytes, pending.replayed_instant_reserved_bytes)
    {
        text += &format!("; replayed, {} and {} are reserved", size(recorded), size(instant));
    }
    out.push(text);
    for row in pending.streams.iter().filter(|row| row.peak_bytes > 0) {
        let line = row.line.as_ref().map_or_else(String::new, |line| format!(", most of it from {line}"));
        out.push(format!(
            "blocks of stream {:#x}: {}, at most {} at once, for up to {}{line}",
            row.stream,
            counted(row.deferred_frees, "such free"),
            size(row.peak_bytes),
            counted(row.longest_events, "event")
        ));
    }
    out
}

fn pinned(found: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let went = &found.reserved;
    // Less than a part in two hundred is not worth a table; --json has it.
    if went.pinned.is_empty() || went.pinned_free_bytes < went.moment.reserved_bytes / 200 {
        return;
    }
    page.title(format!(
        "Which blocks pin the holes: {} free in {} that {} mostly free and cannot go back",
        size(went.pinned_free_bytes),
        counted(went.pinned_segments, "segment"),
        if went.pinned_segments == 1 { "is" } else { "are" }
    ));
    let columns = [
        Column::right("segment"),
        Column::right("free"),
        Column::right("blocks"),
        Column::right("in use"),
        Column::right("age"),
        Column::text("kept by"),
    ];
    let rows = went.pinned.iter().take(usize::from(args.top)).map(|row| {
        let (line, age) = keeper(row);
        let used = row.bytes - row.free_bytes;
        [size(row.bytes), size(row.free_bytes), row.blocks.to_string(), size(used), age, line]
    });
    table(page, columns, rows);
    page.note(match found.events {
        0 => "kept by: the line of the segment's largest block",
        _ => "kept by: the line of the segment's largest block; age: since that was allocated",
    });
}

/// The largest block of a segment and its age.
fn keeper(row: &Pinned) -> (String, String) {
    let Some(first) = row.keepers.first() else { return (String::new(), "-".to_owned()) };
    let mut line = place(&first.line, None, first.nearby);
    if first.pending {
        line += ", freed, not completed";
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
        (None, None) => "old".to_owned(),
    };
    (line, age)
}

/// When it was.
pub(super) fn when(found: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let top = usize::from(args.top);
    phases(found, page);
    if found.peaks.len() > 1 {
        page.title("When: the highest peaks of use");
        let columns = [
            Column::right("event"),
            Column::right("time").priority(1),
            Column::right("active"),
            Column::right("reserved"),
            Column::right("largest hole"),
            Column::text("where"),
        ];
        let rows = found.peaks.iter().take(top).map(|moment| {
            let place: Vec<&str> = moment.annotation.iter().chain(&moment.line).map(String::as_str).collect();
            [
                moment.event.to_string(),
                moment.time_ns.map_or_else(|| "-".to_owned(), duration),
                size(moment.active_bytes),
                size(moment.reserved_bytes),
                size(moment.largest_hole_bytes),
                place.join(", "),
            ]
        });
        table(page, columns, rows);
    }
    hole(found, page);
    if found.num_retries > 0 {
        page.title(format!(
            "Memory went back to the device during {}, the last of them:",
            counted(found.num_retries, "request")
        ));
        for retry in found.retries.iter().rev().take(top) {
            page.note(retried(retry));
        }
    }
    if found.num_releases > 0 {
        page.note(format!("besides, memory went back {} by empty_cache", counted(found.num_releases, "time")));
    }
}

/// What each phase of the program holds.
fn phases(found: &Explanation, page: &mut Page) {
    let Some(decides) = found.phases.iter().find(|phase| phase.decides) else { return };
    page.title(format!("Phases: the peak is reached first in {}", decides.named()));
    let columns = [
        Column::text("phase"),
        Column::right("events"),
        Column::right("time").priority(1),
        Column::right("in use"),
        Column::right("reserved"),
    ];
    let rows = found.phases.iter().map(|phase| {
        [
            phase.named(),
            format!("{} to {}", phase.first_event, phase.last_event),
            phase.time_ns.map_or_else(|| "-".to_owned(), duration),
            size(phase.peak_active_bytes),
            size(phase.peak_reserved_bytes),
        ]
    });
    table(page, columns, rows);
}

/// How large a request would have succeeded.
fn hole(found: &Explanation, page: &mut Page) {
    let reserved = &found.peak_reserved;
    if reserved.reserved_bytes == 0 {
        return;
    }
    let Some(least) = found.timeline.iter().min_by_key(|point| point.largest_hole_bytes) else { return };
    let most = found.timeline.iter().max_by_key(|point| point.largest_hole_bytes).unwrap_or(least);
    let end = &found.end;
    page.title(format!(
        "How large a request would have succeeded without the driver: {} at the peak, {} at the end; at most {} (around event \
         {}), at least {} (around event {})",
        size(reserved.largest_hole_bytes),
        size(end.largest_hole_bytes),
        size(most.largest_hole_bytes),
        most.event,
        size(least.largest_hole_bytes),
        least.event
    ));
    if let Some(limit) = found.limit_bytes {
        let room = limit.saturating_sub(end.reserved_bytes);
        page.note(format!("under the limit of {} the driver would give {} more at the end", size(limit), size(room)));
    }
}

/// Why memory went back, in a sentence.
pub(super) fn retried(retry: &Retry) -> String {
    let kind = match retry.kind {
        "garbage_collection" => "garbage collection",
        "retry_or_empty_cache" => "retry (or empty_cache right before it)",
        other => other,
    };
    format!(
        "{kind} at {}: {} asked for, {}; {} in {} went back, and {}",
        said(&retry.moment),
        size(retry.asked_bytes),
        retry.cause.words(),
        size(retry.released_bytes),
        counted(retry.released_segments, "segment"),
        if retry.succeeded { "it was served" } else { "it was refused" }
    )
}

/// Which sizes miss.
pub(super) fn shapes(found: &Explanation, args: &ExplainArgs, page: &mut Page) {
    if found.shapes.is_empty() {
        return;
    }
    let taken: u64 = found.shapes.iter().map(|shape| shape.taken_bytes).sum();
    let misses: u64 = found.shapes.iter().map(|shape| shape.misses).sum();
    page.title(format!(
        "Which sizes miss: {} of {} took {} from the device",
        counted(misses, "request"),
        found.allocations,
        size(taken)
    ));
    let columns = [
        Column::right("size"),
        Column::right("asked"),
        Column::right("missed"),
        Column::right("took"),
        Column::left("mostly because"),
        Column::text("line").priority(1),
    ];
    let rows = found.shapes.iter().take(usize::from(args.top)).map(|shape| {
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
    for (cause, count) in found.shapes.iter().flat_map(|shape| &shape.causes) {
        *causes.entry(*cause).or_default() += count;
    }
    let mut causes: Vec<(Cause, u64)> = causes.into_iter().collect();
    causes.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let list = causes.iter().map(|(cause, count)| format!("{}: {count} ({})", cause.words(), percent(*count, misses)));
    page.note(format!("all misses: {}", list.collect::<Vec<String>>().join("; ")));
}
