//! Memory that was freed and may still be used by work that was queued before.
//!
//! Frees are collected for some microseconds, and then get one set of events together: an event costs about as much as an allocation
//! from a cache does, and asking for one several times that.

use crate::real::real;
use crate::{record, serve, streams};
use std::collections::{HashMap, VecDeque};
use vramlab_device::StreamId;
use vramlab_policies::Block;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: i32 = 600;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// Frees that get events together, at most.
const TOGETHER: usize = 512;
/// Shortest time between two looks at the events, in nanoseconds.
const PERIOD: u64 = 20_000;
/// The time between two looks, in multiples of the time that a look takes: looks take at most a hundredth of the program's time. A
/// program may have many streams, and each needs a call of the driver or two.
const REST: u64 = 100;
/// Longest time between two looks, in nanoseconds.
const MOST_REST: u64 = 1_000_000;

/// A freed block and its stream.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) block: Block,
    pub(super) stream: StreamId,
}

/// Memory that is reusable when events have completed.
#[derive(Debug)]
struct Batch<T> {
    /// With the context of each.
    events: Vec<(u64, u64)>,
    items: Vec<T>,
}

/// The freed memory of a context.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    /// Without events as yet.
    open: Vec<T>,
    /// In the order of their events.
    sealed: VecDeque<Batch<T>>,
    /// Events to use again, by context.
    events: HashMap<u64, Vec<u64>>,
    /// Whether work of every context may use the memory.
    everywhere: bool,
    /// When the next look is due.
    due_ns: u64,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self { open: Vec::new(), sealed: VecDeque::new(), events: HashMap::new(), everywhere: false, due_ns: 0 }
    }
}

impl<T> Pending<T> {
    /// For memory that the work of every context may use.
    pub(crate) fn everywhere() -> Self {
        Self { everywhere: true, ..Self::default() }
    }

    /// Forgets a context, which is gone with its events.
    pub(crate) fn forget(&mut self, context: u64) {
        self.events.remove(&context);
        self.sealed.iter_mut().for_each(|batch| batch.events.retain(|(of, _)| *of != context));
    }

    /// Takes memory that waits for all streams.
    pub(crate) fn add(&mut self, item: T) {
        self.add_at(item, record::now);
    }

    /// The same with a clock, which is read for the first of those that get events together.
    pub(super) fn add_at(&mut self, item: T, now: impl FnOnce() -> u64) {
        if self.open.is_empty() {
            self.due_ns = self.due_ns.max(now().saturating_add(PERIOD));
        }
        self.open.push(item);
    }

    /// When the next look is due.
    pub(super) fn due_ns(&self) -> u64 {
        self.due_ns
    }

    /// Takes memory that waits for one stream. Returns it if no event could be recorded there.
    pub(super) fn add_on(&mut self, item: T, context: u64, handle: u64) -> Result<(), T> {
        match self.record(context, &[handle]) {
            Some(events) => {
                self.sealed.push_back(Batch { events, items: vec![item] });
                Ok(())
            }
            None => Err(item),
        }
    }

    fn event(&mut self, context: u64) -> Option<u64> {
        self.events.entry(context).or_default().pop().or_else(|| {
            let mut event = 0_u64;
            let code = real!(cuEventCreate(&raw mut event => *mut u64, NO_TIMING => u32));
            (code == 0).then_some(event)
        })
    }

    /// Records an event on each stream of the context, which is current.
    fn record(&mut self, context: u64, on: &[u64]) -> Option<Vec<(u64, u64)>> {
        let mut events = Vec::with_capacity(on.len());
        for stream in on {
            let event = self.event(context)?;
            events.push((context, event));
            if real!(cuEventRecord(event => u64, *stream => u64)) != 0 {
                self.events.entry(context).or_default().extend(events.iter().map(|(_, event)| *event));
                return None;
            }
        }
        Some(events)
    }

    /// Gives the open blocks their events. Nothing is captured.
    fn seal(&mut self, context: u64) {
        if self.open.is_empty() {
            return;
        }
        let items = std::mem::take(&mut self.open);
        let contexts = if self.everywhere { streams::contexts(context) } else { vec![context] };
        let on = contexts.iter().map(|context| serve::within(*context, || self.record_all(*context)));
        // A context that cannot be made current is gone, and its work with it.
        let events = on.flatten().flatten().collect();
        self.sealed.push_back(Batch { events, items });
    }

    /// Records an event on each stream of the context that is busy. The context is current.
    fn record_all(&mut self, context: u64) -> Vec<(u64, u64)> {
        let mut streams = streams::of_context(context);
        // An idle stream needs no event. The legacy stream stands for others, so that its own work is not all that counts.
        streams.retain(|stream| *stream == streams::LEGACY || real!(cuStreamQuery(*stream => u64)) != 0);
        self.record(context, &streams).unwrap_or_else(|| {
            // An earlier error of the device comes back at any call; then nothing of it runs any more.
            real!(cuCtxSynchronize());
            Vec::new()
        })
    }

    /// Whether memory waits without events for as much as may wait together.
    pub(crate) fn is_full(&self) -> bool {
        self.open.len() >= TOGETHER
    }

    /// Whether the next look is due.
    pub(crate) fn is_due(&self) -> bool {
        !streams::is_capturing() && (self.is_full() || record::now() >= self.due_ns)
    }

    /// The memory that nothing uses any more. With `all` it waits for the remainder. The context is current.
    pub(crate) fn collect(&mut self, context: u64, all: bool) -> Vec<T> {
        let mut out = Vec::new();
        if streams::is_capturing() {
            return out;
        }
        let start = record::now();
        self.seal(context);
        self.reap(all, &mut out);
        let end = record::now();
        // The time of a look that waits says nothing about other looks.
        let took = if all { 0 } else { end.saturating_sub(start) };
        self.due_ns = end.saturating_add(REST.saturating_mul(took).clamp(PERIOD, MOST_REST));
        out
    }

    /// Appends the memory whose events have completed, or with `all` all of it, once they have.
    fn reap(&mut self, all: bool, out: &mut Vec<T>) {
        while let Some(batch) = self.sealed.front_mut() {
            while let Some((context, event)) = batch.events.last().copied() {
                let code = match all {
                    true => real!(cuEventSynchronize(event => u64)),
                    false => real!(cuEventQuery(event => u64)),
                };
                if code == NOT_READY {
                    return;
                }
                batch.events.pop();
                self.events.entry(context).or_default().push(event);
            }
            out.extend(self.sealed.pop_front().into_iter().flat_map(|batch| batch.items));
        }
    }
}
