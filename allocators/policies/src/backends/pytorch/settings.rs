//! The settings of PyTorch's allocators.

use crate::policy::size::torch::{Divisions, LARGE_SEGMENT};
use vramlab_device::settings::{bytes, fraction, switch, text};

vramlab_device::settings! {
    /// Settings under PyTorch's names (`PYTORCH_ALLOC_CONF`).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct PyTorchSettings {
        /// Blocks of at least this size are not split, unless their segment is expandable, and never serve smaller requests.
        pub max_split_size: Option<u64> = None, bytes().at_least(LARGE_SEGMENT).or("none");
        /// How much larger than the request an unsplittable block may be.
        pub max_non_split_rounding: u64 = 20 << 20, bytes();
        /// Fraction of `memory_limit` above which idle segments are released before new ones are allocated; 0 turns it off.
        /// Expandable segments are excluded.
        pub garbage_collection_threshold: f64 = 0.0, fraction();
        /// Rounding to equal steps between powers of two.
        pub roundup_power2_divisions: Divisions = Divisions::default(), text(Divisions::FORM);
        /// Most bytes that may be reserved (`set_per_process_memory_fraction`).
        pub memory_limit: Option<u64> = None, bytes().or("none");
        /// After a cache flush has waited for deferred frees, search for a free block again before asking the device. PyTorch does
        /// not, so it misses a block that became free in that wait; off follows PyTorch.
        pub retry_fit_after_sync: bool = false, switch();
    }
    check PyTorchSettings::consistent;
}

impl PyTorchSettings {
    fn consistent(&self) -> Result<(), String> {
        if self.garbage_collection_threshold > 0.0 && self.memory_limit.is_none() {
            let text =
                "garbage_collection_threshold is a fraction of memory_limit, which is not given; set memory_limit, too";
            return Err(text.to_owned());
        }
        Ok(())
    }

    /// The settings that reduce fragmentation; `expandable` names the way to expandable segments, if there is one.
    pub fn against_fragmentation(&self, expandable: Option<&str>) -> Option<String> {
        let bound = match self.max_split_size {
            None => Some("set max_split_size".to_owned()),
            Some(least) if least <= LARGE_SEGMENT => None,
            Some(_) => Some("lower max_split_size".to_owned()),
        };
        let both: Vec<String> = bound.into_iter().chain(expandable.map(expandable_segments)).collect();
        (!both.is_empty()).then(|| both.join(", or "))
    }

    /// Whether PyTorch's native allocator does the same. `retry_fit_after_sync` fixes one of its faults.
    pub(crate) fn follows_pytorch(&self) -> bool {
        !self.retry_fit_after_sync
    }

    /// Blocks of at least this size are oversize.
    pub(crate) fn max_split(&self) -> u64 {
        self.max_split_size.unwrap_or(u64::MAX)
    }

    /// Bytes above which idle segments are collected; `None` when they never are.
    pub(crate) fn collect_above(&self) -> Option<u64> {
        let limit = self.memory_limit.filter(|_| self.garbage_collection_threshold > 0.0)?;
        // CAST: PyTorch computes it in the same way, in a double truncated to an integer.
        Some((self.garbage_collection_threshold * limit as f64) as u64)
    }
}

/// Advice to use expandable segments, by `how`.
pub(crate) fn expandable_segments(how: &str) -> String {
    format!("use expandable segments ({how})")
}
