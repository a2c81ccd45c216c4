//! Observers of a run's progress.

use crate::data::{Dataset, Progress};
use crate::device::Device;
use crate::record::{EpochRecord, Summary};
use crate::settings::Settings;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use vramlab::device::CallObserver;
use vramlab::{CallEvent, CallKind, DeviceAddr};

/// Is notified of progress; every method is optional.
pub trait Observer: Progress + Send + Sync + std::fmt::Debug {
    /// A device was opened.
    fn device(&self, _device: &Device) {}
    /// A data set was loaded.
    fn dataset(&self, _dataset: &Dataset) {}
    /// Training begins, with this many steps ahead.
    fn begin(&self, _settings: &Settings, _summary: &Summary, _steps: u64) {}
    /// A step begins.
    fn step(&self, _epoch: u32, _step: u64) {}
    /// An epoch's training steps are done and its validation begins.
    fn validation(&self, _epoch: u32) {}
    /// An epoch ended.
    fn epoch(&self, _epoch: &EpochRecord) {}
    /// A driver call that takes memory from the device or gives it back.
    fn memory_call(&self, _event: &CallEvent) {}
}

/// Ignores all notifications.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}

impl Observer for Silent {}

/// Passes the calls that move memory on to `observer`. A driver is given an address back and no size; it is known from
/// the call that gave the address out.
pub(crate) fn driver_call_log(observer: Arc<dyn Observer>) -> CallObserver {
    let sizes: Mutex<HashMap<DeviceAddr, u64>> = Mutex::default();
    Box::new(move |event: &CallEvent| {
        let moves_memory = matches!(
            event.kind,
            CallKind::MemAlloc
                | CallKind::MemFree
                | CallKind::MemAllocAsync
                | CallKind::MemFreeAsync
                | CallKind::MemCreate
                | CallKind::MemMap
                | CallKind::MemUnmap
                | CallKind::MemRelease
                | CallKind::PoolTrim
        );
        if moves_memory {
            let mut sizes = sizes.lock().unwrap_or_else(PoisonError::into_inner);
            let mut bytes = event.bytes;
            match (event.kind, event.addr) {
                (CallKind::MemAlloc | CallKind::MemAllocAsync, Some(addr)) if event.ok => {
                    sizes.insert(addr, bytes);
                }
                (CallKind::MemFree | CallKind::MemFreeAsync, Some(addr)) => {
                    bytes = sizes.get(&addr).copied().unwrap_or(bytes);
                    // A refused free leaves the memory where it is.
                    if event.ok {
                        sizes.remove(&addr);
                    }
                }
                _ => {}
            }
            drop(sizes);
            observer.memory_call(&CallEvent { bytes, ..*event });
        }
    })
}
