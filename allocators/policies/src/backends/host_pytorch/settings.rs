//! Releases of PyTorch, and the settings of its host allocator by their names in `PYTORCH_ALLOC_CONF`.

use serde::Serialize;
use vramlab_device::settings::{Kind, choice, number, switch};

const MIB: u64 = 1 << 20;

vramlab_device::named! {
    /// A release of PyTorch whose rules are followed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
    pub enum HostRelease {
        /// Power of two, always; `pinned_use_background_threads`.
        R2_6 "2.6",
        /// Statistics.
        R2_7 "2.7",
        /// The allocator has a parent, `at::HostAllocator`.
        R2_8 "2.8",
        /// As 2.8.
        R2_9 "2.9",
        /// A segment that is reserved in advance; a request no longer drains events of its size under background threads.
        R2_10 "2.10",
        /// Private pools for graph capture.
        R2_11 "2.11",
        /// As 2.11, with `pinned_free_catch_all`.
        R2_12 "2.12",
        /// Thresholds for rounding and caching.
        R2_13 "2.13",
        /// Histories and snapshots.
        R2_14 "2.14",
        /// A cached block serves only a request that it holds.
        R2_15 "2.15",
    }
}

impl HostRelease {
    /// The newest release whose rules are known here.
    pub const NEWEST: Self = Self::R2_15;

    /// The release of a version text such as `2.13.1+cu130`: the newest known one that is not newer. `None` for an older version
    /// and for other texts.
    #[must_use]
    pub fn of_version(version: &str) -> Option<Self> {
        let mut parts = version.split('.');
        let number = |text: Option<&str>| -> Option<u32> {
            let digits: String = text?.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        };
        let (major, minor) = (number(parts.next())?, number(parts.next())?);
        let of = |release: &Self| release.name().split_once('.').and_then(|(_, minor)| minor.parse::<u32>().ok());
        match major {
            0 | 1 => None,
            2 => Self::ALL.into_iter().rev().find(|release| of(release).is_some_and(|known| known <= minor)),
            _ => Some(Self::NEWEST),
        }
    }

    /// Whether it has `pinned_max_round_threshold_mb` and `pinned_max_cached_size_mb`.
    #[must_use]
    pub fn has_thresholds(self) -> bool {
        self >= Self::R2_13
    }

    /// Whether it has `pinned_reserve_segment_size_mb`.
    #[must_use]
    pub fn has_reserve(self) -> bool {
        self >= Self::R2_10
    }

    /// Whether a cached block is compared with the size of the request.
    #[must_use]
    pub fn checks_size(self) -> bool {
        self >= Self::R2_15
    }

    /// Whether a request drains events of blocks of its own size although a background thread drains the others.
    pub(super) fn drains_own_size(self) -> bool {
        self < Self::R2_10
    }
}

/// MiB, or no bound.
fn mebibytes() -> Kind<Option<u64>> {
    let read = |text: &str| match text {
        "none" => Some(None),
        text => text.parse::<u64>().ok().filter(|mib| *mib <= 1 << 40).map(Some),
    };
    let write = |value: &Option<u64>| value.map_or_else(|| "none".to_owned(), |mib| mib.to_string());
    Kind::new("MiB as a whole number, or none", read, write)
}

vramlab_device::settings! {
    /// Settings of PyTorch's host allocator.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HostPyTorchSettings {
        /// The release whose rules are followed.
        pub release: HostRelease = HostRelease::NEWEST, choice();
        /// Largest request that is rounded up to a power of two, from 2.13 on.
        pub pinned_max_round_threshold_mb: Option<u64> = None, mebibytes();
        /// Largest block that is cached when it is freed, from 2.13 on.
        pub pinned_max_cached_size_mb: Option<u64> = None, mebibytes();
        /// A thread drains the queue of events every 100 us, and requests do not.
        pub pinned_use_background_threads: bool = false, switch();
        /// Pin ordinary memory with cudaHostRegister in place of cudaHostAlloc.
        pub pinned_use_cuda_host_register: bool = false, switch();
        /// Threads that touch memory before it is registered.
        pub pinned_num_register_threads: u32 = 1, number(1..=128);
        /// A segment that is pinned at the first request, from which blocks are taken one behind another, from 2.10 on.
        pub pinned_reserve_segment_size_mb: u64 = 0, number(0..=1 << 40);
    }
    check HostPyTorchSettings::consistent;
}

impl HostPyTorchSettings {
    fn consistent(&self) -> Result<(), String> {
        let release = self.release;
        let since = |name: &str, first: &str| Err(format!("{name} is of PyTorch {first} and newer; this is {release}"));
        if self.pinned_max_round_threshold_mb.is_some() && !release.has_thresholds() {
            return since("pinned_max_round_threshold_mb", "2.13");
        }
        if self.pinned_max_cached_size_mb.is_some() && !release.has_thresholds() {
            return since("pinned_max_cached_size_mb", "2.13");
        }
        if self.pinned_reserve_segment_size_mb > 0 && !release.has_reserve() {
            return since("pinned_reserve_segment_size_mb", "2.10");
        }
        Ok(())
    }

    /// Largest block that is cached.
    pub(super) fn max_cached(&self) -> u64 {
        self.pinned_max_cached_size_mb.map_or(u64::MAX, |mib| mib.saturating_mul(MIB))
    }

    /// Bytes of the reserved segment; 0 without one.
    pub(super) fn reserve(&self) -> u64 {
        self.pinned_reserve_segment_size_mb.saturating_mul(MIB)
    }

    /// The size of the block for a request.
    #[must_use]
    pub fn round(&self, bytes: u64) -> u64 {
        let threshold = self.pinned_max_round_threshold_mb.map_or(u64::MAX, |mib| mib.saturating_mul(MIB));
        if bytes <= threshold && bytes <= self.max_cached() { bytes.next_power_of_two() } else { bytes }
    }

    /// Whether a request can get a cached block that is smaller than it: blocks of an exact size are cached, and the release does
    /// not compare sizes.
    #[must_use]
    pub fn can_overrun(&self) -> bool {
        let exact = self.pinned_max_round_threshold_mb.is_some_and(|mib| mib.saturating_mul(MIB) < self.max_cached());
        exact && !self.release.checks_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab_device::settings::Settings as _;

    #[test]
    fn a_version_belongs_to_the_newest_release_that_is_not_newer() {
        let of = |text: &str| HostRelease::of_version(text).map(HostRelease::name);
        assert_eq!(of("2.11.0+cu130"), Some("2.11"));
        assert_eq!(of("2.6.0a0+git12"), Some("2.6"));
        assert_eq!((of("2.99.1"), of("3.0")), (Some("2.15"), Some("2.15")));
        assert_eq!((of("2.5.1"), of("1.13"), of(""), of("nightly")), (None, None, None, None));
    }

    #[test]
    fn settings_of_a_later_release_are_refused() {
        for (name, value, before) in [
            ("pinned_max_round_threshold_mb", "1", "2.12"),
            ("pinned_max_cached_size_mb", "64", "2.12"),
            ("pinned_reserve_segment_size_mb", "512", "2.9"),
        ] {
            let mut settings = HostPyTorchSettings::default();
            settings.set(name, value).unwrap();
            assert_eq!(settings.check(), Ok(()));
            settings.set("release", before).unwrap();
            let error = settings.check().unwrap_err();
            assert!(error.contains(name) && error.ends_with(&format!("this is {before}")), "{error}");
        }
    }

    #[test]
    fn sizes_above_a_threshold_are_exact() {
        let settings = |threshold, cached| HostPyTorchSettings {
            pinned_max_round_threshold_mb: threshold,
            pinned_max_cached_size_mb: cached,
            ..HostPyTorchSettings::default()
        };
        assert_eq!(settings(None, None).round(5 << 30), 8 << 30);
        assert_eq!(settings(None, None).round(1), 1);
        assert_eq!(settings(Some(1), None).round(MIB), MIB);
        assert_eq!(settings(Some(1), None).round(MIB + 1), MIB + 1);
        assert_eq!(settings(Some(128), Some(64)).round(100 * MIB), 100 * MIB);
        assert_eq!(settings(Some(128), Some(64)).round(60 * MIB), 64 * MIB);
    }

    #[test]
    fn only_cached_exact_blocks_can_be_too_small() {
        let settings = |release, threshold, cached| HostPyTorchSettings {
            release,
            pinned_max_round_threshold_mb: threshold,
            pinned_max_cached_size_mb: cached,
            ..HostPyTorchSettings::default()
        };
        assert!(settings(HostRelease::R2_13, Some(128), Some(1024)).can_overrun());
        assert!(settings(HostRelease::R2_14, Some(128), None).can_overrun());
        assert!(!settings(HostRelease::R2_15, Some(128), Some(1024)).can_overrun());
        assert!(!settings(HostRelease::R2_13, Some(128), Some(128)).can_overrun());
        assert!(!settings(HostRelease::R2_13, None, Some(1024)).can_overrun());
    }
}
