//! What a person sees on the terminal while a run goes on. Everything here goes to stderr.

use crate::Settings;
mod calls;

use crate::arithmetic::name;
use crate::data::{Dataset, Progress};
use crate::device::Device;
use crate::observer::Observer;
use crate::record::{EpochRecord, Summary};
use calls::{CallLog, Phase};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use terminal::Bar;
use vramlab::{Bytes, CallEvent};

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

    /// Writes what is left to say and takes the bar off the screen.
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
