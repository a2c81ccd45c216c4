//! Why a history cannot be compiled or replayed.

use vramlab_device::DriverError;
use vramlab_device::budget::OverBudget;
use vramlab_policies::contract::AllocError;

/// Why a history cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// An event contradicts the ones before it or names what cannot be.
    #[error("event {number}: {what}")]
    Event {
        /// Number of the event, from 1.
        number: u64,
        /// What is wrong with it.
        what: String,
    },
    /// The history as a whole cannot be replayed in the way that was asked for.
    #[error("{0}")]
    History(String),
    /// The allocator failed for another reason than memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The device failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The history needs more memory than its compilation may take.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
}

impl ReplayError {
    /// Whether the history is at fault and not the device.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        matches!(self, Self::Event { .. } | Self::History(_) | Self::TooLarge(_))
    }
}
