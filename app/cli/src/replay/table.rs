//! Replays of one history side by side, beside what the program did that recorded it.

use super::{AddressChoice, ByPath, Moved, Row};
use crate::gpus::chosen;
use crate::words::{counted, size};
use terminal::arguments::heading;
use terminal::{Cell, Comparison, Page, command, duration, quoted};
use vramlab::backends::{TorchAllocator, of_torch};
use vramlab::histories::memory::Peaks;

impl ByPath {
    /// What one of the requests cost in driver calls, on average; `None` where calls take no time.
    fn each(&self) -> Option<String> {
        // CAST: counts, and nanoseconds for display.
        let (count, ns) = (self.count as f64, self.driver_s? * 1e9);
        Some(format!("{} in {:.0} calls", duration((ns / count).round() as u64), self.driver_calls as f64 / count))
    }
}

/// The metrics of a comparison whose first column is what was recorded, if the file tells that.
struct Columns<'a> {
    rows: &'a [Row],
    recorded: bool,
    table: Comparison,
}

impl Columns<'_> {
    /// A metric of which less is better; what failed is not ranked. `recorded` is the recording program's.
    fn ranked(&mut self, name: &str, recorded: Option<String>, cell: impl Fn(&Row) -> Option<(String, f64)>) {
        let dash = || "-".to_owned();
        let first = self.recorded.then(|| (recorded.unwrap_or_else(dash), None));
        let worth = |row: &Row| match cell(row) {
            Some((text, value)) => (text, (row.failed_allocations == 0).then_some(value)),
            None => (dash(), None),
        };
        self.table.ranked(name, first.into_iter().chain(self.rows.iter().map(worth)).collect::<Vec<_>>());
    }

    /// A metric that is not ranked.
    fn plain(&mut self, name: &str, recorded: Option<String>, cell: impl Fn(&Row) -> Option<String>) {
        let first = self.recorded.then(|| Cell::or_dash(recorded));
        self.table.metric(name, first.into_iter().chain(self.rows.iter().map(|row| Cell::or_dash(cell(row)))));
    }
}

/// The last request that the recorded allocator refused: it tells why a program ended.
fn refusal(row: &Row, page: &mut Page) {
    let Some(last) = row.out_of_memory.last() else { return };
    page.title(format!("{}: {}", row.trace, last.to_string().lines().next().unwrap_or_default()));
    for line in last.to_string().lines().skip(1) {
        page.note(line);
    }
    match row.refused_allocations {
        1 => {}
        2 => page.note("  one request was refused before it"),
        count => page.note(format!("  {} requests were refused before it", count - 1)),
    }
}

/// The table of one history's rows, with what should be known about it.
pub(super) fn report(rows: &[Row], recorded: Option<&Peaks>, page: &mut Page) {
    let Some(first) = rows.first() else { return };
    refusal(first, page);
    page.title(format!(
        "{} on {}: {} events, {} allocations, never more than {} live",
        first.trace,
        first.device_name,
        first.events,
        first.allocations,
        size(first.max_live_bytes)
    ));
    page.line(first.bounds.to_string());
    let names = recorded
        .map(|_| "recorded".to_owned())
        .into_iter()
        .chain(rows.iter().map(|row| heading(&row.alloc.to_string())));
    let table = Comparison::new("", names);
    let mut columns = Columns { rows, recorded: recorded.is_some(), table };
    // CAST: figures for ranking; counts and bytes far below 2^53.
    let calls = |row: &Row| row.driver_calls.values().sum::<u64>();
    let failed = |row: &Row| Some((row.failed_allocations.to_string(), row.failed_allocations as f64));
    columns.ranked("failed allocations", None, failed);
    columns.ranked("peak reserved", recorded.map(|told| size(told.reserved)), |row| {
        Some((size(row.peak_reserved_bytes), row.peak_reserved_bytes as f64))
    });
    let ratio = |bytes: u64| first.bounds.ratio(bytes);
    columns.plain("reserved / bound", recorded.and_then(|told| ratio(told.reserved)), |row| {
        ratio(row.peak_reserved_bytes)
    });
    columns.plain("peak active", None, |row| Some(size(row.peak_active_bytes)));
    columns
        .plain("peak requested", recorded.map(|told| size(told.requested)), |row| Some(size(row.peak_requested_bytes)));
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    columns.ranked("utilisation", None, |row| row.utilisation.map(|share| (percent(share), -share)));
    type Part = fn(&Row) -> u64;
    let parts: [(&str, Part); 6] = [
        ("requested", |row| row.ledger.requested),
        ("internal", |row| row.ledger.internal),
        ("soft", |row| row.ledger.soft),
        ("hard", |row| row.ledger.hard),
        ("stream", |row| row.ledger.stream),
        ("pending", |row| row.ledger.pending),
    ];
    for (name, part) in parts {
        columns.plain(&format!("{name} at peak reserved"), None, |row| Some(size(part(row))));
    }
    let segments = |(made, freed): (u64, u64)| format!("{made}/{freed}");
    columns.plain(
        "segments +/-",
        recorded.map(|told| told.segments).filter(|segments| *segments != (0, 0)).map(segments),
        |row| row.segment_allocs.zip(row.segment_frees).map(segments),
    );
    columns.plain("retries", None, |row| Some(row.num_alloc_retries.to_string()));
    if rows.iter().any(|row| row.steals.is_some()) {
        let pages = |moved: &Moved| format!("{} ({})", moved.num_stolen_pages, size(moved.num_stolen_bytes));
        columns.plain("steals", None, |row| row.steals.map(|moved| moved.num_steals.to_string()));
        columns.plain("pages stolen", None, |row| row.steals.as_ref().map(pages));
    }
    // What it costs that no free block fits, beside one another.
    for (path, what) in [("driver_alloc", "grows"), ("steal", "steals pages"), ("retry", "tries again")] {
        let cost = |row: &Row| row.requests.get(path).and_then(ByPath::each);
        if rows.iter().any(|row| row.steals.is_some() || row.num_alloc_retries > 0)
            && rows.iter().any(|row| cost(row).is_some())
        {
            columns.plain(&format!("a request that {what}"), None, cost);
        }
    }
    if rows.iter().any(|row| row.unplanned_allocations.is_some()) {
        columns.plain("not as planned", None, |row| row.unplanned_allocations.map(|count| count.to_string()));
    }
    columns.ranked("driver calls", None, |row| Some((calls(row).to_string(), calls(row) as f64)));
    if rows.iter().any(|row| row.simulated_s.is_some()) {
        // CAST: seconds back to nanoseconds, for display.
        let shown = |seconds: f64| (duration((seconds * 1e9).round() as u64), seconds);
        columns.ranked("simulated time", None, |row| row.simulated_s.map(shown));
    }
    columns.ranked("host ns/operation", None, |row| row.host_ns_per_op.map(|ns| (format!("{ns:.0}"), ns)));
    if !matches!(first.addresses, AddressChoice::Own | AddressChoice::Near) {
        columns.plain("blocks elsewhere", None, |row| row.address_mismatches.map(|count| count.to_string()));
        columns.plain("other segments", None, |row| row.segment_mismatches.map(|count| count.to_string()));
    }
    page.comparison(&columns.table);
    page.note("utilisation: peak active of peak reserved");
    if recorded.is_some() {
        page.note(
            "recorded: what the program did, as far as its history tells; peak requested: bytes asked for in active blocks",
        );
    }
    if let Some(note) = beginning(first) {
        page.note(note);
    }
    for note in pools(rows) {
        page.note(note);
    }
    for (row, failure) in rows.iter().filter_map(|row| row.first_failure.as_ref().map(|failure| (row, failure))) {
        page.note(format!("{}: allocation {} failed first: {}", row.alloc, failure.allocation, failure.error));
    }
}

/// What is said of a history that began late.
fn beginning(row: &Row) -> Option<String> {
    let (blocks, segments) = (row.prologue_allocations, row.prologue_segments);
    if segments == 0 {
        let why = row.prologue_problem.as_ref().map_or(String::new(), |why| format!(": {why}"));
        let note = format!("{blocks} blocks were live before the first event; they are allocated first{why}");
        return (blocks > 0).then_some(note);
    }
    let reserved = size(row.prologue_reserved_bytes);
    let mut note = format!(
        "{blocks} blocks in {segments} segments ({reserved}) were there before the first event, by what was held at the end"
    );
    if row.undetermined_blocks > 0 {
        note += &format!("; {} of them may be larger, each by up to 1 MiB", row.undetermined_blocks);
    }
    Some(note)
}

/// What is said of a history with private pools.
fn pools(rows: &[Row]) -> Vec<String> {
    let Some(first) = rows.first() else { return Vec::new() };
    let (pools, undetermined) = (first.private_pools, first.undetermined_pool_allocations);
    let mut notes = Vec::new();
    if pools > 0 || undetermined > 0 {
        let mut note = format!(
            "{} (CUDA graphs, MemPool), told from the segments that blocks lay in: {} of {} blocks",
            counted(pools, "private pool"),
            first.private_pool_allocations,
            first.allocations
        );
        if undetermined > 0 {
            note += &format!("; the pool of {undetermined} blocks cannot be told, and the likeliest is taken");
        }
        notes.push(note);
    }
    let without: Vec<String> =
        rows.iter().filter(|row| pools > 0 && !row.private_pools_kept).map(|row| row.alloc.to_string()).collect();
    if !without.is_empty() {
        notes.push(format!("served from one pool, without private ones: {}", without.join(", ")));
    }
    notes
}

/// Which allocator needed the least memory and which the fewest calls for the last history, and how to find out how little would do.
pub(super) fn end(rows: &[Row], recorded: Option<&Peaks>, gpu: Option<u16>, page: &mut Page) {
    let Some(first) = rows.first() else { return };
    let next = command("vramlab", &format!("capacity {}{}", quoted(&first.trace), chosen(gpu)));
    let whole = || rows.iter().filter(|row| row.failed_allocations == 0);
    let Some(least) = whole().min_by_key(|row| row.peak_reserved_bytes) else {
        page.end("No allocator gets through the history in this memory.", &next);
        return;
    };
    let mut found = format!("{} reserves {} at its peak", least.alloc, size(least.peak_reserved_bytes));
    if rows.len() > 1 {
        found += ", the least";
    }
    // Of the policy that it was recorded under.
    let ours = |told: &Peaks| match told.expandable {
        true => whole().find(|row| row.alloc.backend() == of_torch(TorchAllocator::Expandable)),
        false => whole().find(|row| row.alloc.capabilities().follows_pytorch),
    };
    if let Some((told, ours)) = recorded.and_then(|told| Some((told, ours(told)?))) {
        let (name, ours, theirs) = (&ours.alloc, ours.peak_reserved_bytes, told.reserved);
        found += &match ours == theirs {
            true => format!("; {} were reserved when it was recorded, and so they are by {name} here", size(theirs)),
            false => {
                format!("; {} were reserved when it was recorded, {name} here reserves {}", size(theirs), size(ours))
            }
        };
    }
    let calls = |row: &Row| row.driver_calls.values().sum::<u64>();
    if let (Some(fewest), Some(most)) = (whole().min_by_key(|row| calls(row)), whole().max_by_key(|row| calls(row)))
        && calls(fewest) < calls(most)
    {
        found += &format!(
            "; {} makes {}, {} {}",
            fewest.alloc,
            counted(calls(fewest), "driver call"),
            most.alloc,
            calls(most)
        );
    }
    page.end(format!("{found}."), &next);
}
