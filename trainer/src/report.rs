//! The account of a run as tables for people.

use crate::arithmetic::name;
use crate::record::{EpochRecord, Status, Summary};
use allocators::{Attribution, Bytes, CallCounts, CallKind};
use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, LineStyle, Table, presets};

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.force_no_tty();
    // One line under the header; lines between rows would double the length of a report.
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    let bold = |text: &&str| Cell::new(text).add_attribute(Attribute::Bold);
    table.set_header(header.iter().map(bold));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn titled(title: &str, table: &Table) -> String {
    format!("\n{title}\n{table}\n")
}

/// Nanoseconds as people read them.
#[must_use]
pub fn duration(ns: u64) -> String {
    // CAST: a display value of three digits.
    let value = ns as f64;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} us", digits(value / 1e3)),
        1_000_000..1_000_000_000 => format!("{} ms", digits(value / 1e6)),
        _ => format!("{} s", digits(value / 1e9)),
    }
}

fn digits(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.2}")
    } else if value < 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

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

/// The whole report.
#[must_use]
pub fn report(summary: &Summary) -> String {
    let mut out = String::new();
    if !summary.epochs.is_empty() {
        out += &epochs(summary);
    }
    out += &calls(summary);
    if !summary.latency.is_empty() {
        out += &latency(summary);
    }
    out += &memory(summary);
    if let Some(check) = &summary.check {
        out += &format!(
            "\nchecker: {} operations, {} verified after reuse, {} violations, {} blocks never freed\n",
            check.operations,
            Bytes(check.verified_bytes),
            check.violations.len(),
            check.live.len()
        );
    }
    for cost in &summary.instruments {
        out += &format!("instrument '{}' costs {:.0} ns each time\n", cost.instrument, cost.ns_per_operation);
    }
    match summary.status {
        Status::Finished => {}
        Status::Interrupted => out += "interrupted: the figures are of what was done so far\n",
        Status::Running | Status::Failed => out += "the run did not finish: the figures are of what was done so far\n",
    }
    out
}

fn epochs(summary: &Summary) -> String {
    let clock = if summary.clock == "virtual" { "simulated time" } else { "time" };
    let header =
        ["epoch", "train loss", "val loss", "accuracy", clock, "device", "driver allocs", "driver frees", "blocked"];
    let mut table = table(&header);
    for epoch in &summary.epochs {
        let EpochRecord { train_loss, val_loss, val_accuracy, wall_s, device_s, driver_calls, .. } = epoch;
        table.add_row([
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
    let dtype = name(settings.dtype);
    titled(&format!("Training with '{}' in {dtype} on {}", settings.allocator, summary.device.name), &table)
}

fn calls(summary: &Summary) -> String {
    let mut table = table(&["driver call", "count", "total", "mean", "blocked", "blocked %"]);
    for (kind, totals) in summary.driver_calls.iter() {
        // CAST: display values.
        let share = 100.0 * totals.blocked_ns as f64 / totals.total_ns.max(1) as f64;
        table.add_row([
            kind.name().to_owned(),
            totals.count.to_string(),
            duration(totals.total_ns),
            duration(totals.total_ns / totals.count),
            duration(totals.blocked_ns),
            format!("{share:.0} %"),
        ]);
    }
    let how = match summary.blocked_method {
        "exact" => "blocked: time the host waited for the device",
        _ => "blocked: time beyond what the same call takes on this device when it is idle",
    };
    titled(&format!("Driver calls of the whole run ({how})"), &table)
}

fn latency(summary: &Summary) -> String {
    let mut table = table(&["operation", "path", "count", "p50", "p90", "p99", "p99.9", "max"]);
    for row in &summary.latency {
        table.add_row([
            row.operation.clone(),
            row.path.clone(),
            row.count.to_string(),
            duration(row.p50_ns),
            duration(row.p90_ns),
            duration(row.p99_ns),
            duration(row.p999_ns),
            duration(row.max_ns),
        ]);
    }
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Left);
    }
    let note = if summary.clock == "virtual" { " (simulated: only driver calls take time)" } else { "" };
    titled(&format!("Allocator latency by path{note}"), &table)
}

fn memory(summary: &Summary) -> String {
    let stats = &summary.allocator_stats;
    let mut peaks = table(&["peak", "bytes", ""]);
    let rows = [
        ("reserved", stats.reserved_bytes.all.peak),
        ("active", stats.active_bytes.all.peak),
        ("allocated", stats.allocated_bytes.all.peak),
        ("requested", stats.requested_bytes.all.peak),
    ];
    for (name, bytes) in rows {
        let is_bound = stats.upper_bounds.iter().any(|gauge| gauge.strip_suffix("_bytes") == Some(name));
        let name = if is_bound { format!("{name}, at most") } else { name.to_owned() };
        peaks.add_row([name, bytes.to_string(), Bytes(bytes).to_string()]);
    }
    let ledger = &summary.fragmentation;
    let moment = match ledger.peak_reserved {
        None => "at the peak of reserved",
        Some(_) => "at the highest reserved that was seen",
    };
    let mut parts = table(&[moment, "bytes", ""]);
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
        parts.add_row([name.to_owned(), bytes.to_string(), Bytes(bytes).to_string()]);
    }
    let note = match ledger.attribution {
        Attribution::Blocks => "",
        Attribution::PoolCounters => {
            " (a driver's pool shows two counters and no blocks: all its free bytes count as soft)"
        }
    };
    titled("Memory", &peaks) + &titled(&format!("Where reserved memory went{note}"), &parts)
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_three_digits() {
        for (ns, text) in
            [(0, "0 ns"), (999, "999 ns"), (1_500, "1.50 us"), (25_400, "25.4 us"), (2_243_000, "2.24 ms")]
        {
            assert_eq!(duration(ns), text);
        }
        assert_eq!(duration(61_000_000_000), "61.0 s");
    }
}
