//! The account of a run as tables for people.

use crate::ranks::CommunicationRecord;
use crate::record::{EpochRecord, HostMemoryRecord, Status, Summary};
use crate::settings::{DeviceChoice, Settings};
use crate::train::{LastAllocation, Outcome};
use terminal::arguments::name;
use terminal::{Cell, Column, Page, Table, duration, seconds};
use vramlab::{Attribution, Bytes, CallCounts, CallKind, CallTotals, PeakKind};

fn blocked(calls: &CallCounts) -> u64 {
    calls.iter().map(|(_, totals)| totals.blocked_ns).sum()
}

fn frees(calls: &CallCounts) -> u64 {
    [CallKind::MemFree, CallKind::MemFreeAsync, CallKind::MemRelease].iter().map(|kind| calls.get(*kind).count).sum()
}

/// The whole report of a run, with what it found and what to look at next.
pub fn report(outcome: &Outcome, settings: &Settings, page: &mut Page) {
    let summary = &outcome.summary;
    if !summary.epochs.is_empty() {
        epochs(summary, page);
    }
    if !summary.ranks.is_empty() {
        ranks(summary, page);
    }
    calls(summary, page);
    if !summary.latency.is_empty() {
        latency(summary, page);
    }
    memory(summary, page);
    if let Some(check) = &summary.check {
        page.title(format!(
            "checker: {} operations, {} verified after reuse, {} violations, {} blocks never freed",
            check.operations,
            Bytes(check.verified_bytes),
            check.violations.len(),
            check.live.len()
        ));
    }
    page.gap();
    for cost in &summary.instruments {
        page.line(format!("instrument '{}' costs {:.0} ns each time", cost.instrument, cost.ns_per_operation));
    }
    match summary.status {
        Status::Finished => {}
        Status::Interrupted => page.line("interrupted: the figures are of what was done so far"),
        Status::Running | Status::Failed => {
            page.line("the run did not finish: the figures are of what was done so far");
        }
    }
    end(outcome, settings, page);
}

fn epochs(summary: &Summary, page: &mut Page) {
    let clock = if summary.clock == "virtual" { "simulated time" } else { "time" };
    let mut table = Table::new([
        Column::right("epoch"),
        Column::right("train loss"),
        Column::right("val loss").priority(2),
        Column::right("accuracy"),
        Column::right(clock),
        Column::right("device").priority(3),
        Column::right("driver allocs"),
        Column::right("driver frees").priority(1),
        Column::right("blocked"),
    ]);
    for epoch in &summary.epochs {
        let EpochRecord { train_loss, val_loss, val_accuracy, wall_s, device_s, driver_calls, .. } = epoch;
        table.row([
            epoch.epoch.to_string(),
            format!("{train_loss:.4}"),
            format!("{val_loss:.4}"),
            format!("{:.2} %", 100.0 * val_accuracy),
            seconds(*wall_s),
            seconds(*device_s),
            driver_calls.driver_allocations().to_string(),
            frees(driver_calls).to_string(),
            duration(blocked(driver_calls)),
        ]);
    }
    let settings = &summary.settings;
    let dtype = name(settings.chosen.dtype);
    page.title(format!("Training with '{}' in {dtype} on {}", settings.allocator, summary.device.name));
    page.table(&table);
    if let [first, rest @ ..] = &*summary.kernels_without_cost {
        let more =
            if rest.is_empty() { String::new() } else { format!(" and {}", counted(rest.len() as u64, "more kernel")) };
        page.note(format!(
            "the profile has no cost of {first}{more}: the time of its default kernel is used, so times on a GPU may be very different"
        ));
    }
}

fn ranks(summary: &Summary, page: &mut Page) {
    let mut table = Table::new([
        Column::right("rank"),
        Column::left("device").priority(2),
        Column::left("allocator"),
        Column::right("step"),
        Column::right("device").priority(1),
        Column::right("exposed").priority(2),
        Column::right("blocked"),
        Column::right("driver allocs").priority(3),
        Column::right("peak reserved"),
        Column::right("peak pending").priority(1),
    ]);
    for rank in &summary.ranks {
        table.row([
            rank.rank.to_string(),
            rank.device.clone(),
            rank.alloc.clone(),
            seconds(rank.step_s),
            seconds(rank.step_device_s),
            rank.exposed_communication_s.map_or_else(|| "-".to_owned(), seconds),
            seconds(rank.blocked_s),
            rank.driver_allocations.to_string(),
            Bytes(rank.peak_reserved_bytes).to_string(),
            Bytes(rank.peak_pending_bytes).to_string(),
        ]);
    }
    page.title(format!("{} ranks", summary.ranks.len()));
    page.table(&table);
    if let Some(CommunicationRecord { version, bucket_bytes, buffers, waits, .. }) = &summary.communication {
        let total: u64 = bucket_bytes.iter().sum();
        let plural = if bucket_bytes.len() == 1 { "" } else { "s" };
        page.note(format!(
            "gradients: {} in {} bucket{plural}, summed {}; --buffers {}: {waits}",
            Bytes(total),
            bucket_bytes.len(),
            version.as_ref().map_or_else(|| "over simulated links".to_owned(), |version| format!("by NCCL {version}")),
            buffers.name()
        ));
        page.note("exposed: the compute stream's wait for sums in a step; peak pending: freed memory that waits for other streams");
    }
}

/// A duration on the run's clock; a dash where the simulated device has no cost for it.
fn modelled(summary: &Summary, ns: u64) -> Cell {
    Cell::or_dash((ns > 0 || summary.clock != "virtual").then(|| duration(ns)))
}

fn calls(summary: &Summary, page: &mut Page) {
    let mut table = Table::new([
        Column::left("driver call"),
        Column::right("count"),
        Column::right("total"),
        Column::right("mean").priority(1),
        Column::right("blocked"),
        Column::right("blocked %"),
    ]);
    for (kind, totals) in summary.driver_calls.iter() {
        let took = totals.total_ns > 0;
        // CAST: display values.
        let share = 100.0 * totals.blocked_ns as f64 / totals.total_ns.max(1) as f64;
        table.row([
            kind.name().into(),
            totals.count.to_string().into(),
            modelled(summary, totals.total_ns),
            modelled(summary, totals.total_ns / totals.count.max(1)),
            Cell::or_dash(took.then(|| duration(totals.blocked_ns))),
            Cell::or_dash(took.then(|| format!("{share:.0} %"))),
        ]);
    }
    page.title("Driver calls of the whole run");
    page.table(&table);
    page.note(match summary.blocked_method {
        "exact" => "blocked: time the host waited for the device",
        _ => "blocked: time beyond what the same call takes on this device when it is idle",
    });
}

fn latency(summary: &Summary, page: &mut Page) {
    let mut table = Table::new([
        Column::left("operation"),
        Column::left("path"),
        Column::right("count"),
        Column::right("p50"),
        Column::right("p90").priority(2),
        Column::right("p99"),
        Column::right("p99.9").priority(3),
        Column::right("max").priority(1),
    ]);
    for row in &summary.latency {
        let percentiles = [row.p50_ns, row.p90_ns, row.p99_ns, row.p999_ns, row.max_ns];
        let names = [row.operation.clone().into(), row.path.clone().into(), row.count.to_string().into()];
        table.row(names.into_iter().chain(percentiles.map(|ns| Cell::or_dash(ns.map(duration)))));
    }
    page.title("Allocator latency by path");
    page.table(&table);
    if summary.clock == "virtual" {
        page.note("-: not available; the simulator times only an allocator's driver calls");
    }
}

fn memory(summary: &Summary, page: &mut Page) {
    let stats = &summary.allocator_stats;
    let mut peaks = Table::new([Column::left("peak"), Column::right("bytes"), Column::right("")]);
    let rows = [
        ("reserved", stats.reserved_bytes.all),
        ("active", stats.active_bytes.all),
        ("allocated", stats.allocated_bytes.all),
        ("requested", stats.requested_bytes.all),
    ];
    for (name, gauge) in rows {
        let bytes = gauge.peak;
        let name = match gauge.peak_is {
            PeakKind::Exact => name.to_owned(),
            PeakKind::AtMost => format!("{name}, at most"),
        };
        peaks.row([name, bytes.to_string(), Bytes(bytes).to_string()]);
    }
    let ledger = &summary.fragmentation;
    let moment = match ledger.peak_reserved {
        None => "at the peak of reserved",
        Some(_) => "at the highest observed reserved bytes",
    };
    let mut parts = Table::new([Column::left(moment), Column::right("bytes"), Column::right("")]);
    let rows = [
        ("requested", ledger.requested),
        ("rounding", ledger.internal),
        ("free (releasable)", ledger.soft),
        ("partly used (free blocks)", ledger.hard),
        ("other streams (free)", ledger.stream),
        ("pending (deferred frees)", ledger.pending),
        ("reserved", ledger.reserved),
    ];
    let communication = summary.communication.as_ref();
    let outside = [
        ("NCCL (outside of reserved)", communication.and_then(|record| record.library_bytes)),
        ("context, other programs", communication.and_then(|record| record.context_bytes)),
    ];
    let outside = outside.into_iter().filter_map(|(name, bytes)| Some((name, bytes?)));
    for (name, bytes) in rows.into_iter().chain(outside) {
        parts.row([name.to_owned(), bytes.to_string(), Bytes(bytes).to_string()]);
    }
    page.title("Memory");
    page.table(&peaks);
    if let Some(host) = &summary.host_memory {
        host_memory(host, page);
    }
    page.title("Reserved memory");
    page.table(&parts);
    if ledger.attribution == Attribution::PoolCounters {
        page.note("a CUDA memory pool shows two counters and no blocks: none of its free bytes count as partly used");
    }
}

// The last lines of a report: what the run says about its allocator, and the command that goes on from there.

/// Calls that take memory or give it back.
const MEMORY_CALLS: [(CallKind, &str); 5] = [
    (CallKind::MemAlloc, "cuMemAlloc"),
    (CallKind::MemFree, "cuMemFree"),
    (CallKind::MemAllocAsync, "cuMemAllocFromPoolAsync"),
    (CallKind::MemFreeAsync, "cuMemFreeAsync"),
    (CallKind::PoolTrim, "cuMemPoolTrimTo"),
];

fn end(outcome: &Outcome, settings: &Settings, page: &mut Page) {
    let Outcome { summary, last_allocation, .. } = outcome;
    if summary.status != Status::Failed {
        page.end(format!("{}; {}.", asked(summary, *last_allocation), waited(summary)), &next(summary, settings));
    }
}

/// Number of memory requests to the driver, and the step of the last one.
fn asked(summary: &Summary, last: Option<LastAllocation>) -> String {
    let name = &summary.settings.allocator;
    let count = summary.driver_calls.driver_allocations();
    let times = if count == 1 { "once".to_owned() } else { format!("{} times", grouped(count)) };
    let until = match last {
        _ if count == 0 => return format!("{name} never asked the driver for memory"),
        None if count == 1 => "before the first step".to_owned(),
        None => "all before the first step".to_owned(),
        Some(LastAllocation::Step { epoch: 1, step }) => format!("never after step {step}"),
        Some(LastAllocation::Validation { epoch: 1 }) => "never after the first validation".to_owned(),
        Some(LastAllocation::Step { epoch, .. } | LastAllocation::Validation { epoch }) => {
            match summary.epochs.iter().find(|record| record.epoch == epoch) {
                Some(record) => {
                    format!("{} of them in epoch {epoch}", grouped(record.driver_calls.driver_allocations()))
                }
                // The calls of an epoch are counted at its end.
                None => format!("the last in epoch {epoch}, which was cut short"),
            }
        }
    };
    format!("{name} asked the driver for memory {times}, {until}")
}

/// Pinned host memory in a line or two.
fn host_memory(host: &HostMemoryRecord, page: &mut Page) {
    let by = host.allocator.as_ref().map_or_else(|| "one a buffer".to_owned(), |name| format!("the pool is {name}"));
    page.note(format!(
        "pinned host memory: {} at the peak for {} requested, by {} ({}, {by}) that took {}; {} copied to the device, {} back; the \
         host waited {} for staging buffers",
        Bytes(host.peak_reserved_bytes),
        Bytes(host.peak_requested_bytes),
        counted(host.pin_calls, "call"),
        host.pinning,
        seconds(host.pin_s),
        Bytes(host.to_device_bytes),
        Bytes(host.to_host_bytes),
        seconds(host.staging_wait_s),
    ));
    if let Some(offload) = &host.offload {
        let waited =
            offload.step_wait_s.map_or_else(String::new, |s| format!("; updates waited {} for it a step", seconds(s)));
        page.note(format!(
            "optimizer's state on the host: {}, of which at most {} are on the device{waited}",
            Bytes(offload.state_bytes),
            Bytes(offload.window_bytes)
        ));
    }
}

/// A number of things.
fn counted(count: u64, thing: &str) -> String {
    format!("{} {thing}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// In which memory call the host waited, and for how much of it.
fn waited(summary: &Summary) -> String {
    let of = |(kind, name): (CallKind, &'static str)| (summary.driver_calls.get(kind), name);
    let waited = |totals: &CallTotals| totals.blocked_ns > 0;
    let longest = MEMORY_CALLS.map(of).into_iter().filter(|(totals, _)| waited(totals));
    let Some((totals, call)) = longest.max_by_key(|(totals, _)| totals.blocked_ns) else {
        return "the host never waited in those calls".to_owned();
    };
    // CAST: a display value.
    let share = 100.0 * totals.blocked_ns as f64 / totals.total_ns.max(1) as f64;
    format!("{share:.0} % of the {} in {call} was waiting for the device", duration(totals.total_ns))
}

/// The command that does this work under every allocator.
fn next(summary: &Summary, settings: &Settings) -> String {
    let usual = Settings::default();
    let mut arguments = String::from("compare");
    let mut add = |name: &str, value: String, usual: String| {
        if value != usual {
            arguments += &format!(" --{name} {value}");
        }
    };
    let device = match &settings.device {
        DeviceChoice::Auto => String::new(),
        _ => terminal::quoted(&summary.settings.chosen.device.to_string()),
    };
    add("device", device, String::new());
    add("dataset", settings.dataset.to_string(), usual.dataset.to_string());
    for (name, value, usual) in [
        ("hidden", settings.hidden, usual.hidden),
        ("layers", settings.layers, usual.layers),
        ("batch", settings.batch, usual.batch),
        ("epochs", settings.epochs, usual.epochs),
    ] {
        add(name, value.to_string(), usual.to_string());
    }
    terminal::command("experiments", &arguments)
}

/// A count with a comma before each three digits.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let comma = |at: usize| if at > 0 && (digits.len() - at).is_multiple_of(3) { "," } else { "" };
    digits.chars().enumerate().map(|(at, digit)| format!("{}{digit}", comma(at))).collect()
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn counts_have_commas() {
        let shown = [0, 12, 999, 1_000, 24_866, 100_000, 1_234_567].map(grouped);
        assert_eq!(shown, ["0", "12", "999", "1,000", "24,866", "100,000", "1,234,567"]);
    }
}
