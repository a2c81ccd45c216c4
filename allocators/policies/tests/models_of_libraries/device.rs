//! A device whose work is done when a test says so, and what a model sees of one like it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use vramlab_device::{CallArguments, CallOutcome, Hook};
use vramlab_device::{CallKind, DeviceAddr, Driver, DriverResult, EventId, NullDriver, StreamId};

/// Events complete when their stream has come to the step in which they were recorded.
#[derive(Debug, Default)]
pub(crate) struct ByHand(Mutex<Steps>);

#[derive(Debug, Default)]
struct Steps {
    now: usize,
    recorded: HashMap<EventId, (StreamId, usize)>,
    /// First step of each stream that is not done.
    done: HashMap<StreamId, usize>,
}

impl ByHand {
    /// Begins a step.
    pub(crate) fn at(&self, step: usize) {
        self.0.lock().unwrap().now = step;
    }

    /// What was queued on a stream before a step is done.
    pub(crate) fn complete(&self, stream: StreamId, step: usize) {
        self.0.lock().unwrap().done.insert(stream, step);
    }
}

// SAFETY: it hands out no address and forwards every call. Nothing runs on the null device, so events may complete at any time.
unsafe impl Hook for ByHand {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, _kind: CallKind, _arguments: CallArguments) -> DriverResult<()> {
        Ok(())
    }

    fn after(&self, _: &dyn Driver, kind: CallKind, arguments: CallArguments, (): (), _: CallOutcome) {
        if let (CallKind::EventRecord, Some(event), Some(stream)) = (kind, arguments.event, arguments.stream) {
            let steps = &mut *self.0.lock().unwrap();
            steps.recorded.insert(event, (stream, steps.now));
        }
    }

    fn event_query(&self, _inner: &dyn Driver, event: EventId) -> DriverResult<bool> {
        let steps = self.0.lock().unwrap();
        let (stream, recorded) = steps.recorded[&event];
        Ok(steps.done.get(&stream).is_some_and(|done| recorded < *done))
    }
}

/// The same for a model: memory at the same addresses, and blocks that wait for other streams.
pub(crate) struct Device {
    memory: Arc<dyn Driver>,
    /// Blocks that wait for each stream, with the step in which they were freed.
    queues: Vec<VecDeque<(usize, u64)>>,
    /// First step of each stream that is not done.
    done: Vec<usize>,
}

impl Device {
    pub(crate) fn new(room: u64, streams: usize) -> Self {
        Self { memory: Arc::new(NullDriver::new(room)), queues: vec![VecDeque::new(); streams], done: vec![0; streams] }
    }

    pub(crate) fn defer(&mut self, addr: u64, users: &[usize], step: usize) {
        users.iter().for_each(|user| self.queues[*user].push_back((step, addr)));
    }

    pub(crate) fn complete(&mut self, stream: usize, step: usize) {
        self.done[stream] = step;
    }

    /// Blocks that no stream uses any more, or all of them: the host waited.
    pub(crate) fn completed(&mut self, all: bool) -> Vec<u64> {
        let mut out = Vec::new();
        for stream in 0..self.queues.len() {
            while let Some(&(step, addr)) = self.queues[stream].front() {
                if !all && step >= self.done[stream] {
                    break;
                }
                self.queues[stream].pop_front();
                if !self.queues.iter().flatten().any(|(_, other)| *other == addr) {
                    out.push(addr);
                }
            }
        }
        out
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.memory.mem_info().unwrap().free
    }

    pub(crate) fn take(&self, bytes: u64) -> Option<u64> {
        self.memory.mem_alloc(bytes).ok().map(DeviceAddr::get)
    }

    pub(crate) fn give_back(&self, addr: u64) {
        // SAFETY: from `take`, and the model forgets it.
        unsafe { self.memory.mem_free(DeviceAddr::handed_out(addr)) }.unwrap();
    }
}
