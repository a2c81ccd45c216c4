//! The private pools of a history: those of CUDA graphs and `MemPool`s.

/// What is known of the private pools of a history.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrivatePools {
    /// How many there are. Operations name them by number, from 1.
    pub(crate) count: u32,
    /// From which operation on each that was released is asked for no more memory, in order.
    pub(crate) released: Vec<(u32, u32)>,
    /// In which operation which of them gives back by itself what is idle, in order. An operation with the number of a pool empties
    /// no other cache.
    pub(crate) trimmed: Vec<(u32, u32)>,
    /// Allocations from them.
    pub(crate) allocations: u64,
    /// Allocations whose pool the history does not tell.
    pub(crate) undetermined: u64,
}
