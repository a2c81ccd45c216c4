//! Several simulated GPUs with one virtual time.
//!
//! Each rank has a [`SimDriver`] with clocks of its own, in the same thread or in another process. Ranks influence each other only in
//! collectives: one starts when the last rank could start it, so that is the only time that they have to agree on. What a rank does
//! between two collectives does not depend on the others, so the virtual time is exact whatever the real order of the calls is.

use super::graphs::Node;
use super::{SimDriver, State};
use crate::{CallKind, DeviceAddr, DriverError, DriverResult, StreamId};
use std::fmt;
use std::sync::Arc;

/// The ranks that take part in collectives.
pub trait Ranks: Send + Sync + fmt::Debug {
    /// Number of ranks, this one included.
    fn count(&self) -> u64;

    /// Reports the virtual time at which this rank could start its next collective; returns the latest of all ranks. Waits until
    /// every rank has reported.
    ///
    /// # Errors
    /// A rank ended before it reported a time.
    fn last_start(&self, ready_ns: u64) -> DriverResult<u64>;
}

impl SimDriver {
    /// Makes this GPU one of several. A second call has no effect.
    pub fn join(&self, ranks: Arc<dyn Ranks>) {
        let _ = self.ranks.set(ranks);
    }

    /// Number of GPUs that take part in collectives.
    pub(super) fn ranks(&self) -> u64 {
        self.ranks.get().map_or(1, |ranks| ranks.count())
    }

    /// Queues a sum over all ranks of `bytes` bytes at `addr`. It starts when the last rank could start it and takes the time of the
    /// profile's links. The caller computes its effect on host memory itself, immediately. In a graph, a collective runs after the
    /// nodes before it and before those behind it.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for an unknown stream; the error of [`Ranks::last_start`].
    pub fn all_reduce(&self, stream: StreamId, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::KernelLaunch, stream)?;
        state.time.spend(self.profile.queues.launch_ns);
        self.queue_collective(&mut state, stream, Node::all_reduce(addr.get(), bytes))
    }

    /// Delays the next work on a stream, a collective of `bytes` bytes, until the last rank could start it. The links serve one
    /// collective after the other, also those of different streams: together they would have the same bandwidth.
    pub(super) fn meet(&self, state: &mut State, stream: StreamId, bytes: u64) -> DriverResult<()> {
        let ready_ns = state.time.start_of_next(stream.get(), self.profile.queues.start_latency_ns);
        let ready_ns = ready_ns.max(state.links_free_ns);
        let Some(ranks) = self.ranks.get() else { return Ok(()) };
        let start_ns = ranks.last_start(ready_ns)?;
        if start_ns < ready_ns {
            let context = format!("the ranks agreed on {start_ns} ns, and this one is ready at {ready_ns} ns");
            return Err(DriverError::illegal_state(CallKind::KernelLaunch, context));
        }
        state.time.delay_until(stream.get(), start_ns);
        state.links_free_ns = start_ns + self.profile.links.all_reduce_ns(ranks.count(), bytes);
        Ok(())
    }
}
