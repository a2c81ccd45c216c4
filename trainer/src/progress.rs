//! Progress on the terminal while a run continues. Everything here is written to stderr.

use crate::Settings;
use crate::data::{Dataset, Progress};
use crate::device::Device;
use crate::observer::Observer;
use crate::record::{EpochRecord, Summary};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use terminal::arguments::name;
use terminal::{Bar, duration};
use vramlab::{Bytes, CallEvent, CallKind};

/// Lines and a progress bar on stderr; the bar only where stderr is a terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    bar: Mutex<Bar>,
    epoch: AtomicU32,
    calls: Mutex<CallLog>,
}

impl Terminal {
    pub(crate) fn new() -> Self {
        Self { bar: Mutex::new(Bar::hidden()), epoch: AtomicU32::new(0), calls: Mutex::new(CallLog::new()) }
    }

    fn bar(&self) -> Bar {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, bar: Bar) {
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = bar;
    }

    fn calls(&self) -> MutexGuard<'_, CallLog> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, phase: Phase) {
        let lines = self.calls().enter(phase);
        lines.iter().for_each(|line| self.line(line));
    }

    /// Writes the remaining lines and removes the bar from the screen.
    pub(crate) fn clear(&self) {
        let lines = self.calls().end();
        lines.iter().for_each(|line| self.line(line));
        self.bar().clear();
    }

    fn line(&self, text: &str) {
        self.bar().say(text);
    }
}

impl Progress for Terminal {
    fn download_begin(&self, what: &str, total_bytes: Option<u64>) {
        self.line(&format!("get      {what}"));
        self.replace(Bar::new(total_bytes, "{bar:40} {bytes}/{total_bytes} {bytes_per_sec}"));
    }

    fn download_advance(&self, bytes: u64) {
        self.bar().advance(bytes);
    }

    fn download_finish(&self) {
        self.bar().clear();
    }
}

impl Observer for Terminal {
    fn device(&self, device: &Device) {
        let reason = if device.reason().is_empty() { String::new() } else { format!(" ({})", device.reason()) };
        self.line(&format!("device   {}{reason}", device.describe().name));
    }

    fn dataset(&self, dataset: &Dataset) {
        self.line(&format!(
            "data     {}: {} rows to train on, {} to validate on ({})",
            dataset.name, dataset.train.rows, dataset.validation.rows, dataset.source
        ));
        if let Some(notice) = &dataset.notice {
            self.line(&format!("note     {notice}"));
        }
    }

    fn begin(&self, settings: &Settings, summary: &Summary, steps: u64) {
        self.line(&format!(
            "train    {} layers of width {}, batch {}, {}, allocator {}, weights {}",
            settings.layers,
            settings.hidden,
            settings.batch,
            name(settings.dtype),
            summary.settings.allocator,
            Bytes(summary.parameter_bytes)
        ));
        self.replace(Bar::new(steps, "{bar:40} step {pos}/{len} {msg} [{elapsed} left {eta}]"));
    }

    fn step(&self, epoch: u32, step: u64) {
        self.enter(Phase::Step(epoch, step));
        let bar = self.bar();
        if self.epoch.swap(epoch, Relaxed) != epoch {
            bar.message(format!("epoch {epoch}"));
        }
        bar.advance(1);
    }

    fn validation(&self, epoch: u32) {
        self.enter(Phase::Validation(epoch));
    }

    fn epoch(&self, epoch: &EpochRecord) {
        self.enter(Phase::After(epoch.epoch));
        self.line(&format!(
            "epoch {:2} train loss {:.4}, validation loss {:.4}, accuracy {:.2} %",
            epoch.epoch,
            epoch.train_loss,
            epoch.val_loss,
            100.0 * epoch.val_accuracy
        ));
    }

    fn memory_call(&self, event: &CallEvent) {
        if let Some(line) = self.calls().call(event) {
            self.line(&line);
        }
    }
}

// The log of driver calls that `--log-driver-calls` prints: all calls of the set-up and of the first step, later those of
// parts of the run that made few, and counts of those that made many.

/// A step, a validation or what lies between with more calls than this is counted: an allocator that asks the driver for
/// each tensor would fill the screen with every step.
const FEW: usize = 8;

/// The phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Before the first step.
    SetUp,
    /// A step of an epoch.
    Step(u32, u64),
    /// The validation after an epoch's steps.
    Validation(u32),
    /// Between an epoch and the next, or the end.
    After(u32),
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            Self::SetUp => "set-up".to_owned(),
            Self::Step(epoch, step) => format!("epoch {epoch} step {step}"),
            Self::Validation(epoch) => format!("epoch {epoch} validation"),
            Self::After(epoch) => format!("after epoch {epoch}"),
        };
        f.pad(&text)
    }
}

/// Calls of one kind that are only counted.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    count: u64,
    bytes: u64,
    total_ns: u64,
    blocked_ns: u64,
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.count += other.count;
        self.bytes += other.bytes;
        self.total_ns += other.total_ns;
        self.blocked_ns += other.blocked_ns;
    }
}

/// Selects the calls to print, and when.
#[derive(Debug)]
struct CallLog {
    phase: Phase,
    /// Calls of this phase whose lines are held back until it is known whether they are few.
    held: Vec<(CallKind, Sum, String)>,
    /// The steps that are counted together, first and last, and their calls by kind.
    steps: Option<(u32, u64, u64)>,
    counted: BTreeMap<&'static str, Sum>,
}

impl CallLog {
    fn new() -> Self {
        Self { phase: Phase::SetUp, held: Vec::new(), steps: None, counted: BTreeMap::new() }
    }

    /// Returns true in phases whose calls are printed immediately.
    fn prints_each(&self) -> bool {
        matches!(self.phase, Phase::SetUp | Phase::Step(1, 1))
    }

    /// Takes a call; its line, if it is printed now.
    fn call(&mut self, event: &CallEvent) -> Option<String> {
        let line = line(self.phase, event);
        if self.prints_each() {
            return Some(line);
        }
        let CallEvent { bytes, total_ns, blocked_ns, .. } = *event;
        let sum = Sum { count: 1, bytes, total_ns, blocked_ns };
        // Failed calls are always printed.
        if !event.ok {
            return Some(line);
        }
        self.held.push((event.kind, sum, line));
        None
    }

    /// A part of the run ends and another begins; the lines that are printed now.
    fn enter(&mut self, phase: Phase) -> Vec<String> {
        let mut out = Vec::new();
        let held = std::mem::take(&mut self.held);
        if held.len() <= FEW {
            if !held.is_empty() {
                out.extend(self.counts());
            }
            out.extend(held.into_iter().map(|(_, _, line)| line));
        } else {
            if let Phase::Step(epoch, step) = self.phase {
                let first = self.steps.map_or(step, |(_, first, _)| first);
                self.steps = Some((epoch, first, step));
            }
            for (kind, sum, _) in held {
                self.counted.entry(kind.name()).or_default().add(sum);
            }
        }
        // Consecutive steps are counted together.
        if !matches!((self.phase, phase), (Phase::Step(a, _), Phase::Step(b, _)) if a == b) {
            out.extend(self.counts());
        }
        self.phase = phase;
        out
    }

    /// Ends the run; returns the remaining lines.
    fn end(&mut self) -> Vec<String> {
        self.enter(self.phase).into_iter().chain(self.counts()).collect()
    }

    /// The counts so far as lines, one for each kind.
    fn counts(&mut self) -> Vec<String> {
        let at = match self.steps.take() {
            Some((epoch, first, last)) if first < last => format!("epoch {epoch} steps {first}-{last}"),
            Some((epoch, step, _)) => Phase::Step(epoch, step).to_string(),
            None => self.phase.to_string(),
        };
        let counted = std::mem::take(&mut self.counted);
        let text = |(kind, sum): (&'static str, Sum)| {
            let bytes = if sum.bytes > 0 { Bytes(sum.bytes).to_string() } else { String::new() };
            let (total, blocked) = (duration(sum.total_ns), blocked(sum.blocked_ns));
            format!("driver   {at:14} {kind:9} {bytes:>8} in {} calls  {total}{blocked}", sum.count)
        };
        counted.into_iter().map(text).collect()
    }
}

fn blocked(ns: u64) -> String {
    if ns > 0 { format!(", blocked {}", duration(ns)) } else { String::new() }
}

fn line(at: Phase, event: &CallEvent) -> String {
    let bytes = if event.bytes > 0 { Bytes(event.bytes).to_string() } else { String::new() };
    let addr = event.addr.map_or_else(String::new, |addr| format!("at {:#x}", addr.get()));
    let failed = if event.ok { "" } else { " FAILED" };
    let (kind, blocked) = (event.kind.name(), blocked(event.blocked_ns));
    // Most of them fit eighty columns.
    format!("driver   {at:14} {kind:9} {bytes:>8} {addr}  {}{blocked}{failed}", duration(event.total_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::DeviceAddr;

    fn event(kind: CallKind, bytes: u64) -> CallEvent {
        let addr = DeviceAddr::new(0x1000);
        CallEvent { kind, bytes, addr, stream: None, start_ns: 0, total_ns: 2_000, blocked_ns: 500, ok: true }
    }

    fn pair(log: &mut CallLog) -> usize {
        [CallKind::MemAlloc, CallKind::MemFree].into_iter().filter_map(|kind| log.call(&event(kind, 512))).count()
    }

    #[test]
    fn many_calls_are_counted_after_the_first_step() {
        let mut log = CallLog::new();
        assert_eq!(pair(&mut log), 2, "the set-up is printed at once");
        assert!(log.enter(Phase::Step(1, 1)).is_empty());
        assert_eq!((0..50).map(|_| pair(&mut log)).sum::<usize>(), 100, "and so is the first step");
        for step in 2..=100 {
            assert!(log.enter(Phase::Step(1, step)).is_empty(), "step {step} prints nothing");
            assert_eq!((0..50).map(|_| pair(&mut log)).sum::<usize>(), 0);
        }
        let lines = log.enter(Phase::Validation(1));
        assert_eq!(lines.len(), 2, "{lines:#?}");
        for (line, kind) in lines.iter().zip(["mem_alloc", "mem_free"]) {
            assert!(line.contains("epoch 1 steps 2-100") && line.contains(kind), "{line}");
            assert!(line.contains("2.42 MiB in 4950 calls") && line.contains("blocked 2.48 ms"), "{line}");
        }
        assert!(log.enter(Phase::After(1)).is_empty(), "the validation made no call");
        assert!(log.end().is_empty());
    }

    #[test]
    fn few_calls_keep_their_lines_where_they_happened() {
        let mut log = CallLog::new();
        log.enter(Phase::Step(1, 1));
        log.enter(Phase::Step(1, 2));
        for _ in 0..20 {
            pair(&mut log);
        }
        log.enter(Phase::Step(1, 3));
        pair(&mut log);
        let lines = log.enter(Phase::Step(1, 4));
        assert_eq!(lines.len(), 4, "{lines:#?}");
        assert!(lines[0].contains("epoch 1 step 2") && lines[0].contains("in 20 calls"), "{lines:#?}");
        assert!(lines[2].contains("epoch 1 step 3") && lines[2].contains("512 B at 0x1000"), "{lines:#?}");
        log.enter(Phase::Validation(1));
        assert_eq!(
            log.call(&CallEvent { ok: false, ..event(CallKind::MemAlloc, 512) }).map(|line| line.contains("FAILED")),
            Some(true)
        );
        pair(&mut log);
        let lines = log.end();
        assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("epoch 1 validation")), "{lines:#?}");
    }
}
