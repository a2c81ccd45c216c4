//! Memory that the other GPUs of the machine can read and write.

use super::{CudaDriver, check, location_of, probe};
use crate::{CallKind, DriverResult};
use cudarc::driver::sys::{self, CUdevice, CUmemAccess_flags, CUmemAccessDesc};
use std::ffi::c_int;

impl CudaDriver {
    /// Opens memory that is mapped, and pools that are created, from now on to every other GPU that can reach this one; returns the
    /// number of these GPUs. Such pools can also be exported to other processes. Existing memory, and memory of `cuMemAlloc`, is
    /// not affected. A call that sets access then sets it for each GPU, so its cost grows with their number.
    ///
    /// # Errors
    /// When the driver refuses a query.
    pub fn open_to_peers(&self) -> DriverResult<usize> {
        let call = CallKind::DeviceQuery;
        let mut peers = Vec::new();
        for ordinal in (0..probe::count(call)?).filter(|ordinal| *ordinal != self.info.ordinal) {
            let mut peer: CUdevice = 0;
            // CAST: a number of GPUs.
            // SAFETY: the driver is started, and the pointer is to a live handle of the type that the call writes.
            self.call(call, || unsafe { sys::cuDeviceGet(&raw mut peer, ordinal as c_int) })?;
            let mut reaches: c_int = 0;
            // SAFETY: both devices came from cuDeviceGet, and the pointer is to a live integer of the type that the call writes.
            self.call(call, || unsafe { sys::cuDeviceCanAccessPeer(&raw mut reaches, peer, self.device) })?;
            peers.extend((reaches != 0).then_some(peer));
        }
        let count = peers.len();
        // A second call has no effect: the machine has the same GPUs.
        let _ = self.peers.set(peers);
        Ok(count)
    }

    /// Whether new memory is open to other GPUs.
    pub(super) fn is_open(&self) -> bool {
        self.peers.get().is_some()
    }

    /// Read and write access for other GPUs, where memory is open to them.
    pub(super) fn access_of_peers(&self) -> Vec<CUmemAccessDesc> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = |peer: &CUdevice| CUmemAccessDesc { location: location_of(*peer), flags };
        self.peers.get().map_or_else(Vec::new, |peers| peers.iter().map(access).collect())
    }

    /// Opens a pool to the other GPUs, where memory is open to them.
    ///
    /// # Safety
    /// The pool is a live one of this device.
    pub(super) unsafe fn open_pool(&self, pool: sys::CUmemoryPool) -> DriverResult<()> {
        let access = self.access_of_peers();
        if access.is_empty() {
            return Ok(());
        }
        let _entered = self.enter(CallKind::PoolAttribute)?;
        // SAFETY: the pool is live (the caller's promise); the pointer is to as many live descriptions as the count says.
        check(CallKind::PoolAttribute, unsafe { sys::cuMemPoolSetAccess(pool, access.as_ptr(), access.len()) })
    }
}
