//! The last lines of a report: what the run says about its allocator, and the command that goes on from there.

use crate::record::{Status, Summary};
use crate::settings::{DeviceChoice, Settings};
use crate::train::{LastAllocation, Outcome};
use terminal::{Page, duration};
use vramlab::{CallKind, CallTotals};

/// Calls that take memory or give it back.
const MEMORY_CALLS: [(CallKind, &str); 5] = [
    (CallKind::MemAlloc, "cuMemAlloc"),
    (CallKind::MemFree, "cuMemFree"),
    (CallKind::MemAllocAsync, "cuMemAllocFromPoolAsync"),
    (CallKind::MemFreeAsync, "cuMemFreeAsync"),
    (CallKind::PoolTrim, "cuMemPoolTrimTo"),
];

pub(super) fn end(outcome: &Outcome, settings: &Settings, page: &mut Page) {
    let Outcome { summary, last_allocation, .. } = outcome;
    if summary.status != Status::Failed {
        page.end(format!("{}; {}.", asked(summary, *last_allocation), waited(summary)), &next(summary, settings));
    }
}

/// How often memory was asked for, and until when.
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
