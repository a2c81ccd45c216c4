//! The account of a run as tables for people.

mod end;

use crate::arithmetic::name;
use crate::record::{EpochRecord, Status, Summary};
use crate::settings::Settings;
use crate::train::Outcome;
use terminal::{Cell, Column, Page, Table, duration};
use vramlab::{Attribution, Bytes, CallCounts, CallKind, PeakKind};

fn seconds(value: f64) -> String {
    // CAST: a display value; runs are far below 584 years.
    duration((value * 1e9) as u64)
}

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
    end::end(outcome, settings, page);
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
        page.note("-: not simulated; of an allocator only its driver calls take simulated time");
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
        Some(_) => "at the highest reserved that was seen",
    };
    let mut parts = Table::new([Column::left(moment), Column::right("bytes"), Column::right("")]);
    let rows = [
        ("requested", ledger.requested),
        ("internal (rounding)", ledger.internal),
        ("soft (free segments)", ledger.soft),
        ("hard (free, segment in use)", ledger.hard),
        ("stream (free, other stream)", ledger.stream),
        ("pending (waits for events)", ledger.pending),
        ("reserved", ledger.reserved),
    ];
    for (name, bytes) in rows {
        parts.row([name.to_owned(), bytes.to_string(), Bytes(bytes).to_string()]);
    }
    page.title("Memory");
    page.table(&peaks);
    page.title("Where reserved memory went");
    page.table(&parts);
    if ledger.attribution == Attribution::PoolCounters {
        page.note("a driver's pool shows two counters and no blocks: all its free bytes count as soft");
    }
}
