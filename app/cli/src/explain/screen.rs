//! The screen of `explain`: the headline, then holders, growth, breakdown, peaks and misses; the first rows of each.

mod sections;

use super::ExplainArgs;
use super::causes::Cause;
use super::explanation::{Explanation, Holders, Moment, Node};
use super::frames::Code;
use super::lines::BACKWARD;
use super::purposes::Purpose;
use crate::words::{RECORD, counted, grouped, no_frames, percent, size};
use serde::Serialize;
use terminal::{Column, Page, Table, command, duration, quoted};

/// Maximum lines of a tree, and the minimum share of a line.
const TREE: usize = 12;
const LEAST: f64 = 0.03;

/// Adds a table.
fn table<const N: usize>(page: &mut Page, columns: [Column; N], rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new(columns);
    rows.for_each(|row| table.row(row));
    page.table(&table);
}

/// A size; a dash if it is unknown.
pub(super) fn size_if_known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), size)
}

/// An event by its number.
fn numbered(event: u64) -> String {
    match event {
        0 => "before recording started".to_owned(),
        event => format!("event {}", grouped(event)),
    }
}

/// A moment's event, time, annotation and line, for the end of a sentence.
pub(crate) fn when(moment: &Moment) -> String {
    let mut out = numbered(moment.event);
    if let Some(time) = moment.time_ns {
        out += &format!(", after {}", duration(time));
    }
    if let Some(annotation) = &moment.annotation {
        out += &format!(", in {annotation}");
    }
    if let Some(line) = &moment.line {
        // Of an event without frames the line is that of an earlier one.
        out += &format!(", {} {line}", if moment.nearby { "last recorded line" } else { "at" });
    }
    out
}

/// A line with the library frame inside it.
pub(crate) fn place(line: &str, inside: Option<&str>, nearby: bool) -> String {
    let line = if nearby { format!("~ {line}") } else { line.to_owned() };
    inside.map_or(line.clone(), |inside| format!("{line} > {inside}"))
}

/// A line, with a word for code that is not the user's.
fn with_code(line: &str, code: Option<Code>) -> String {
    code.and_then(Code::word).map_or_else(|| line.to_owned(), |word| format!("{line} ({word})"))
}

/// Adds all sections to a page.
pub(super) fn report(explanation: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let headline = headline(explanation);
    for (number, sentence) in headline.iter().enumerate() {
        match number {
            0 => page.line(format!("{}: {sentence}", explanation.gpus.named(&explanation.trace))),
            _ => page.note(sentence),
        };
    }
    explanation.gpus.lines().iter().for_each(|line| page.note(line));
    let first = explanation.who.first().map_or(0, |who| who.moment.active_bytes);
    for (number, who) in explanation.who.iter().enumerate() {
        // Nearly equal lists are shown once; --json has both.
        let active = who.moment.active_bytes;
        if number == 0 || active > 0 && active < first - first / 50 {
            holders(explanation, who, args, number == 0, page);
        }
    }
    growth(explanation, args, page);
    sections::breakdown(explanation, args, page);
    sections::peaks(explanation, args, page);
    sections::misses(explanation, args, page);
}

/// Sentences of the screen that the page of `report` shows.
#[derive(Debug, Serialize)]
pub(super) struct Sentences {
    headline: Vec<String>,
    /// Name of what the breakdown divides.
    reserved: &'static str,
    /// Stranded memory, deferred frees, and memory outside PyTorch.
    streams: Vec<String>,
    /// One sentence for each of `retries`.
    retries: Vec<String>,
    /// Words for each cause.
    causes: Vec<(Cause, &'static str)>,
}

/// The sentences for a page.
pub(super) fn sentences(explanation: &Explanation) -> Sentences {
    let mut streams: Vec<String> = explanation.reserved.stranded.iter().map(sections::stranded).collect();
    streams.extend(sections::pending(explanation));
    streams.extend(sections::device_use(explanation));
    streams.extend(sections::pinned_host(explanation));
    streams.extend(explanation.host.iter().flat_map(|host| host.sentences()));
    Sentences {
        headline: headline(explanation),
        reserved: reserved_name(explanation),
        streams,
        retries: explanation.retries.iter().map(sections::retry).collect(),
        causes: Cause::ALL.into_iter().map(|cause| (cause, cause.words())).collect(),
    }
}

/// Whether the recording shows fewer segments than its blocks need. What it shows as reserved is then a part of it.
fn misses_segments(explanation: &Explanation) -> bool {
    let peak = &explanation.peak_active;
    peak.reserved_bytes.is_none_or(|reserved| peak.active_bytes > reserved)
}

/// The name of what the breakdown divides.
fn reserved_name(explanation: &Explanation) -> &'static str {
    match misses_segments(explanation) {
        true => "Part of reserved memory that the recording shows",
        false => "Reserved memory",
    }
}

/// A few sentences; the first is the main result.
fn headline(explanation: &Explanation) -> Vec<String> {
    let (active, reserved) = (&explanation.peak_active, &explanation.peak_reserved);
    let known = reserved.reserved_bytes.filter(|bytes| *bytes > 0);
    let mut out = Vec::new();
    if let Some(last) = explanation.out_of_memory.last() {
        out.push(format!(
            "out of memory at {}: {} requested on stream {:#x}",
            when(&last.moment),
            size(last.asked_bytes),
            last.stream
        ));
        out.extend(sections::refusal(explanation, last));
    } else if explanation.events == 0 {
        let (used, whole) = (active.active_bytes, known.unwrap_or_default());
        let (share, blocks) = (percent(used, whole), counted(explanation.blocks_before, "block"));
        out.push(format!(
            "{} reserved in {}, {} ({share}) active in {blocks} when the snapshot was taken",
            size(whole),
            counted(explanation.segments_before, "segment"),
            size(used)
        ));
        out.push("the snapshot has no events, so earlier memory is unknown".to_owned());
    } else if let Some(peak) = known.filter(|_| !misses_segments(explanation)) {
        out.push(format!(
            "peak reserved {}, peak active {} ({})",
            size(peak),
            size(active.active_bytes),
            percent(active.active_bytes, peak)
        ));
        let reserved = &explanation.reserved.moment;
        // The largest free block may be the remainder of the segment just allocated.
        let used = reserved.active_bytes + reserved.largest_hole_bytes.unwrap_or_default();
        let free = reserved.reserved_bytes.map_or(0, |reserved| reserved.saturating_sub(used));
        let little = active.active_bytes / 20;
        // Before recording started there is no request.
        if reserved.event > 0 && reserved.active_bytes < active.active_bytes - little && free > little {
            out.push(format!(
                "{} peak reserved only {} were active; the free blocks could not serve the request",
                if explanation.reserved.at == "near_peak_reserved" { "near" } else { "at" },
                size(reserved.active_bytes)
            ));
        }
    } else if let Some(part) = known {
        out.push(format!(
            "peak active {}; total reserved memory is unknown: the recording shows a part of it, at most {}",
            size(active.active_bytes),
            size(part)
        ));
    } else {
        out.push(format!(
            "peak active {}; the recording has no segments, so reserved memory is unknown",
            size(active.active_bytes)
        ));
    }
    if explanation.num_retries > 0 {
        let times = |count: u64| if count == 1 { "once".to_owned() } else { format!("{count} times") };
        let (all, unclear) = (explanation.num_retries, explanation.num_unclear_retries);
        if all > unclear {
            let count = times(all - unclear);
            out.push(format!("memory was full: PyTorch released cached memory to serve a request {count}"));
        }
        if unclear > 0 {
            let count = times(unclear);
            out.push(format!(
                "PyTorch released cached memory right before a request {count}: memory was full, or the program called empty_cache"
            ));
        }
    }
    if explanation.cut.is_some() {
        let events = counted(explanation.events, "event");
        out.push(format!("the file is truncated; this analysis covers its first {events}"));
    }
    out.extend(explanation.unknown_events.clone());
    if explanation.blocks_before + explanation.segments_before > 0 && explanation.events > 0 {
        out.push(format!(
            "recording started late: {} and {} existed before it, or are inferred from the final snapshot",
            counted(explanation.blocks_before, "block"),
            counted(explanation.segments_before, "segment")
        ));
    }
    out
}

fn holders(explanation: &Explanation, who: &Holders, args: &ExplainArgs, first: bool, page: &mut Page) {
    let top = usize::from(args.top);
    let moment = &who.moment;
    let title = match who.at {
        "peak_active" => "Active memory at its peak",
        "out_of_memory" => "Active memory when memory ran out",
        "near_peak_reserved" => "Active memory within 0.5 % of peak reserved",
        _ => "Active memory at peak reserved",
    };
    let active = size(moment.active_bytes);
    page.title(match explanation.events {
        0 => format!("Active memory when the snapshot was taken: {active}"),
        _ => format!("{title}: {active} ({})", when(moment)),
    });
    if !explanation.frames {
        let columns =
            [Column::right("bytes"), Column::right("share"), Column::right("blocks"), Column::left("block size")];
        let rows = who.sizes.iter().take(top).map(|row| {
            let share = percent(row.bytes, moment.active_bytes);
            [size(row.bytes), share, row.blocks.to_string(), size(row.requested_bytes)]
        });
        table(page, columns, rows);
        if first {
            optimizer_state(who, page);
            page.note(no_frames(explanation.of_pytorch));
        }
        return;
    }
    // The second list is short; the breakdown below shows the difference.
    let top = if first { top } else { top.min(3) };
    let columns = [Column::right("bytes"), Column::right("share"), Column::right("blocks"), Column::text("line")];
    let rows = who.lines.iter().take(top).map(|row| {
        let line = place(&with_code(&row.line, row.code), row.inside.as_deref(), row.nearby);
        [size(row.bytes), percent(row.bytes, moment.active_bytes), row.blocks.to_string(), line]
    });
    table(page, columns, rows);
    let rest = &who.lines[who.lines.len().min(top)..];
    if !rest.is_empty() {
        let bytes: u64 = rest.iter().map(|row| row.bytes).sum();
        page.note(match rest.len() {
            1 => format!("1 more line holds {}", size(bytes)),
            count => format!("{count} more lines hold {}", size(bytes)),
        });
    }
    if !first {
        return;
    }
    if who.lines.iter().any(|row| row.nearby) {
        page.note(
            "~: blocks without frames, such as those of the backward pass on a thread without Python; the line shown ran last",
        );
    }
    if who.tree.children.iter().any(|child| child.name == BACKWARD) {
        page.note(
            "names such as AddmmBackward0 are autograd nodes, run by the backward pass; with \
             torch.autograd.set_detect_anomaly(True) PyTorch 2.11 also records their forward lines",
        );
    }
    purposes(who, page);
    for (name, list) in [("category", &who.categories), ("note", &who.notes)] {
        if !list.is_empty() {
            let rows = list.iter().take(top).map(|row| format!("{} {}", row.name, size(row.bytes)));
            page.note(format!("by {name}: {}", rows.collect::<Vec<String>>().join(", ")));
        }
    }
    // A tree without inner calls repeats the table.
    let has_calls = who.tree.children.iter().any(|child| !child.children.is_empty() && is_large(child, who.tree.bytes));
    if has_calls && (who.tree.children.iter().any(|child| child.children.len() > 1) || who.tree.children.len() > 1) {
        page.gap();
        page.line("By call, outermost first:");
        let mut left = TREE;
        tree(&who.tree, who.tree.bytes, 0, &mut left, page);
    }
}

/// The optimizer state inferred from annotations, in recordings without frames.
fn optimizer_state(who: &Holders, page: &mut Page) {
    if let Some(row) = who.purposes.iter().find(|row| row.purpose == Purpose::OptimizerState) {
        let share = percent(row.bytes, who.moment.active_bytes);
        page.note(format!(
            "{} ({share}) in {} are optimizer state: requested in Optimizer.step and live after it",
            size(row.bytes),
            counted(row.blocks, "block")
        ));
    }
}

/// Memory by purpose, where frames show it.
fn purposes(who: &Holders, page: &mut Page) {
    if who.purposes.is_empty() {
        return;
    }
    page.gap();
    page.line("By purpose:");
    let columns = [
        Column::right("bytes"),
        Column::right("share"),
        Column::right("blocks"),
        Column::left("purpose"),
        Column::text("evidence").priority(1),
    ];
    let rows = who.purposes.iter().map(|row| {
        let (purpose, evidence) = row.purpose.words();
        let share = percent(row.bytes, who.moment.active_bytes);
        [size(row.bytes), share, row.blocks.to_string(), purpose.to_owned(), evidence.to_owned()]
    });
    table(page, columns, rows);
    if who.purposes.iter().all(|row| row.purpose != Purpose::Workspace) {
        page.note(
            "only C++ frames (stacks=\"all\") show the workspaces of cuBLAS and cuDNN; without them they count as memory of the pass \
             that allocated them",
        );
    }
}

/// Whether a branch has a line.
fn is_large(node: &Node, total: u64) -> bool {
    // CAST: shares for display.
    node.bytes as f64 >= LEAST * total as f64
}

/// The branches with the largest shares. A chain of calls with the same bytes is one line.
fn tree(node: &Node, total: u64, depth: usize, left: &mut usize, page: &mut Page) {
    for mut child in &node.children {
        if *left == 0 || !is_large(child, total) {
            return;
        }
        *left -= 1;
        let mut names = vec![with_code(&child.name, child.code)];
        while let [only] = &child.children[..]
            && only.bytes == child.bytes
        {
            names.push(with_code(&only.name, only.code));
            child = only;
        }
        // The inner calls of a long chain are the informative ones.
        let name = match names.len() {
            0..=3 => names.join(" > "),
            count => format!("{} > … > {}", names[0], names[count - 2..].join(" > ")),
        };
        let indent = "  ".repeat(depth.min(10));
        page.labelled(&format!("{:>10}  ", size(child.bytes)), 12, &format!("{indent}{name}"));
        tree(child, total, depth + 1, left, page);
    }
}

fn growth(explanation: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let Some(grew) = &explanation.grew else { return };
    let (from, to) = (&grew.from, &grew.to);
    let more = |after: u64, before: u64| match after >= before {
        true => format!("+{}", size(after - before)),
        false => format!("-{}", size(before - after)),
    };
    let between = match &grew.named[..] {
        [a, b] => format!("between {a} and {b}"),
        _ => format!(
            "between two repetitions of the program's work (events {} and {})",
            grouped(from.event),
            grouped(to.event)
        ),
    };
    page.title(format!("Growth {between}: {}", more(to.requested_bytes, from.requested_bytes)));
    let columns = [Column::right("growth"), Column::right("after"), Column::right("blocks"), Column::text("line")];
    let rows = grew.lines.iter().take(usize::from(args.top)).map(|row| {
        let blocks = format!("{} -> {}", row.before_blocks, row.after_blocks);
        let line = place(&row.line, row.inside.as_deref(), row.nearby);
        [more(row.after_bytes, row.before_bytes), size(row.after_bytes), blocks, line]
    });
    table(page, columns, rows);
}

/// The next command.
pub(super) fn end(explanation: &Explanation, page: &mut Page) {
    page.gap();
    if explanation.events == 0 {
        // Other commands need events.
        let [before, after] = RECORD;
        page.line(format!("Next: call {before} before the work, and {after} after it"));
        return;
    }
    page.next(&command("vramlab", &format!("advise {}{}", quoted(&explanation.trace), explanation.gpus.argument())));
}
