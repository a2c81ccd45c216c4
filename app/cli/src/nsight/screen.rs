//! The screen of `vramlab nsight`: one sentence, one table, the next command.

use crate::nsight::NsightArgs;
use crate::nsight::sites::SiteRow;
use crate::nsight::summary::{CallRow, Summary};
use std::collections::BTreeMap;
use terminal::{Column, Page, Table, command, duration, quoted};
use vramlab_nsight::python;

/// A share of all waits that names the work behind them.
const MOST: f64 = 0.5;
/// Letters of a kernel's name in a sentence and in a table; names of libraries' kernels have a hundred and more. `--json` and the page have
/// the whole names.
const IN_SENTENCE: usize = 60;
const IN_TABLE: usize = 36;

/// The page.
pub(crate) fn report(summary: &Summary, args: &NsightArgs) -> Page {
    let mut page = Page::stdout();
    page.line(sentence(summary));
    page.gap();
    if !summary.tables.calls.is_empty() {
        page.table(&calls(summary, args.top));
    }
    if args.tables {
        tables(&mut page, summary, args.top);
    }
    if !summary.notes.is_empty() {
        page.gap();
        summary.notes.iter().for_each(|note| page.line(format!("Note: {note}")));
    }
    page.gap();
    let file = quoted(&args.file.display().to_string());
    let more = if args.tables { "--json" } else { "--tables" };
    page.next(&command("vramlab", &format!("nsight {file} {more}")));
    page
}

/// The call that waited longest, behind which work, and the share of memory calls.
pub(crate) fn sentence(summary: &Summary) -> String {
    let memory = &summary.memory;
    let span = time(summary.span_ns);
    // Threads and processes call at the same time.
    let within = match summary.processes {
        1 if memory.total_ns <= summary.span_ns => format!("take {} of {span}", time(memory.total_ns)),
        1 => format!("of several threads take {} within {span}", time(memory.total_ns)),
        processes => format!("of {processes} processes take {} within {span}", time(memory.total_ns)),
    };
    let total = format!(
        "{} memory calls {within}: {} waiting for the device, {} of their own.",
        memory.calls,
        time(memory.blocked_ns),
        time((memory.total_ns - memory.blocked_ns).max(0)),
    );
    let total = if memory.calls == 0 { format!("The capture of {span} has no memory calls.") } else { total };
    if summary.tables.calls.is_empty() {
        return "The capture has no CUDA calls.".to_owned();
    }
    let Some(call) = summary.tables.calls.first().filter(|call| call.blocked_ns > 0) else {
        return format!("No call waited for the device. {total}");
    };
    let top = summary.tables.waited_for.iter().filter(|row| row.call == call.call).max_by_key(|row| row.blocked_ns);
    let behind = top.map_or(String::new(), |row| {
        let share = ratio(row.blocked_ns, call.blocked_ns);
        let share = if share >= 0.995 { String::new() } else { format!("{:.0} % of it ", 100.0 * share) };
        format!(", {share}behind {}", short(&row.waited_for, IN_SENTENCE))
    });
    let at = site(summary, call)
        .map_or(String::new(), |(site, _)| format!(", most of them at {}", short(site, IN_SENTENCE)));
    format!(
        "{} waited {} in {} of {} calls{at}{behind}. {total}",
        call.call,
        time(call.blocked_ns),
        call.waited,
        call.count
    )
}

/// A row of the table of calls, as it is shown.
pub(crate) struct Row {
    pub(crate) call: String,
    pub(crate) calls: String,
    pub(crate) time: String,
    pub(crate) waiting: String,
    pub(crate) waited: String,
    pub(crate) idle_cost: String,
    pub(crate) behind: String,
    /// The line of the program.
    pub(crate) at: String,
}

/// The line of the program that lost most of a call's time, and its share of the time that lines are known of.
fn site<'s>(summary: &'s Summary, call: &CallRow) -> Option<(&'s str, f64)> {
    // They are in the order of their waits.
    let mut own = summary.tables.sites.iter().filter(|row| row.call == call.call).peekable();
    let first = *own.peek()?;
    let weight = |row: &SiteRow| if first.blocked_ns > 0 { row.blocked_ns } else { row.total_ns };
    let whole = own.map(weight).sum();
    Some((&first.site, ratio(weight(first), whole)))
}

/// The rows of the table of calls, most time lost first. Names have at most `letters`.
pub(crate) fn rows(summary: &Summary, top: usize, letters: usize) -> Vec<Row> {
    let mut behind: BTreeMap<&str, (&str, i64)> = BTreeMap::new();
    for row in &summary.tables.waited_for {
        let best = behind.entry(&row.call).or_insert((&row.waited_for, row.blocked_ns));
        if row.blocked_ns > best.1 {
            *best = (&row.waited_for, row.blocked_ns);
        }
    }
    let row = |row: &CallRow| {
        let work = behind.get(row.call.as_str()).filter(|_| row.blocked_ns > 0).map(|(work, blocked)| {
            let share = ratio(*blocked, row.blocked_ns);
            let work = short(work, letters);
            if share >= MOST { format!("{work} ({:.0} %)", 100.0 * share) } else { "several".to_owned() }
        });
        Row {
            call: row.call.clone(),
            calls: row.count.to_string(),
            time: time(row.total_ns),
            waiting: if row.blocked_ns > 0 { time(row.blocked_ns) } else { String::new() },
            waited: if row.waited > 0 { row.waited.to_string() } else { String::new() },
            idle_cost: row.idle_cost_ns.map(time).unwrap_or_default(),
            behind: work.unwrap_or_default(),
            at: site(summary, row).map_or(String::new(), |(site, share)| match (short(site, letters), share) {
                (site, share) if share >= 0.995 => site,
                (site, share) => format!("{site} ({:.0} %)", 100.0 * share),
            }),
        }
    };
    summary.tables.calls.iter().take(top).map(row).collect()
}

fn calls(summary: &Summary, top: usize) -> Table {
    let has_sites = !summary.tables.sites.is_empty();
    let columns = [
        Column::left("call"),
        Column::right("calls"),
        Column::right("time"),
        Column::right("waiting"),
        Column::right("waited"),
        // The program's line is worth more than what it would cost elsewhere.
        Column::right("idle cost").priority(if has_sites { 3 } else { 1 }),
        Column::text("mostly behind").priority(2),
    ];
    let mut table = Table::new(columns.into_iter().chain(has_sites.then(|| Column::text("mostly at").priority(1))));
    for row in rows(summary, top, IN_TABLE) {
        let cells = [row.call, row.calls, row.time, row.waiting, row.waited, row.idle_cost, row.behind];
        table.row(cells.into_iter().chain(has_sites.then_some(row.at)));
    }
    table
}

fn tables(page: &mut Page, summary: &Summary, top: usize) {
    let tables = &summary.tables;
    if !tables.blocked_calls.is_empty() {
        page.title("Longest waits");
        let mut rows: Vec<_> = tables.blocked_calls.iter().collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.blocked_ns));
        let columns = [Column::right("waiting"), Column::left("call"), Column::right("bytes").priority(1)];
        let mut table = Table::new(columns.into_iter().chain([Column::text("behind"), Column::text("in").priority(2)]));
        for row in rows.into_iter().take(top) {
            let bytes = row.bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
            let behind = short(&row.waited_for, IN_SENTENCE);
            table.row([time(row.blocked_ns), row.call.clone(), bytes, behind, row.path.clone()]);
        }
        page.table(&table);
        page.title("Waits by place");
        let mut table = Table::new([
            Column::right("waiting"),
            Column::right("calls"),
            Column::right("a step").priority(1),
            Column::text("place"),
        ]);
        for row in tables.blocked_by_range.iter().take(top) {
            let step = row.blocked_ns_per_step.map(time).unwrap_or_default();
            table.row([time(row.blocked_ns), row.count.to_string(), step, row.place.clone()]);
        }
        page.table(&table);
    }
    if !tables.stacks.is_empty() {
        page.title("Call stacks, innermost frame first");
        let columns = [Column::right("waiting"), Column::right("time").priority(2), Column::right("calls").priority(1)];
        let mut table = Table::new(columns.into_iter().chain([Column::left("call"), Column::text("stack")]));
        for row in tables.stacks.iter().take(top) {
            let stack = frames(&row.frames).join(" < ");
            table.row([time(row.blocked_ns), time(row.total_ns), row.count.to_string(), row.call.clone(), stack]);
        }
        page.table(&table);
    }
    if !tables.gpu_idle.is_empty() {
        let idle: i64 = tables.gpu_idle.iter().map(|row| row.total_ns).sum();
        page.title(format!(
            "The GPU was busy {} and idle {} between its work, because of",
            time(summary.busy_ns),
            time(idle)
        ));
        let columns = [Column::right("time"), Column::right("gaps"), Column::right("longest"), Column::text("cause")];
        let mut table = Table::new(columns);
        for row in tables.gpu_idle.iter().take(top) {
            table.row([time(row.total_ns), row.gaps.to_string(), time(row.longest_ns), row.cause.clone()]);
        }
        page.table(&table);
    }
    if !tables.launch_gaps.is_empty() {
        page.title("Kernels and copies");
        let mut table = Table::new([
            Column::text("work"),
            Column::right("count"),
            Column::right("time"),
            Column::right("median"),
            Column::right("gap before").priority(1),
            Column::right("after launch").priority(2),
        ]);
        for row in tables.launch_gaps.iter().take(top) {
            table.row([
                short(&row.work, IN_SENTENCE),
                row.count.to_string(),
                time(row.total_ns),
                time(row.median_ns),
                row.median_gap_ns.map(time).unwrap_or_default(),
                row.median_latency_ns.map(time).unwrap_or_default(),
            ]);
        }
        page.table(&table);
    }
}

/// The innermost frames of a stack: those of Python where it has any, because a Python program's author knows no others.
pub(crate) fn frames(stack: &[String]) -> Vec<&str> {
    const SHOWN: usize = 4;
    let python = |frame: &&String| python::is_python(frame);
    let frames: Vec<&str> = stack.iter().filter(python).take(SHOWN).map(String::as_str).collect();
    if frames.is_empty() { stack.iter().take(SHOWN).map(String::as_str).collect() } else { frames }
}

/// A name without its middle, if it is longer: kernels of one kind begin alike, and end with what tells them apart.
fn short(name: &str, letters: usize) -> String {
    let count = name.chars().count();
    if count <= letters {
        return name.to_owned();
    }
    let end = letters / 3;
    let start: String = name.chars().take(letters - end - 1).collect();
    format!("{start}…{}", name.chars().skip(count - end).collect::<String>())
}

fn time(ns: i64) -> String {
    let text = duration(ns.unsigned_abs());
    if ns < 0 { format!("-{text}") } else { text }
}

/// A share of a whole; 0 of nothing.
fn ratio(part: i64, whole: i64) -> f64 {
    // CAST: nanoseconds of a capture, below 2^53.
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
