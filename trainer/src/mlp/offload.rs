//! The optimizer's state in pinned host memory.
//!
//! SGD's state is the f32 master weights of 16-bit networks. Those of a layer are copied to the device for its update and back behind
//! it, on a stream of their own. The first two layers' copies are queued before the forward pass, which hides them; from then on the
//! next layer's copy follows the write-back of the one before the last, so that the state of at most two layers is on the device.

use super::Mlp;
use crate::device::OwnedEvent;
use crate::error::Result;
use crate::pinned::{HostBuffer, OffloadRecord};
use crate::tensor::Context;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab::{DeviceBuffer, StreamId};

/// Layers whose state may be on the device at once.
const WINDOW: usize = 2;

/// The state of all layers.
#[derive(Debug)]
pub(super) struct Offload {
    layers: Vec<LayerState>,
    window: Mutex<Window>,
}

#[derive(Debug)]
struct LayerState {
    host: HostBuffer,
    /// Recorded behind the copy to the device.
    ready: OwnedEvent,
    /// Recorded behind the update.
    updated: OwnedEvent,
}

#[derive(Debug, Default)]
struct Window {
    /// Layers of this step whose copies are not queued yet, in the order of their updates.
    waiting: VecDeque<usize>,
    /// State that is on the device or on its way there.
    on_device: VecDeque<(usize, DeviceBuffer)>,
    /// Whether the waits of the current step are timed, and the number of such steps.
    sampled: bool,
    steps: u64,
    /// Events before and after each wait.
    waits: Vec<[OwnedEvent; 2]>,
}

impl Offload {
    /// State that starts with these values of each layer, as they are on the device.
    ///
    /// # Errors
    /// Errors of pinning memory and of the driver.
    pub(super) fn new(context: &Context, values: &[Vec<u8>]) -> Result<Self> {
        let (host, driver) = (context.device.host_memory(), context.device.driver());
        let state = |values: &Vec<u8>| -> Result<LayerState> {
            let mut buffer = host.allocate(values.len())?;
            buffer.as_mut_slice().copy_from_slice(values);
            let event = || OwnedEvent::new(&driver, false);
            Ok(LayerState { host: buffer, ready: event()?, updated: event()? })
        };
        Ok(Self { layers: values.iter().map(state).collect::<Result<_>>()?, window: Mutex::default() })
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step whose updates come in this order.
    ///
    /// # Errors
    /// Errors of the allocator and of the driver.
    fn begin(&self, context: &Context, order: impl Iterator<Item = usize>) -> Result<()> {
        self.window().waiting = order.collect();
        (0..WINDOW).try_for_each(|_| self.fetch_next(context))
    }

    fn fetch_next(&self, context: &Context) -> Result<()> {
        let next = self.window().waiting.pop_front();
        next.map_or(Ok(()), |layer| self.fetch(context, layer))
    }

    /// Queues the copy of a layer's state to the device.
    fn fetch(&self, context: &Context, layer: usize) -> Result<()> {
        let (state, stream) = (&self.layers[layer], context.device.offload());
        let _range = context.device.range(format_args!("fetch state {}", layer + 1));
        let bytes = state.host.bytes();
        let master = context.memory.allocate(bytes as u64, stream)?;
        // SAFETY: the block is of this size and is freed on the stream later; the state was written by this stream, or before the
        // first step.
        unsafe { state.host.copy_to(0, master.addr(), bytes, stream)? };
        context.device.driver().event_record(state.ready.id, stream)?;
        self.window().on_device.push_back((layer, master));
        Ok(())
    }

    /// The state of a layer for work on `stream`.
    ///
    /// # Errors
    /// Errors of the allocator and of the driver.
    pub(super) fn take(&self, context: &Context, layer: usize, stream: StreamId) -> Result<DeviceBuffer> {
        let queued = |window: &mut Window| {
            let place = window.on_device.iter().position(|(number, _)| *number == layer)?;
            window.on_device.remove(place).map(|(_, master)| master)
        };
        let mut master = queued(&mut self.window());
        if master.is_none() {
            self.fetch(context, layer)?;
            master = queued(&mut self.window());
        }
        let driver = context.device.driver();
        let timed = || OwnedEvent::new(&driver, true);
        let events = if self.window().sampled { Some([timed()?, timed()?]) } else { None };
        if let Some([before, _]) = &events {
            driver.event_record(before.id, stream)?;
        }
        driver.stream_wait_event(stream, self.layers[layer].ready.id)?;
        if let Some([_, after]) = &events {
            driver.event_record(after.id, stream)?;
        }
        self.window().waits.extend(events);
        Ok(master.expect("the state was just fetched"))
    }

    /// Takes back the state of a layer behind its update on `stream`: it is copied to the host, and the next layer's is fetched.
    ///
    /// # Errors
    /// Errors of the allocator and of the driver.
    pub(super) fn put_back(
        &self,
        context: &Context,
        layer: usize,
        master: DeviceBuffer,
        stream: StreamId,
    ) -> Result<()> {
        let (state, own, driver) = (&self.layers[layer], context.device.offload(), context.device.driver());
        let _range = context.device.range(format_args!("store state {}", layer + 1));
        driver.event_record(state.updated.id, stream)?;
        driver.stream_wait_event(own, state.updated.id)?;
        // SAFETY: the block is of the buffer's size and is freed on this stream behind the copy; the buffer is used on this stream alone.
        unsafe { state.host.copy_from(master.addr(), own)? };
        drop(master);
        self.fetch_next(context)
    }

    /// The account of it; `waits` is the number of sampled steps and the time of their waits.
    fn record(&self, (steps, waited_ns): (u64, u64)) -> OffloadRecord {
        let bytes: Vec<u64> = self.layers.iter().map(|state| state.host.bytes() as u64).collect();
        let window = bytes.windows(WINDOW).map(|layers| layers.iter().sum()).max();
        OffloadRecord {
            state_bytes: bytes.iter().sum(),
            window_bytes: window.unwrap_or_else(|| bytes.iter().sum()),
            // CAST: nanoseconds of a run.
            step_wait_s: (steps > 0).then(|| waited_ns as f64 / 1e9 / steps as f64),
        }
    }
}

impl Mlp {
    /// Begins a step: `backward` if its updates come from the last layer to the first.
    pub(super) fn begin_offload(&self, context: &Context, backward: bool) -> Result<()> {
        let Some(offload) = &self.offload else { return Ok(()) };
        let layers = 0..self.layers.len();
        if backward { offload.begin(context, layers.rev()) } else { offload.begin(context, layers) }
    }

    /// Sets whether the waits of the next step for state on the host are timed.
    pub(crate) fn sample_waits(&self, sampled: bool) {
        if let Some(offload) = &self.offload {
            let window = &mut *offload.window();
            window.sampled = sampled;
            window.steps += u64::from(sampled);
        }
    }

    /// Number of steps that were sampled since the last call, and the time for which updates waited for state in them. The device
    /// has completed these steps.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn take_waits(&self, context: &Context) -> Result<(u64, u64)> {
        let Some(offload) = &self.offload else { return Ok((0, 0)) };
        let (steps, waits) = {
            let window = &mut *offload.window();
            (std::mem::take(&mut window.steps), std::mem::take(&mut window.waits))
        };
        let driver = context.device.driver();
        let elapsed = waits.iter().map(|[before, after]| driver.event_elapsed_ns(before.id, after.id));
        Ok((steps, elapsed.sum::<std::result::Result<u64, _>>()?))
    }

    /// The optimizer's state on the host, where it is there.
    pub(crate) fn offload_record(&self, waits: (u64, u64)) -> Option<OffloadRecord> {
        self.offload.as_ref().map(|offload| offload.record(waits))
    }
}
