//! Where a run asked the driver for memory for the last time.

use crate::record::{EpochRecord, StepRow};

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastAllocation {
    /// A training step, both numbers from 1.
    Step {
        /// Epoch.
        epoch: u32,
        /// Step of the epoch.
        step: u64,
    },
    /// The validation after an epoch's steps.
    Validation {
        /// Epoch, from 1.
        epoch: u32,
    },
}

impl LastAllocation {
    /// The last in an epoch, of which there are the steps and, if it ended well, the record; `None` where there was none.
    pub(super) fn of_epoch(epoch: u32, rows: &[StepRow], record: Option<&EpochRecord>) -> Option<Self> {
        let in_steps: u64 = rows.iter().map(|row| row.driver_allocations).sum();
        if record.is_some_and(|record| record.driver_calls.driver_allocations() > in_steps) {
            return Some(Self::Validation { epoch });
        }
        let last = rows.iter().rfind(|row| row.driver_allocations > 0);
        last.map(|row| Self::Step { epoch, step: row.step })
    }
}
