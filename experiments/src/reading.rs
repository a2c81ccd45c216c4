//! What reading a history may take.

use clap::Args;
use vramlab::Bytes;
use vramlab::budget::Budget;
use vramlab::histories::trace::ReadOptions;

#[derive(Clone, Debug, Args)]
pub(crate) struct ReadArgs {
    /// Most memory that reading the history may take
    #[arg(long, value_name = "BYTES", default_value = "1GiB")]
    read_memory: Bytes,
}

impl Default for ReadArgs {
    fn default() -> Self {
        Self { read_memory: Bytes(Budget::DEFAULT) }
    }
}

impl ReadArgs {
    /// A part of the memory, for each of so many readings at a time.
    pub(crate) fn shared(&self, readings: u64) -> Self {
        Self { read_memory: Bytes(self.read_memory.0 / readings.max(1)) }
    }

    /// Options with a budget of their own: for one history.
    pub(crate) fn options(&self) -> ReadOptions {
        ReadOptions { format: None, budget: Budget::new(self.read_memory.0) }
    }
}
