//! Communicators: sums over ranks, and the memory that is registered for them.

use super::functions::{FLOAT32, RawComm, SUM, SYMMETRIC, TOTAL_MEMORY};
use super::{Id, Nccl};
use crate::error::{Result, TrainError};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

/// A communicator's handle, as a number.
#[derive(Debug, PartialEq, Eq)]
enum Handle {
    Live(usize),
    Aborted,
}

/// How memory is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registering {
    /// By `ncclCommRegister`: this rank's buffer, for peers that read or write it.
    Buffer,
    /// By `ncclCommWindowRegister` as symmetric memory: by all ranks together.
    Window,
}

/// Memory that is registered with a communicator.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    by: Registering,
    /// NCCL's handle, as a number.
    handle: usize,
}

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    /// Each rank gets the sum of the values of all.
    AllReduce,
    /// Each rank gets the values of all, by rank.
    AllGather,
}

/// A communicator: one rank of those that sum together.
#[derive(Debug)]
pub(crate) struct Communicator {
    nccl: Arc<Nccl>,
    /// Held for each call, so that an abort never frees what a call uses.
    handle: Mutex<Handle>,
}

impl Communicator {
    /// Joins the communicator with this id on the GPU whose context is current. Returns when all ranks have joined.
    ///
    /// # Errors
    /// [`TrainError::Nccl`].
    pub(crate) fn new(nccl: Arc<Nccl>, id: Id, rank: u32, size: u32) -> Result<Self> {
        let mut raw: RawComm = std::ptr::null_mut();
        // CAST: fewer than 2^31 ranks, each of which is a process.
        let (rank, size) = (rank as c_int, size as c_int);
        // SAFETY: the pointer is to a handle of the type that the call writes; a GPU's context is current.
        let code = unsafe { (nccl.functions.comm_init_rank)(&raw mut raw, size, id, rank) };
        nccl.check("ncclCommInitRank", code)?;
        // CAST: a handle is kept as its value, because NCCL may be called from any thread.
        Ok(Self { nccl, handle: Mutex::new(Handle::Live(raw as usize)) })
    }

    /// Makes a call with the live handle; the call returns NCCL's code.
    fn call(&self, name: &'static str, call: impl FnOnce(RawComm) -> c_int) -> Result<()> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let Handle::Live(raw) = *handle else {
            return Err(TrainError::Nccl { call: name, reason: "another rank failed".to_owned() });
        };
        // CAST: a handle is kept as its value.
        self.nccl.check(name, call(raw as RawComm))
    }

    /// Queues the sum over all ranks of `values` f32 at `addr`, in place.
    ///
    /// # Errors
    /// [`TrainError::Nccl`], also after an [abort](Self::abort).
    ///
    /// # Safety
    /// The memory is valid for the values until the stream, a live one of the communicator's GPU, has passed the call.
    pub(crate) unsafe fn all_reduce(&self, addr: u64, values: u64, stream: *mut c_void) -> Result<()> {
        // SAFETY: the caller promises memory and stream.
        unsafe { self.collect(Collective::AllReduce, (addr, addr), values, stream) }
    }

    /// Queues a collective on f32: from the first address, which has `values` of this rank, to the second, which has room for the
    /// result.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// Both ranges of memory are valid until the stream, a live one of the communicator's GPU, has passed the call.
    pub(crate) unsafe fn collect(
        &self,
        collective: Collective,
        (from, to): (u64, u64),
        values: u64,
        stream: *mut c_void,
    ) -> Result<()> {
        let functions = &self.nccl.functions;
        // CAST: addresses are kept as numbers; a size in memory fits.
        let (from, to, count) = (from as *const c_void, to as *mut c_void, values as usize);
        match collective {
            // SAFETY: the handle is live during the call; the caller promises memory and stream.
            Collective::AllReduce => self.call("ncclAllReduce", |raw| unsafe {
                (functions.all_reduce)(from, to, count, FLOAT32, SUM, raw, stream)
            }),
            // SAFETY: as above.
            Collective::AllGather => self
                .call("ncclAllGather", |raw| unsafe { (functions.all_gather)(from, to, count, FLOAT32, raw, stream) }),
        }
    }

    /// Registers memory; `None` where NCCL accepts it and registers nothing, or has no such function. All ranks register a window
    /// together.
    ///
    /// # Errors
    /// [`TrainError::Nccl`] for memory that cannot be registered.
    ///
    /// # Safety
    /// The memory is device or page-locked memory of this size and stays until [`deregister`](Self::deregister).
    pub(crate) unsafe fn register(&self, by: Registering, addr: u64, bytes: u64) -> Result<Option<Registration>> {
        let functions = &self.nccl.functions;
        let mut handle: *mut c_void = std::ptr::null_mut();
        // CAST: addresses are kept as numbers; a size in memory fits.
        let (memory, bytes) = (addr as *mut c_void, bytes as usize);
        match by {
            Registering::Buffer => {
                let Some(register) = functions.register else { return Ok(None) };
                // SAFETY: the handle is live during the call, the caller promises the memory, and the pointer is to a live handle.
                self.call("ncclCommRegister", |raw| unsafe { register(raw, memory, bytes, &raw mut handle) })?;
            }
            Registering::Window => {
                let Some(register) = functions.register_window else { return Ok(None) };
                // SAFETY: as above.
                self.call("ncclCommWindowRegister", |raw| unsafe {
                    register(raw, memory, bytes, &raw mut handle, SYMMETRIC)
                })?;
            }
        }
        // CAST: a handle is kept as its value.
        Ok((!handle.is_null()).then_some(Registration { by, handle: handle as usize }))
    }

    /// Ends a registration of this communicator, whose work has completed.
    ///
    /// # Errors
    /// [`TrainError::Nccl`].
    pub(crate) fn deregister(&self, registration: &Registration) -> Result<()> {
        let functions = &self.nccl.functions;
        let (name, deregister) = match registration.by {
            Registering::Buffer => ("ncclCommDeregister", functions.deregister),
            Registering::Window => ("ncclCommWindowDeregister", functions.deregister_window),
        };
        let Some(deregister) = deregister else { return Ok(()) };
        // CAST: a handle is kept as its value.
        let handle = registration.handle as *mut c_void;
        // SAFETY: the communicator is live during the call; the handle came from `register`, and NCCL refuses an unknown one.
        self.call(name, |raw| unsafe { deregister(raw, handle) })
    }

    /// Device memory that NCCL counts for this communicator; `None` where the version cannot report it.
    pub(crate) fn memory(&self) -> Option<u64> {
        let stats = self.nccl.functions.memory_stats?;
        let mut bytes = 0;
        // SAFETY: the handle is live during the call, and the pointer is to a live integer of the type that the call writes.
        let counted = self.call("ncclCommMemStats", |raw| unsafe { stats(raw, TOTAL_MEMORY, &raw mut bytes) });
        counted.ok().map(|()| bytes)
    }

    /// Ends the kernels that wait for other ranks. Does nothing while a call is under way: it may be that call which waits.
    pub(crate) fn abort(&self) {
        let Ok(mut handle) = self.handle.try_lock() else { return };
        if let Handle::Live(raw) = std::mem::replace(&mut *handle, Handle::Aborted) {
            // SAFETY: the handle was live, and no later call uses it. An error leaves the end to the process.
            let _ = unsafe { (self.nccl.functions.comm_abort)(raw as RawComm) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Handle::Live(raw) = *handle {
            // SAFETY: the handle is live and is used no more. An error leaves the rest to the process.
            let _ = unsafe { (self.nccl.functions.comm_destroy)(raw as RawComm) };
        }
    }
}
