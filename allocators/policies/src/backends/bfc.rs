//! # `bfc`: best fit with coalescing, of TensorFlow, XLA and JAX
//!
//! The policy of `tsl::BFCAllocator`, from which ONNX Runtime's arena is derived.
//!
//! *Idea.* Regions from the device grow in powers of two, so there are few calls. A free block is split only when the remainder is
//! large enough, and is coalesced with its neighbours when it is free again.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 256 bytes.
//! 2. The smallest free block that fits is taken; of equal blocks the one with the lowest address. (There it is in one of 21 bins
//!    by power of two. The bins are searched from the smallest up, each in order of size, so this is the best fit.)
//! 3. The block is split if it is at least twice as large as the request, or if the remainder is at least
//!    `max_dead_bytes_per_chunk`. Otherwise the request gets all of it.
//! 4. When none fits, a region is allocated: at first of `initial_region`, and twice as much each time; a request that is larger
//!    doubles it until it fits, and the next region has that size, too. A region never exceeds the remaining `memory_limit`. If the
//!    device refuses, nine tenths of the size are requested (in 32-bit floating point), and so on down to the size of the request.
//! 5. Then deferred frees are waited for; with `garbage_collection` unused regions are released if that makes enough room, and a
//!    region is requested again.
//!
//! *A free* (`free`). The block is coalesced with the free block behind it, then with the one in front of it.
//!
//! *Without growth* (`allow_growth=off`, as JAX has it by default with three quarters of the device) the first region is the
//! whole `memory_limit`.
//!
//! *ONNX Runtime* has two more settings. With `extend=same-as-requested` a region has the size of the request (`kSameAsRequested`
//! there). `max_dead_bytes_per_chunk` is fixed at 128 MiB in the others.
//!
//! *Differences.* There one stream does all the work, or a time stamp in each block shows when all streams may have it. Here a
//! block belongs to its stream; a stream without a fitting block takes another stream's and waits for its last use on the device,
//! as in ONNX Runtime; and before a request is refused, the free blocks of all streams are combined. The debugging statistics and
//! the retry that sleeps for up to ten seconds are not modelled.
//!
//! *Good at* few driver calls, and at keeping large blocks unsplit. *Bad at* memory: unsplit blocks waste up to half of their size,
//! and a doubled region may never be needed.
//!
//! *Cost.* O(log n) in the free blocks for a request and for a free. An event is recorded at each free.
//!
//! *Source.* XLA `xla/tsl/framework/bfc_allocator.cc` (`AllocateRawInternal`, `FindChunkPtr`, `Extend`, `Coalesce`,
//! `DeallocateFreeRegions`); ONNX Runtime `onnxruntime/core/framework/bfc_arena.cc`.

use super::pooled::{Found, Policy, Pooled, Rules};
use super::registry::{Backend, Capabilities, StreamUse, Varying};
use crate::contract::{GUARANTEED_ALIGN, Path};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, SegmentSize, Step};
use crate::policy::size::Size;
use crate::policy::split::{BFC_LARGEST_REST, Split};
use crate::space::FreeList;
use serde::Serialize;
use std::sync::Arc;
use vramlab_device::settings::{Settings as _, bytes, choice, switch};
use vramlab_device::{Driver, DriverError};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "bfc",
    summary: "best fit with coalescing, of TensorFlow, XLA and ONNX Runtime: regions that double, few splits",
    capabilities: Capabilities {
        streams: StreamUse::Any,
        coalesces: false,
        keeps_segments: true,
        ..Pooled::<Bfc>::CAPABILITIES
    },
    compared: false,
    constructor: &Varying {
        capabilities: |default, settings: &BfcSettings| Capabilities {
            keeps_segments: !settings.garbage_collection,
            ..default
        },
        build: |driver, settings| Ok(Arc::new(Bfc::new(driver, *settings))),
    },
};

vramlab_device::named! {
    /// The size of a region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Extend {
        /// Twice as large as the last one.
        NextPowerOfTwo "next-power-of-two",
        /// As large as the request.
        SameAsRequested "same-as-requested",
    }
}

vramlab_device::settings! {
    /// Settings of BFC.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct BfcSettings {
        /// Maximum of reserved bytes.
        pub memory_limit: Option<u64> = None, bytes().or("none");
        /// Allocate regions on demand, not the whole limit at the start.
        pub allow_growth: bool = true, switch();
        /// Bytes of the first region.
        pub initial_region: u64 = 2 << 20, bytes().at_least(GUARANTEED_ALIGN).at_most(1 << 48);
        /// Size of a region: ONNX Runtime's arena_extend_strategy.
        pub extend: Extend = Extend::NextPowerOfTwo, choice();
        /// A remainder of at least this size is split off any block.
        pub max_dead_bytes_per_chunk: u64 = BFC_LARGEST_REST, bytes();
        /// Release unused regions before a request is refused.
        pub garbage_collection: bool = false, switch();
    }
    check BfcSettings::consistent;
}

impl BfcSettings {
    fn consistent(&self) -> Result<(), String> {
        if !self.initial_region.is_multiple_of(GUARANTEED_ALIGN) {
            let Self { initial_region, .. } = self;
            return Err(format!(
                "initial_region is {initial_region}; regions are multiples of {GUARANTEED_ALIGN} bytes"
            ));
        }
        if self.allow_growth {
            return Ok(());
        }
        match (self.memory_limit, self.extend) {
            (None, _) => {
                Err("allow_growth=off takes the whole memory_limit at the start; set memory_limit, too".to_owned())
            }
            (_, Extend::SameAsRequested) => {
                Err("allow_growth=off and extend=same-as-requested contradict each other; leave one out".to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// BFC's rules, see the [module](self).
#[derive(Debug)]
pub struct Bfc(Rules);

impl Bfc {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: BfcSettings) -> Pooled<Self> {
        let heap = Heap::plain(driver, settings.memory_limit, Fit::best()).with_steals();
        // 4. and 5.
        let mut steps = vec![Step::Segment, Step::WaitForFrees, Step::FitAgain];
        if settings.garbage_collection {
            steps.extend([Step::ReleaseIfEnough, Step::SegmentAgain]);
        }
        let fixed = settings.memory_limit.filter(|_| !settings.allow_growth);
        let first = fixed.unwrap_or(settings.initial_region).max(1);
        let ladder = Ladder {
            steps,
            size: match settings.extend {
                Extend::NextPowerOfTwo => SegmentSize::Region { next: first.into() },
                Extend::SameAsRequested => SegmentSize::Exact,
            },
        };
        // 3.
        let split = Split::Bfc { largest_rest: settings.max_dead_bytes_per_chunk };
        let (name, settings, size) = (BACKEND.name, settings.json(), Size::Multiple(GUARANTEED_ALIGN));
        Pooled::over(heap, Self(Rules { name, settings, size, split, ladder }))
    }
}

impl Policy for Bfc {
    fn rules(&self) -> &Rules {
        &self.0
    }

    /// `FindChunkPtr`, among the stream's own blocks first.
    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        match heap.find(list, bytes, u64::MAX) {
            Some(block) => Ok(Some((block, Path::Hit))),
            None => Ok(heap.steal(list, bytes, u64::MAX)?.map(|block| (block, Path::WaitInserted))),
        }
    }

    /// 5. Before a request is refused the free blocks of all streams are combined.
    fn find_again(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        match self.find(heap, list, bytes)? {
            Some(found) => Ok(Some(found)),
            None => Ok(heap.take_over(list, bytes, u64::MAX, true)?.map(|block| (block, Path::WaitInserted))),
        }
    }
}
