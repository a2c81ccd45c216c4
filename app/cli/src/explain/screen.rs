//! What the screen shows: the answer first, then who, where, when and what repeats; the top of each.

mod where_when;

use super::ExplainArgs;
use super::causes::Cause;
use super::explanation::{Explanation, Moment, Node, Who};
use super::lines::BACKWARD;
use super::purposes::Purpose;
use crate::words::{RECORD, counted, percent, size};
use serde::Serialize;
use terminal::{Column, Page, Table, command, duration, quoted};

/// Lines of a tree, its depth, and the least share of the whole that a line has.
const TREE: usize = 12;
const LEAST: f64 = 0.03;

/// Adds a table.
fn table<const N: usize>(page: &mut Page, columns: [Column; N], rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new(columns);
    rows.for_each(|row| table.row(row));
    page.table(&table);
}

/// When a moment was, for the end of a sentence.
pub(crate) fn when(moment: &Moment) -> String {
    let mut out = match moment.event {
        0 => "before the first event".to_owned(),
        event => format!("event {event}"),
    };
    if let Some(time) = moment.time_ns {
        out += &format!(", {} in", duration(time));
    }
    if let Some(annotation) = &moment.annotation {
        out += &format!(", in {annotation}");
    }
    if let Some(line) = &moment.line {
        out += &format!(", at {line}");
    }
    out
}

/// A line with the place in a library that it went through.
pub(crate) fn place(line: &str, inside: Option<&str>, nearby: bool) -> String {
    let line = if nearby { format!("~ {line}") } else { line.to_owned() };
    inside.map_or(line.clone(), |inside| format!("{line} > {inside}"))
}

/// All of it.
pub(super) fn report(found: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let headline = headline(found);
    for (number, sentence) in headline.iter().enumerate() {
        match number {
            0 => page.line(format!("{}: {sentence}", found.gpus.named(&found.trace))),
            _ => page.note(sentence),
        };
    }
    found.gpus.lines().iter().for_each(|line| page.note(line));
    let first = found.who.first().map_or(0, |who| who.moment.active_bytes);
    for (number, who) in found.who.iter().enumerate() {
        // What is all but the same is not said twice; --json has both.
        let active = who.moment.active_bytes;
        if number == 0 || active > 0 && active < first - first / 50 {
            self::who(found, who, args, number == 0, page);
        }
    }
    grew(found, args, page);
    where_when::where_it_went(found, args, page);
    where_when::when(found, args, page);
    where_when::shapes(found, args, page);
}

/// What the page of `report` takes over from the screen.
#[derive(Debug, Serialize)]
pub(super) struct Sentences {
    headline: Vec<String>,
    /// What memory is stranded, what waits for other streams, and what lies beside PyTorch's.
    streams: Vec<String>,
    /// One for each of `retries`.
    retries: Vec<String>,
    /// Words for each cause.
    causes: Vec<(Cause, &'static str)>,
}

/// The sentences for a page.
pub(super) fn sentences(found: &Explanation) -> Sentences {
    let mut streams: Vec<String> = found.reserved.stranded.iter().map(where_when::stranded).collect();
    streams.extend(where_when::pending(found));
    streams.extend(where_when::beside(found));
    streams.extend(where_when::pinning(found));
    Sentences {
        headline: headline(found),
        streams,
        retries: found.retries.iter().map(where_when::retried).collect(),
        causes: Cause::ALL.into_iter().map(|cause| (cause, cause.words())).collect(),
    }
}

/// What happened, in a few sentences; the first is the answer.
fn headline(found: &Explanation) -> Vec<String> {
    let (active, reserved) = (&found.peak_active, &found.peak_reserved);
    let mut out = Vec::new();
    if let Some(last) = found.out_of_memory.last() {
        out.push(format!(
            "out of memory at {}: {} asked for on stream {:#x}",
            when(&last.moment),
            size(last.asked_bytes),
            last.stream
        ));
        out.push(where_when::refusal(found, last));
    } else if found.events == 0 {
        let (used, whole) = (active.active_bytes, reserved.reserved_bytes);
        let (share, blocks) = (percent(used, whole), counted(found.blocks_before, "block"));
        out.push(format!(
            "{} reserved in {} and {} in use in {blocks} ({share}) when the snapshot was taken",
            size(whole),
            counted(found.segments_before, "segment"),
            size(used)
        ));
        out.push("no events were recorded, so what was held before that is not known".to_owned());
    } else if reserved.reserved_bytes == 0 {
        out.push(format!("at most {} in use; it does not show what was reserved", size(active.active_bytes)));
    } else if active.active_bytes > active.reserved_bytes {
        out.push(format!(
            "at most {} in use; of the segments in which they lay the recording shows {}, so what was reserved is not known",
            size(active.active_bytes),
            size(active.reserved_bytes)
        ));
    } else {
        out.push(format!(
            "at most {} reserved and at most {} in use ({})",
            size(reserved.reserved_bytes),
            size(active.active_bytes),
            percent(active.active_bytes, reserved.reserved_bytes)
        ));
        let reserved = &found.reserved.moment;
        // The largest hole may be what is left of the segment that was taken then.
        let free = reserved.reserved_bytes.saturating_sub(reserved.active_bytes + reserved.largest_hole_bytes);
        let little = active.active_bytes / 20;
        // Before the first event nothing was asked for.
        if reserved.event > 0 && reserved.active_bytes < active.active_bytes - little && free > little {
            out.push(format!(
                "when reserved {} only {} were in use: what was free then did not serve what was asked for",
                if found.reserved.at == "near_peak_reserved" { "came near its peak" } else { "reached its peak" },
                size(reserved.active_bytes)
            ));
        }
    }
    if found.cut.is_some() {
        out.push(format!("the file was cut short: this is about its first {}", counted(found.events, "event")));
    }
    if found.blocks_before + found.segments_before > 0 && found.events > 0 {
        out.push(format!(
            "the recording began late: {} and {} were there before its first event, or are told from its end",
            counted(found.blocks_before, "block"),
            counted(found.segments_before, "segment")
        ));
    }
    out
}

fn who(found: &Explanation, who: &Who, args: &ExplainArgs, first: bool, page: &mut Page) {
    let top = usize::from(args.top);
    let moment = &who.moment;
    let what = match who.at {
        "peak_active" => "Who held memory at the peak of use",
        "out_of_memory" => "Who held memory when it ran out",
        "near_peak_reserved" => "Who held memory when reserved came within 0.5 % of its peak",
        _ => "Who held memory at the peak of reserved",
    };
    let active = size(moment.active_bytes);
    page.title(match found.events {
        0 => format!("Who held memory when the snapshot was taken: {active}"),
        _ => format!("{what}: {active} ({})", when(moment)),
    });
    if !found.frames {
        let columns =
            [Column::right("bytes"), Column::right("share"), Column::right("blocks"), Column::left("of size")];
        let rows = who.sizes.iter().take(top).map(|row| {
            let share = percent(row.bytes, moment.active_bytes);
            [size(row.bytes), share, row.blocks.to_string(), size(row.requested_bytes)]
        });
        table(page, columns, rows);
        if first {
            state_of_optimizer(who, page);
            page.note(
                "no stack frames were recorded, so lines are not known; record with \
                 torch.cuda.memory._record_memory_history(context=\"alloc\", stacks=\"python\")",
            );
        }
        return;
    }
    // The second list is short: what differs is where the memory went.
    let top = if first { top } else { top.min(3) };
    let columns = [Column::right("bytes"), Column::right("share"), Column::right("blocks"), Column::text("line")];
    let rows = who.lines.iter().take(top).map(|row| {
        let (share, line) =
            (percent(row.bytes, moment.active_bytes), place(&row.line, row.inside.as_deref(), row.nearby));
        [size(row.bytes), share, row.blocks.to_string(), line]
    });
    table(page, columns, rows);
    let rest = &who.lines[who.lines.len().min(top)..];
    if !rest.is_empty() {
        let bytes: u64 = rest.iter().map(|row| row.bytes).sum();
        page.note(match rest.len() {
            1 => format!("another line holds {}", size(bytes)),
            count => format!("{count} more lines hold {}", size(bytes)),
        });
    }
    if !first {
        return;
    }
    if who.lines.iter().any(|row| row.nearby) {
        page.note(
            "~: blocks without frames, as the backward pass makes them on a thread without Python; the line ran last",
        );
    }
    if who.tree.children.iter().any(|child| child.name == BACKWARD) {
        page.note(
            "…Backward0 and the like: nodes of autograd, run by the backward pass. With torch.autograd.set_detect_anomaly(True) PyTorch \
             2.11 records the line of the forward pass of each",
        );
    }
    purposes(who, page);
    for (name, list) in [("category", &who.categories), ("note", &who.notes)] {
        if !list.is_empty() {
            let rows = list.iter().take(top).map(|row| format!("{} {}", row.name, size(row.bytes)));
            page.note(format!("by {name}: {}", rows.collect::<Vec<String>>().join(", ")));
        }
    }
    if who.tree.children.iter().any(|child| child.children.len() > 1) || who.tree.children.len() > 1 {
        page.gap();
        page.line("By call, from the outside in:");
        let mut left = TREE;
        tree(&who.tree, who.tree.bytes, 0, &mut left, page);
    }
}

/// What annotations tell of what the memory is for, where there are no frames.
fn state_of_optimizer(who: &Who, page: &mut Page) {
    if let Some(row) = who.purposes.iter().find(|row| row.purpose == Purpose::OptimizerState) {
        let share = percent(row.bytes, who.moment.active_bytes);
        page.note(format!(
            "{} ({share}) in {} are the optimizer's state: asked for within Optimizer.step, and held after it",
            size(row.bytes),
            counted(row.blocks, "block")
        ));
    }
}

/// What the memory is for, where frames tell it.
fn purposes(who: &Who, page: &mut Page) {
    if who.purposes.is_empty() {
        return;
    }
    page.gap();
    page.line("What it is for:");
    let columns = [
        Column::right("bytes"),
        Column::right("share"),
        Column::right("blocks"),
        Column::left("for"),
        Column::text("told by").priority(1),
    ];
    let rows = who.purposes.iter().map(|row| {
        let (what, told) = row.purpose.words();
        let share = percent(row.bytes, who.moment.active_bytes);
        [size(row.bytes), share, row.blocks.to_string(), what.to_owned(), told.to_owned()]
    });
    table(page, columns, rows);
    if who.purposes.iter().all(|row| row.purpose != Purpose::Workspace) {
        page.note(
            "workspaces of cuBLAS and cuDNN are told by C++ frames only (stacks=\"all\"); without these they count as the pass that \
             made them",
        );
    }
}

/// The branches that hold a good part.
fn tree(node: &Node, whole: u64, depth: usize, left: &mut usize, page: &mut Page) {
    for child in &node.children {
        // CAST: shares for display.
        if *left == 0 || (child.bytes as f64) < LEAST * whole as f64 {
            return;
        }
        *left -= 1;
        let indent = "  ".repeat(depth.min(10));
        page.labelled(&format!("{:>10}  ", size(child.bytes)), 12, &format!("{indent}{}", child.name));
        tree(child, whole, depth + 1, left, page);
    }
}

fn grew(found: &Explanation, args: &ExplainArgs, page: &mut Page) {
    let Some(grew) = &found.grew else { return };
    let (from, to) = (&grew.from, &grew.to);
    let more = |after: u64, before: u64| match after >= before {
        true => format!("+{}", size(after - before)),
        false => format!("-{}", size(before - after)),
    };
    let between = match &grew.named[..] {
        [a, b] => format!("between {a} and {b}"),
        _ => format!(
            "from the lowest point of the second quarter (event {}) to that of the last (event {})",
            from.event, to.event
        ),
    };
    page.title(format!("What grew {between}: {}", more(to.requested_bytes, from.requested_bytes)));
    let columns = [Column::right("more"), Column::right("now"), Column::right("blocks"), Column::text("line")];
    let rows = grew.lines.iter().take(usize::from(args.top)).map(|row| {
        let blocks = format!("{} -> {}", row.before_blocks, row.after_blocks);
        let line = place(&row.line, row.inside.as_deref(), row.nearby);
        [more(row.after_bytes, row.before_bytes), size(row.after_bytes), blocks, line]
    });
    table(page, columns, rows);
}

/// What follows from it.
pub(super) fn end(found: &Explanation, page: &mut Page) {
    page.gap();
    if found.events == 0 {
        // Without events no other command has anything to go by.
        let [before, after] = RECORD;
        page.line(format!("Next: call {before} before the work, and {after} after it"));
        return;
    }
    page.next(&command("vramlab", &format!("advise {}{}", quoted(&found.trace), found.gpus.argument())));
}
