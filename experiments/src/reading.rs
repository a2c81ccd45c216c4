//! What reading a history may take.

use clap::Args;
use std::path::Path;
use vramlab::Bytes;
use vramlab::budget::Budget;
use vramlab::histories::trace::ReadOptions;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ReadArgs {
    /// Most memory that reading the history may take [default: 1GiB]
    #[arg(long, value_name = "BYTES")]
    read_memory: Option<Bytes>,
}

impl ReadArgs {
    /// Options with a budget of their own: for one history.
    pub(crate) fn options(&self) -> ReadOptions {
        self.within(Budget::DEFAULT)
    }

    /// The same for a reading that keeps all events: where nothing was chosen, up to one and a half times a file that is
    /// larger than the default.
    pub(crate) fn keeping(&self, file: &Path) -> ReadOptions {
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        self.within(Budget::DEFAULT.max(bytes.saturating_add(bytes / 2)))
    }

    fn within(&self, default: u64) -> ReadOptions {
        let bytes = self.read_memory.map_or(default, |bytes| bytes.0);
        ReadOptions { format: None, budget: Budget::new(bytes) }
    }
}
