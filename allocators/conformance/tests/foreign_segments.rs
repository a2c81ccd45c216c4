//! The suite passes a correct policy whatever its segments, and fails a wrong one in one line.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use vramlab_conformance::{Device, conformance};
use vramlab_device::settings::{NoSettings, Settings as _};
use vramlab_policies::backends::{Backend, Capabilities, Pooled, Rules, SegmentUse, With};
use vramlab_policies::contract::Path;
use vramlab_policies::policy::Heap;
use vramlab_policies::policy::fit::Fit;
use vramlab_policies::policy::grow::{Ladder, SegmentSize};
use vramlab_policies::policy::size::{Size, SizeRule};
use vramlab_policies::policy::split::Split;

const SEGMENT: u64 = 64 << 20;

/// Multiples of 512 bytes from segments of 64 MiB, also where the device has less.
#[derive(Debug)]
struct Large;

impl SizeRule for Large {
    fn granule(&self) -> u64 {
        512
    }

    fn round(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(512)
    }

    fn segment(&self, rounded: u64) -> u64 {
        rounded.next_multiple_of(SEGMENT)
    }
}

/// An entry with these capabilities.
const fn backend(name: &'static str, capabilities: Capabilities) -> Backend {
    Backend {
        name,
        summary: "best fit in segments of 64 MiB",
        capabilities,
        compared: false,
        constructor: &With(|driver, _: &NoSettings| {
            let heap = Heap::plain(driver, None, Fit::best());
            let (size, split, ladder) = (Size::Custom(&Large), Split::Always, Ladder::releasing(SegmentSize::OfClass));
            let rules = Rules { name: "large", settings: NoSettings::default().json(), size, split, ladder };
            // SAFETY: the heap is new, the rules are the library's own policy, and `Large` does what its trait says.
            Ok(Arc::new(unsafe { Pooled::new(heap, rules) }))
        }),
    }
}

static LARGE: Backend = backend("large", Pooled::<Rules>::CAPABILITIES);

/// The same allocator, with wrong statements about it.
static WRONG: Backend = backend(
    "wrong",
    Capabilities {
        segments: SegmentUse::One,
        follows_pytorch: true,
        used_elsewhere: Path::Hit,
        private_pools: false,
        caches: false,
        retries: false,
        ..Pooled::<Rules>::CAPABILITIES
    },
);

/// The messages of the checks that fail, each behind its check's name.
fn failures(backend: &'static Backend) -> Vec<(String, String)> {
    let checks = conformance(backend, &[Device::Sim, Device::SimWithoutMemory, Device::Null]);
    let failure = |check: vramlab_conformance::Check| {
        let name = check.name().to_owned();
        let panic = catch_unwind(AssertUnwindSafe(|| check.run())).err()?;
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        Some((name, panic.downcast_ref::<String>().cloned().or(text).unwrap_or_default()))
    };
    checks.into_iter().filter_map(failure).collect()
}

#[test]
fn segments_of_64_mib_pass() {
    assert_eq!(failures(&LARGE), []);
}

#[test]
fn a_failure_is_one_line() {
    let failures = failures(&WRONG);
    assert!(failures.len() >= 10, "{failures:?}");
    for (name, message) in failures {
        let states = ["request: ", "; result: ", "; rule: "].iter().all(|word| message.contains(word));
        assert!(states && !message.contains('\n') && message.chars().count() < 700, "{name}: {message}");
    }
}
