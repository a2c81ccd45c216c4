//! The counted driver calls, and their counts.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

crate::named! {
    /// A kind of driver call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    pub enum CallKind {
        /// `cuMemAlloc`
        MemAlloc "mem_alloc",
        /// `cuMemFree`
        MemFree "mem_free",
        /// `cuMemAllocFromPoolAsync`
        MemAllocAsync "mem_alloc_async",
        /// `cuMemFreeAsync`
        MemFreeAsync "mem_free_async",
        /// `cuMemPoolCreate`
        PoolCreate "pool_create",
        /// `cuMemPoolDestroy`
        PoolDestroy "pool_destroy",
        /// `cuMemPoolGetAttribute`, `cuMemPoolSetAttribute`
        PoolAttribute "pool_attribute",
        /// `cuMemPoolTrimTo`
        PoolTrim "pool_trim",
        /// `cuMemAddressReserve`
        MemAddressReserve "mem_address_reserve",
        /// `cuMemAddressFree`
        MemAddressFree "mem_address_free",
        /// `cuMemCreate`
        MemCreate "mem_create",
        /// `cuMemMap`
        MemMap "mem_map",
        /// `cuMemSetAccess`
        MemSetAccess "mem_set_access",
        /// `cuMemUnmap`
        MemUnmap "mem_unmap",
        /// `cuMemRelease`
        MemRelease "mem_release",
        /// `cuMemExportToShareableHandle`
        MemExport "mem_export",
        /// `cuMemImportFromShareableHandle`
        MemImport "mem_import",
        /// `cuMemGetInfo`
        MemGetInfo "mem_get_info",
        /// `cuMemHostAlloc`
        HostAlloc "host_alloc",
        /// `cuMemFreeHost`
        HostFree "host_free",
        /// `cuMemHostRegister`
        HostRegister "host_register",
        /// `cuMemHostUnregister`
        HostUnregister "host_unregister",
        /// `cuLaunchKernel`
        KernelLaunch "kernel_launch",
        /// `cuMemcpyHtoDAsync`
        CopyToDevice "copy_to_device",
        /// `cuMemcpyDtoHAsync` and, to pageable memory, the wait for it
        CopyToHost "copy_to_host",
        /// `cuMemsetD8Async`
        Memset "memset",
        /// `cuStreamCreate`
        StreamCreate "stream_create",
        /// `cuStreamDestroy`
        StreamDestroy "stream_destroy",
        /// `cuStreamSynchronize`
        StreamSynchronize "stream_synchronize",
        /// `cuStreamWaitEvent`
        StreamWaitEvent "stream_wait_event",
        /// `cuStreamIsCapturing`, `cuStreamGetCaptureInfo`, `cuGraphNodeGetDependencies`
        StreamIsCapturing "stream_is_capturing",
        /// `cuCtxSynchronize`
        DeviceSynchronize "device_synchronize",
        /// `cuEventCreate`
        EventCreate "event_create",
        /// `cuEventDestroy`
        EventDestroy "event_destroy",
        /// `cuEventRecord`
        EventRecord "event_record",
        /// `cuEventQuery`
        EventQuery "event_query",
        /// `cuEventSynchronize`
        EventSynchronize "event_synchronize",
        /// `cuEventElapsedTime`
        EventElapsed "event_elapsed",
        /// `cuStreamBeginCapture`
        CaptureBegin "capture_begin",
        /// `cuStreamEndCapture`, `cuGraphInstantiate`, `cuGraphUpload`
        CaptureEnd "capture_end",
        /// `cuStreamEndCapture` of a capture that is thrown away
        CaptureAbort "capture_abort",
        /// `cuGraphLaunch`
        GraphLaunch "graph_launch",
        /// `cuGraphExecDestroy`
        GraphDestroy "graph_destroy",
        /// `cuDeviceGetGraphMemAttribute`
        GraphMemory "graph_memory",
        /// `cuDeviceGraphMemTrim`
        GraphTrim "graph_trim",
        /// `cuModuleLoadData`, `cuModuleGetFunction`
        ModuleLoad "module_load",
        /// `cuInit`, `cuDeviceGet*`, `cuCtx*`
        DeviceQuery "device_query",
    }
}

impl CallKind {
    /// Whether it allocates or releases memory of the device or addresses.
    #[must_use]
    pub fn moves_memory(self) -> bool {
        use CallKind::{
            MemAddressFree, MemAddressReserve, MemAlloc, MemAllocAsync, MemCreate, MemFree, MemFreeAsync, MemMap,
            MemRelease, MemSetAccess, MemUnmap, PoolTrim,
        };
        matches!(
            self,
            MemAlloc
                | MemFree
                | MemAllocAsync
                | MemFreeAsync
                | PoolTrim
                | MemAddressReserve
                | MemAddressFree
                | MemCreate
                | MemMap
                | MemSetAccess
                | MemUnmap
                | MemRelease
        )
    }
}

/// Number and time of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CallTotals {
    /// Number of calls, failed ones included.
    pub count: u64,
    /// Host time in them, in nanoseconds.
    pub total_ns: u64,
    /// Part of it that the host spent waiting for the device, in nanoseconds.
    pub blocked_ns: u64,
}

/// Totals for each kind of call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CallCounts([CallTotals; CallKind::COUNT]);

impl Default for CallCounts {
    fn default() -> Self {
        Self([CallTotals::default(); CallKind::COUNT])
    }
}

impl CallCounts {
    /// Totals of one kind.
    #[must_use]
    pub fn get(&self, kind: CallKind) -> CallTotals {
        self.0[kind as usize]
    }

    /// The kinds that were called, in report order.
    pub fn iter(&self) -> impl Iterator<Item = (CallKind, CallTotals)> {
        CallKind::ALL.iter().map(|&kind| (kind, self.get(kind))).filter(|(_, totals)| totals.count > 0)
    }

    /// The increase since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut out = *self;
        for (now, before) in out.0.iter_mut().zip(&earlier.0) {
            now.count -= before.count;
            now.total_ns -= before.total_ns;
            now.blocked_ns -= before.blocked_ns;
        }
        out
    }

    /// Calls that allocated memory from the device: plain and stream-ordered allocations and creations for mappings.
    #[must_use]
    pub fn driver_allocations(&self) -> u64 {
        [CallKind::MemAlloc, CallKind::MemAllocAsync, CallKind::MemCreate]
            .iter()
            .map(|&kind| self.get(kind).count)
            .sum()
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Serialize for CallCounts {
    /// A map from name to totals. The allocation, free and synchronise calls are always there, so that a zero is visible; other
    /// kinds appear when they were called.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        const ALWAYS: [CallKind; 5] = [
            CallKind::MemAlloc,
            CallKind::MemFree,
            CallKind::MemAllocAsync,
            CallKind::MemFreeAsync,
            CallKind::StreamSynchronize,
        ];
        let shown = CallKind::ALL.iter().filter(|kind| ALWAYS.contains(kind) || self.get(**kind).count > 0);
        let mut map = serializer.serialize_map(None)?;
        for kind in shown {
            map.serialize_entry(kind.name(), &self.get(*kind))?;
        }
        map.end()
    }
}

/// Totals that several threads add to.
#[derive(Debug)]
pub(super) struct SharedCounts {
    cells: [Cell; CallKind::COUNT],
}

impl Default for SharedCounts {
    fn default() -> Self {
        Self { cells: std::array::from_fn(|_| Cell::default()) }
    }
}

#[derive(Debug, Default)]
struct Cell {
    count: AtomicU64,
    total_ns: AtomicU64,
    blocked_ns: AtomicU64,
}

impl SharedCounts {
    pub(super) fn add(&self, kind: CallKind, total_ns: u64, blocked_ns: u64) {
        let cell = &self.cells[kind as usize];
        // Relaxed: the three values are statistics; no other memory depends on them.
        cell.count.fetch_add(1, Relaxed);
        cell.total_ns.fetch_add(total_ns, Relaxed);
        cell.blocked_ns.fetch_add(blocked_ns, Relaxed);
    }

    pub(super) fn read(&self) -> CallCounts {
        let mut out = CallCounts::default();
        for (totals, cell) in out.0.iter_mut().zip(&self.cells) {
            *totals = CallTotals {
                count: cell.count.load(Relaxed),
                total_ns: cell.total_ns.load(Relaxed),
                blocked_ns: cell.blocked_ns.load(Relaxed),
            };
        }
        out
    }
}
