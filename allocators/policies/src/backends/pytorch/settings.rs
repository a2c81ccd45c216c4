//! The settings of PyTorch's native policy, and those of `caching`, which are these and one more.

use crate::policy::size::torch::{Divisions, LARGE_SEGMENT};
use crate::settings::{Kind as _, Setting, SettingError, Settings, bytes, fraction, read, switch, text};
use serde_json::Value;

crate::settings! {
    /// Settings under PyTorch's names (`PYTORCH_ALLOC_CONF`).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct CachingSettings {
        /// Blocks of at least this size are never split, and smaller requests never take them.
        pub max_split_size: Option<u64> = None, bytes().at_least(LARGE_SEGMENT).or("none");
        /// How much larger than the request an unsplittable block may be.
        pub max_non_split_rounding: u64 = 20 << 20, bytes();
        /// Fraction of `memory_limit` above which idle segments are released before new ones are taken; 0 turns it off.
        pub garbage_collection_threshold: f64 = 0.0, fraction();
        /// Rounding to equal steps between powers of two.
        pub roundup_power2_divisions: Divisions = Divisions::default(), text(Divisions::FORM);
        /// Most bytes that may be reserved (`set_per_process_memory_fraction`).
        pub memory_limit: Option<u64> = None, bytes().or("none");
        /// After the release of the whole cache has waited for pending frees, look for a free block again before asking the
        /// device. PyTorch does not, so a block that became free in that wait is missed; off follows it.
        pub retry_fit_after_sync: bool = false, switch();
    }
    check CachingSettings::consistent;
}

impl CachingSettings {
    fn consistent(&self) -> Result<(), String> {
        if self.garbage_collection_threshold > 0.0 && self.memory_limit.is_none() {
            let text =
                "garbage_collection_threshold is a fraction of memory_limit, which is not given; set memory_limit, too";
            return Err(text.to_owned());
        }
        Ok(())
    }

    /// What can be set against free memory in pieces; `expandable` says how expandable segments are had, if they can be.
    pub(crate) fn against_fragmentation(&self, expandable: Option<&str>) -> Option<String> {
        let bound = match self.max_split_size {
            None => Some("set max_split_size".to_owned()),
            Some(least) if least <= LARGE_SEGMENT => None,
            Some(_) => Some("lower max_split_size".to_owned()),
        };
        let both: Vec<String> = bound.into_iter().chain(expandable.map(expandable_segments)).collect();
        (!both.is_empty()).then(|| both.join(", or "))
    }

    /// Whether PyTorch's native allocator does the same. `retry_fit_after_sync` mends one of its faults.
    pub(in crate::backends) fn follows_pytorch(&self) -> bool {
        !self.retry_fit_after_sync
    }

    pub(super) fn max_split(&self) -> u64 {
        self.max_split_size.unwrap_or(u64::MAX)
    }

    pub(super) fn collects(&self) -> bool {
        self.memory_limit.is_some() && self.garbage_collection_threshold > 0.0
    }
}

/// Advice to use expandable segments, which are had by `how`.
pub(in crate::backends) fn expandable_segments(how: &str) -> String {
    format!("use expandable segments ({how})")
}

/// Settings of `caching`: those of PyTorch's native policy, and which segments it has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpandableCachingSettings {
    /// Those that `pytorch` has, too.
    pub torch: CachingSettings,
    /// Map memory behind large ranges of addresses (`expandable_segments`).
    pub expandable_segments: bool,
}

const EXPANDABLE_SEGMENTS: &str = "expandable_segments";

impl Settings for ExpandableCachingSettings {
    fn list(&self) -> Vec<Setting> {
        let help = "Map memory behind large ranges of addresses, as pytorch-expandable does. The device needs virtual memory \
                    management";
        let (value, takes) = (switch().write(&self.expandable_segments), switch().takes());
        let own = Setting { name: EXPANDABLE_SEGMENTS, value, takes, help: help.to_owned() };
        self.torch.list().into_iter().chain([own]).collect()
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        if name == EXPANDABLE_SEGMENTS {
            self.expandable_segments = read(EXPANDABLE_SEGMENTS, &switch(), value)?;
            return Ok(());
        }
        self.torch.set(name, value).map_err(|error| match error {
            SettingError::Unknown { name, mut among } => {
                among.push(EXPANDABLE_SEGMENTS);
                SettingError::Unknown { name, among }
            }
            other => other,
        })
    }

    fn get(&self, name: &str) -> Option<String> {
        if name == EXPANDABLE_SEGMENTS {
            return Some(switch().write(&self.expandable_segments));
        }
        self.torch.get(name)
    }

    fn json(&self) -> Value {
        let mut out = self.torch.json();
        out[EXPANDABLE_SEGMENTS] = self.expandable_segments.into();
        out
    }

    fn check(&self) -> Result<(), String> {
        self.torch.check()
    }

    fn boxed(&self) -> Box<dyn Settings> {
        Box::new(*self)
    }

    fn take_over(&mut self, other: &dyn Settings) -> bool {
        other.get_as().is_some_and(|torch| {
            self.torch = *torch;
            true
        })
    }
}
