//! Operations that are described now and launched later, as parts of one launch.

use super::Device;
use crate::error::Result;
use kernels::{Operation, Precision};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use vramlab::{DeviceBuffer, Memory};

#[derive(Debug, Default)]
pub(super) struct Recording {
    on: AtomicBool,
    operations: Mutex<Vec<Box<dyn Operation>>>,
}

impl Recording {
    /// Whether the operation is noted instead of being launched.
    pub(super) fn takes(&self, operation: &dyn Operation) -> bool {
        let on = self.on.load(Relaxed);
        if on {
            self.operations.lock().unwrap_or_else(PoisonError::into_inner).push(operation.boxed());
        }
        on
    }
}

/// What would have been launched, with the memory that it uses: as long as this lives, its addresses are its own.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) operations: Vec<Box<dyn Operation>>,
    pub(crate) buffers: Vec<Arc<DeviceBuffer>>,
}

impl Device {
    /// Notes the operations that `queue` would run; nothing is launched. The buffers that it drops are kept.
    ///
    /// # Errors
    /// Those of `queue`.
    pub(crate) fn record(&self, memory: &Memory, queue: impl FnOnce() -> Result<()>) -> Result<Recorded> {
        let _range = self.range(format_args!("record"));
        self.recording.on.store(true, Relaxed);
        let (queued, buffers) = memory.hold(queue);
        self.recording.on.store(false, Relaxed);
        let operations = std::mem::take(&mut *self.recording.operations.lock().unwrap_or_else(PoisonError::into_inner));
        queued?;
        Ok(Recorded { operations, buffers })
    }

    /// Has the kernel that does many steps ready.
    ///
    /// # Errors
    /// Those of loading it.
    pub(crate) fn prepare_persistent(&self, precision: Precision) -> Result<()> {
        self.executor.prepare_persistent(precision)
    }
}
