//! What a person sees on the terminal while a run goes on. Everything here goes to stderr.

use crate::Settings;
use crate::arithmetic::name;
use crate::data::Dataset;
use crate::device::Device;
use crate::observer::Observer;
use crate::record::{EpochRecord, Summary};
use crate::report::duration;
use crate::terminal::Bar;
use allocators::{Bytes, CallEvent};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Lines and a progress bar on stderr; the bar only where stderr is a terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    bar: Mutex<Bar>,
    epoch: AtomicU32,
    phase: Mutex<Phase>,
}

/// Where a run is, for the log of driver calls.
#[derive(Clone, Copy, Debug)]
enum Phase {
    SetUp,
    Step(u32, u64),
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

impl Terminal {
    pub(crate) fn new() -> Self {
        Self { bar: Mutex::new(Bar::hidden()), epoch: AtomicU32::new(0), phase: Mutex::new(Phase::SetUp) }
    }

    fn bar(&self) -> Bar {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, bar: Bar) {
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = bar;
    }

    fn enter(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// Takes the bar off the screen.
    pub(crate) fn clear(&self) {
        self.bar().clear();
    }

    fn line(&self, text: &str) {
        self.bar().say(text);
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

    fn download_begin(&self, what: &str, total_bytes: Option<u64>) {
        self.line(&format!("get      {what}"));
        self.replace(Bar::new(total_bytes, "{bar:40} {bytes}/{total_bytes} {bytes_per_sec}"));
    }

    fn download_advance(&self, bytes: u64) {
        self.bar().advance(bytes);
    }

    fn download_finish(&self) {
        self.clear();
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
        let at = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = if event.bytes > 0 { Bytes(event.bytes).to_string() } else { String::new() };
        let addr = event.addr.map_or_else(String::new, |addr| format!("at {:#x}", addr.get()));
        let failed = if event.ok { "" } else { " FAILED" };
        let blocked =
            if event.blocked_ns > 0 { format!(", blocked {}", duration(event.blocked_ns)) } else { String::new() };
        let kind = event.kind.name();
        self.line(&format!(
            "driver   {at:20} {kind:16} {bytes:>10} {addr}  {}{blocked}{failed}",
            duration(event.total_ns)
        ));
    }
}
