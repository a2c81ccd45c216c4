//! # `lab`: a policy put together from parts at run time
//!
//! `--alloc lab:fit=first,split=always,grow=doubling` is an allocator that nobody has written down. Each part is chosen by
//! name; [`policy`](crate::policy) has a file for each, which says what its kinds do and whose they are. With every part from
//! PyTorch, the default, it places every block as [`pytorch`] does. So one part at a time can be changed, and
//! what a history needs under it compared (`experiments compare`, `replay`, `capacity`).
//!
//! | part | kinds |
//! |---|---|
//! | `size` | `torch`, `torch-one-pool`, `rmm`, `bfc`, `power-of-two` |
//! | `fit` | `best`, `first`, `next`, `tlsf` |
//! | `split` | `torch`, `always`, `bfc`, `never` |
//! | `join` | `at-free`, `on-miss` |
//! | `stream` | `own`, `steal` |
//! | `grow` | `torch`, `doubling`, `fixed`, `exact` |
//! | `source` | `plain` |
//!
//! *A request* is rounded; then a free block of its own stream is looked for, then one of another stream if `stream` allows
//! it, then the ladder of `grow` is climbed. Every ladder ends like PyTorch's: what is cached goes back to the device, and it
//! is asked again. RMM's pool and BFC do not do this by default, so that what is compared is how they place blocks and not
//! when they give up. *A free* is PyTorch's under any parts.
//!
//! *Cost.* That of the parts: a search by `first` or `next` takes a step for each block that it passes over, `join=on-miss` sorts
//! the free blocks of the list on a miss, `steal` takes an event a free.

use super::caching::CachingSettings;
use super::pooled::{Policy, Pooled};
use super::pytorch::{self, PyTorch, collect_above};
use super::registry::{Backend, With};
use crate::contract::{AllocError, Path, PoolKind};
use crate::device::{Driver, StreamId};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, SegmentSize, Step};
use crate::policy::join::Join;
use crate::policy::size::Size;
use crate::policy::size::torch::Divisions;
use crate::policy::source::Source;
use crate::policy::split::{BFC_LARGEST_REST, Split};
use crate::policy::stream::{LastFrees, Stream};
use crate::settings::{Choice, Choices, Settings as _, bytes, choice, fraction, switch, text};
use crate::space::{Account, BlockId, FreeList, Owner, Space};
use serde::Serialize;
use std::sync::Arc;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "lab",
    summary: "a policy put together from parts: size, fit, split, stream, grow, source",
    capabilities: Pooled::<Lab>::CAPABILITIES,
    constructor: &With(|driver, settings: &LabSettings| Ok(Arc::new(Lab::new(driver, *settings)))),
};

/// A kind of each part by name.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $part:ident { $($(#[doc = $help:literal])+ $kind:ident $name:literal,)+ })+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub enum $part {
            $($(#[doc = $help])+ #[serde(rename = $name)] $kind,)+
        }

        impl Choices for $part {
            const ALL: &'static [Choice<Self>] = &[$(Choice { name: $name, value: $part::$kind },)+];
        }
    )+};
}

kinds! {
    /// How requests are rounded, see [`Size`].
    SizeKind {
        /// PyTorch.
        Torch "torch",
        /// PyTorch, without a pool for small requests.
        TorchOnePool "torch-one-pool",
        /// RMM's pool.
        Rmm "rmm",
        /// TensorFlow's and XLA's.
        Bfc "bfc",
        /// Powers of two.
        PowerOfTwo "power-of-two",
    }
    /// Which free block serves, see [`Fit`].
    FitKind {
        /// The smallest.
        Best "best",
        /// The lowest.
        First "first",
        /// The next one.
        Next "next",
        /// One of the first size class in which all fit.
        Tlsf "tlsf",
    }
    /// Whether blocks are split, see [`Split`].
    SplitKind {
        /// PyTorch.
        Torch "torch",
        /// Always.
        Always "always",
        /// TensorFlow's and XLA's.
        Bfc "bfc",
        /// Never.
        Never "never",
    }
    /// When free neighbours become one block, see [`Join`].
    JoinKind {
        /// At once.
        AtFree "at-free",
        /// When no free block fits.
        OnMiss "on-miss",
    }
    /// Whose blocks a stream may take, see [`Stream`].
    StreamKind {
        /// Its own.
        Own "own",
        /// Those of others, too.
        Steal "steal",
    }
    /// What happens when none fits, see [`Ladder`] and [`SegmentSize`].
    GrowKind {
        /// PyTorch's ladder and segments.
        Torch "torch",
        /// Each segment twice as large as the last.
        Doubling "doubling",
        /// Segments of one size.
        Fixed "fixed",
        /// As much as the request needs.
        Exact "exact",
    }
    /// Where segments come from, see [`Source`].
    SourceKind {
        /// One driver call each.
        Plain "plain",
    }
}

const TORCH: fn() -> CachingSettings = CachingSettings::default;

crate::settings! {
    /// A kind of each part, and what some of the kinds want to know.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct LabSettings {
        /// How requests are rounded.
        pub size: SizeKind = SizeKind::Torch, choice();
        /// Which free block serves a request.
        pub fit: FitKind = FitKind::Best, choice();
        /// Whether what is left of a block is cut off.
        pub split: SplitKind = SplitKind::Torch, choice();
        /// When free neighbours are joined.
        pub join: JoinKind = JoinKind::AtFree, choice();
        /// Whose free blocks a stream may take.
        pub stream: StreamKind = StreamKind::Own, choice();
        /// What happens when no free block fits.
        pub grow: GrowKind = GrowKind::Torch, choice();
        /// Where segments come from.
        pub source: SourceKind = SourceKind::Plain, choice();
        /// Segments of `grow=fixed`, and the first one of `grow=doubling`.
        pub segment: u64 = 64 << 20, bytes().at_least(2 << 20).at_most(1 << 40);
        /// Most bytes that may be reserved.
        pub memory_limit: Option<u64> = TORCH().memory_limit, bytes().or("none");
        /// Of `split=torch` and `grow=torch`, as `pytorch` has it.
        pub max_split_size: Option<u64> = TORCH().max_split_size, bytes().at_least(20 << 20).or("none");
        /// Of `split=torch`, as `pytorch` has it.
        pub max_non_split_rounding: u64 = TORCH().max_non_split_rounding, bytes();
        /// Of `grow=torch`, as `pytorch` has it.
        pub garbage_collection_threshold: f64 = TORCH().garbage_collection_threshold, fraction();
        /// Of `size=torch`, as `pytorch` has it.
        pub roundup_power2_divisions: Divisions = TORCH().roundup_power2_divisions, text(Divisions::FORM);
        /// Of `grow=torch`, as `pytorch` has it.
        pub retry_fit_after_sync: bool = TORCH().retry_fit_after_sync, switch();
    }
    check LabSettings::consistent;
}

impl LabSettings {
    /// What the kinds that are PyTorch's want to know.
    fn torch(&self) -> CachingSettings {
        CachingSettings {
            max_split_size: self.max_split_size,
            max_non_split_rounding: self.max_non_split_rounding,
            garbage_collection_threshold: self.garbage_collection_threshold,
            roundup_power2_divisions: self.roundup_power2_divisions,
            memory_limit: self.memory_limit,
            retry_fit_after_sync: self.retry_fit_after_sync,
        }
    }

    fn consistent(&self) -> Result<(), String> {
        self.torch().check()
    }

    fn size(&self) -> Size {
        match self.size {
            SizeKind::Torch => Size::Torch(self.roundup_power2_divisions),
            SizeKind::TorchOnePool => Size::TorchOnePool(self.roundup_power2_divisions),
            SizeKind::Rmm => Size::Rmm,
            SizeKind::Bfc => Size::Bfc,
            SizeKind::PowerOfTwo => Size::PowerOfTwo,
        }
    }

    fn fit(&self) -> Fit {
        match self.fit {
            FitKind::Best => Fit::best(),
            FitKind::First => Fit::first(),
            FitKind::Next => Fit::next(),
            FitKind::Tlsf => Fit::tlsf(),
        }
    }

    fn split(&self) -> Split {
        match self.split {
            SplitKind::Torch => pytorch::split(&self.torch()),
            SplitKind::Always => Split::Always,
            SplitKind::Bfc => Split::Bfc { largest_rest: BFC_LARGEST_REST },
            SplitKind::Never => Split::Never,
        }
    }

    fn ladder(&self) -> Ladder {
        let size = match self.grow {
            GrowKind::Torch => return PyTorch::ladder(&self.torch()),
            GrowKind::Doubling => SegmentSize::Doubling(self.segment),
            GrowKind::Fixed => SegmentSize::Fixed(self.segment),
            GrowKind::Exact => SegmentSize::Exact,
        };
        Ladder { steps: vec![Step::Segment, Step::ReleaseCached, Step::FitAgain, Step::SegmentAgain], size }
    }
}

/// Parts, see the [module](self).
#[derive(Debug)]
pub struct Lab {
    settings: LabSettings,
    size: Size,
    split: Split,
    ladder: Ladder,
}

impl Lab {
    /// An allocator with these parts on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: LabSettings) -> Pooled<Self> {
        let account = match settings.size {
            SizeKind::Torch => Account::with_pools(settings.max_split_size.unwrap_or(u64::MAX)),
            _ => Account::new(),
        };
        let stream = match settings.stream {
            StreamKind::Own => Stream::Own,
            StreamKind::Steal => Stream::Steal(LastFrees::default()),
        };
        let SourceKind::Plain = settings.source;
        let source = Source::Plain { driver, limit: settings.memory_limit };
        let join = match settings.join {
            JoinKind::AtFree => Join::AtFree,
            JoinKind::OnMiss => Join::OnMiss,
        };
        let heap = Heap::new(Space::new(account), settings.fit(), stream, source).with_join(join);
        let (size, split, ladder) = (settings.size(), settings.split(), settings.ladder());
        Pooled::over(heap, Self { settings, size, split, ladder })
    }
}

impl Policy for Lab {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn size(&self) -> &Size {
        &self.size
    }

    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        heap.process_events()?;
        let bytes = self.size.round(requested);
        let list = FreeList { owner, pool: self.size.pool(bytes) };
        if list.pool != Some(PoolKind::Small) && collect_above(&self.settings.torch()).is_some() {
            heap.space_mut().count_search();
        }
        let largest = self.split.largest(bytes);
        let own = |heap: &mut Heap| {
            let found = heap.find(list, bytes, largest);
            if found.is_none() && heap.join(list) { heap.find(list, bytes, largest) } else { found }
        };
        let find = |heap: &mut Heap| match own(heap) {
            Some(block) => Ok(Some((block, Path::Hit))),
            None => Ok(heap.steal(list, bytes, largest)?.map(|block| (block, Path::WaitInserted))),
        };
        let miss = Miss { list, bytes, segment: self.size.segment(bytes) };
        let found = match find(heap)? {
            Some(found) => Some(found),
            None => self.ladder.climb(heap, &miss, |heap| Ok(find(heap)?.map(|(block, _)| block)))?,
        };
        let (block, path) = found.ok_or_else(|| heap.out_of_memory(BACKEND.name, &miss, requested))?;
        let size = heap.space()[block].bytes;
        let cut = self.split.cuts(list.pool, bytes, size);
        heap.take(block, list, if cut { bytes } else { size }, requested);
        Ok((block, if cut && path == Path::Hit { Path::Split } else { path }))
    }

    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        pytorch::free(heap, block, users)
    }
}
