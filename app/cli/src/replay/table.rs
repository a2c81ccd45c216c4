//! Replays of one recording side by side, next to the recorded values.

use super::{AddressChoice, ByPath, Moved, Row};
use crate::gpus::chosen;
use crate::words::{counted, size};
use terminal::arguments::heading;
use terminal::{Cell, Comparison, Page, command, duration, quoted};
use vramlab::backends::{TorchAllocator, of_torch};
use vramlab::histories::memory::Peaks;

impl ByPath {
    /// Mean cost of such a request in driver calls; `None` where calls take no time.
    fn mean(&self) -> Option<String> {
        // CAST: counts, and nanoseconds for display.
        let (count, ns) = (self.count as f64, self.driver_s? * 1e9);
        Some(format!("{} in {:.0} calls", duration((ns / count).round() as u64), self.driver_calls as f64 / count))
    }
}

/// Metrics of a comparison. The first column has the recorded values, if the file contains them.
struct Columns<'a> {
    rows: &'a [Row],
    recorded: bool,
    table: Comparison,
}

impl Columns<'_> {
    /// Adds a metric where less is better; failed replays are not ranked. `recorded` is the recorded value.
    fn ranked(&mut self, name: &str, recorded: Option<String>, cell: impl Fn(&Row) -> Option<(String, f64)>) {
        let dash = || "-".to_owned();
        let first = self.recorded.then(|| (recorded.unwrap_or_else(dash), None));
        let worth = |row: &Row| match cell(row) {
            Some((text, value)) => (text, (row.failed_allocations == 0).then_some(value)),
            None => (dash(), None),
        };
        self.table.ranked(name, first.into_iter().chain(self.rows.iter().map(worth)).collect::<Vec<_>>());
    }

    /// Adds a metric that is not ranked.
    fn plain(&mut self, name: &str, recorded: Option<String>, cell: impl Fn(&Row) -> Option<String>) {
        let first = self.recorded.then(|| Cell::or_dash(recorded));
        self.table.metric(name, first.into_iter().chain(self.rows.iter().map(|row| Cell::or_dash(cell(row)))));
    }
}

/// Adds the last failed request of the recording, which shows why the program ended.
fn refusal(row: &Row, page: &mut Page) {
    if let Some(impossible) = row.impossible {
        page.line(format!("{}: {impossible}", row.trace));
    }
    let Some(last) = row.out_of_memory.last() else { return };
    page.title(format!("{}: {}", row.trace, last.to_string().lines().next().unwrap_or_default()));
    for line in last.to_string().lines().skip(1) {
        page.note(line);
    }
    match row.refused_allocations {
        1 => {}
        2 => page.note("  earlier refused requests: 1"),
        count => page.note(format!("  earlier refused requests: {}", count - 1)),
    }
}

/// Adds the table of one recording's rows, with notes.
pub(super) fn report(rows: &[Row], recorded: Option<&Peaks>, page: &mut Page) {
    let Some(first) = rows.first() else { return };
    refusal(first, page);
    page.title(format!(
        "{} on {}: {} events, {} allocations, peak live {}",
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
    // CAST: values for ranking; counts and bytes far below 2^53.
    let calls = |row: &Row| row.driver_calls.values().sum::<u64>();
    let failed = |row: &Row| Some((row.failed_allocations.to_string(), row.failed_allocations as f64));
    columns.ranked("failed allocations", None, failed);
    columns.ranked("peak reserved", recorded.map(|peaks| size(peaks.reserved)), |row| {
        Some((size(row.peak_reserved_bytes), row.peak_reserved_bytes as f64))
    });
    let ratio = |bytes: u64| first.bounds.ratio(bytes);
    columns.plain("reserved / bound", recorded.and_then(|peaks| ratio(peaks.reserved)), |row| {
        ratio(row.peak_reserved_bytes)
    });
    columns.plain("peak active", None, |row| Some(size(row.peak_active_bytes)));
    columns.plain("peak requested", recorded.map(|peaks| size(peaks.requested)), |row| {
        Some(size(row.peak_requested_bytes))
    });
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    columns.ranked("utilisation", None, |row| row.utilisation.map(|share| (percent(share), -share)));
    type Part = fn(&Row) -> u64;
    let parts: [(&str, Part); 6] = [
        ("requested", |row| row.ledger.requested),
        ("rounding", |row| row.ledger.internal),
        ("free segments", |row| row.ledger.soft),
        ("partly used", |row| row.ledger.hard),
        ("other streams", |row| row.ledger.stream),
        ("pending", |row| row.ledger.pending),
    ];
    for (name, part) in parts {
        columns.plain(&format!("{name} at peak"), None, |row| Some(size(part(row))));
    }
    let segments = |(made, freed): (u64, u64)| format!("{made}/{freed}");
    columns.plain(
        "segments +/-",
        recorded.map(|peaks| peaks.segments).filter(|segments| *segments != (0, 0)).map(segments),
        |row| row.segment_allocs.zip(row.segment_frees).map(segments),
    );
    columns.plain("retries", None, |row| Some(row.num_alloc_retries.to_string()));
    if rows.iter().any(|row| row.steals.is_some()) {
        let pages = |moved: &Moved| format!("{} ({})", moved.num_stolen_pages, size(moved.num_stolen_bytes));
        columns.plain("steals", None, |row| row.steals.map(|moved| moved.num_steals.to_string()));
        columns.plain("pages stolen", None, |row| row.steals.as_ref().map(pages));
    }
    // Costs of the paths that serve a cache miss.
    for (path, action) in [("driver_alloc", "allocates a segment"), ("steal", "steals pages"), ("retry", "retries")] {
        let cost = |row: &Row| row.requests.get(path).and_then(ByPath::mean);
        if rows.iter().any(|row| row.steals.is_some() || row.num_alloc_retries > 0)
            && rows.iter().any(|row| cost(row).is_some())
        {
            columns.plain(&format!("a request that {action}"), None, cost);
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
    page.note("utilisation: peak active of peak reserved; at peak: breakdown of peak reserved");
    if recorded.is_some() {
        page.note("recorded: values from the recording; peak requested: bytes requested in active blocks");
    }
    if let Some(note) = initial_state(first) {
        page.note(note);
    }
    for note in pools(rows) {
        page.note(note);
    }
    for (row, failure) in rows.iter().filter_map(|row| row.first_failure.as_ref().map(|failure| (row, failure))) {
        page.note(format!("{}: allocation {} failed first: {}", row.alloc, failure.allocation, failure.error));
    }
}

/// Note on memory from before recording started.
fn initial_state(row: &Row) -> Option<String> {
    let (blocks, segments) = (row.prologue_allocations, row.prologue_segments);
    if segments == 0 {
        let why = row.prologue_problem.as_ref().map_or(String::new(), |why| format!(": {why}"));
        let note = format!("{blocks} blocks were live before recording started; they are allocated first{why}");
        return (blocks > 0).then_some(note);
    }
    let reserved = size(row.prologue_reserved_bytes);
    let mut note = format!(
        "{blocks} blocks in {segments} segments ({reserved}) existed before recording started, inferred from its end"
    );
    if row.undetermined_blocks > 0 {
        note += &format!("; {} of them may be up to 1 MiB larger", row.undetermined_blocks);
    }
    Some(note)
}

/// Notes on private pools.
fn pools(rows: &[Row]) -> Vec<String> {
    let Some(first) = rows.first() else { return Vec::new() };
    let (pools, undetermined) = (first.private_pools, first.undetermined_pool_allocations);
    let mut notes = Vec::new();
    if pools > 0 || undetermined > 0 {
        let mut note = format!(
            "{} (CUDA graphs, MemPool), inferred from the segments of blocks: {} of {} blocks",
            counted(pools, "private pool"),
            first.private_pool_allocations,
            first.allocations
        );
        if undetermined > 0 {
            note += &format!("; the pool of {undetermined} blocks is ambiguous, the likeliest is used");
        }
        notes.push(note);
    }
    let without: Vec<String> =
        rows.iter().filter(|row| pools > 0 && !row.private_pools_kept).map(|row| row.alloc.to_string()).collect();
    if !without.is_empty() {
        notes.push(format!("without private pools: {}", without.join(", ")));
    }
    notes
}

/// The answer where memory runs out under every tested allocator.
fn all_ran_out(rows: &[Row]) -> String {
    let names: Vec<String> = rows.iter().map(|row| row.alloc.to_string()).collect();
    match &names[..] {
        [name] => format!("{name} runs out of memory in this size; no other allocator was tested, --alloc names some."),
        names => format!("All {} tested allocators run out of memory in this size: {}.", names.len(), names.join(", ")),
    }
}

/// Adds the allocators with the lowest peak and the fewest calls, and the next command.
pub(super) fn end(rows: &[Row], recorded: Option<&Peaks>, gpu: Option<u16>, page: &mut Page) {
    let Some(first) = rows.first() else { return };
    let next = command("vramlab", &format!("capacity {}{}", quoted(&first.trace), chosen(gpu)));
    let complete = || rows.iter().filter(|row| row.failed_allocations == 0);
    let Some(least) = complete().min_by_key(|row| row.peak_reserved_bytes) else {
        page.end(all_ran_out(rows), &next);
        return;
    };
    let lowest = if rows.len() > 1 { "Lowest peak reserved" } else { "Peak reserved" };
    let mut answer = format!("{lowest}: {}, {}.", least.alloc, size(least.peak_reserved_bytes));
    // The row of the recorded policy.
    let same_policy = |peaks: &Peaks| match peaks.expandable {
        true => complete().find(|row| row.alloc.backend() == of_torch(TorchAllocator::Expandable)),
        false => complete().find(|row| row.alloc.capabilities().follows_pytorch),
    };
    if let Some((peaks, row)) = recorded.and_then(|peaks| Some((peaks, same_policy(peaks)?))) {
        let (name, replayed) = (&row.alloc, row.peak_reserved_bytes);
        answer += &match replayed == peaks.reserved {
            true => format!(" Recorded: {}, reproduced by {name}.", size(peaks.reserved)),
            false => format!(" Recorded: {}; {name} reserves {}.", size(peaks.reserved), size(replayed)),
        };
    }
    let calls = |row: &Row| row.driver_calls.values().sum::<u64>();
    if let (Some(fewest), Some(most)) =
        (complete().min_by_key(|row| calls(row)), complete().max_by_key(|row| calls(row)))
        && calls(fewest) < calls(most)
    {
        answer += &format!(" Driver calls: {} {}, {} {}.", fewest.alloc, calls(fewest), most.alloc, calls(most));
    }
    page.end(answer, &next);
}
