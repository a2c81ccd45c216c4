//! # `lab`: a policy composed of parts at run time
//!
//! `--alloc lab:fit=first,split=always,grow=doubling` is an allocator without a file of its own. Each part is chosen by name;
//! [`policy`](crate::policy) has a file for each, which documents its kinds and their sources. With every part from PyTorch, the
//! default, it places every block as [`pytorch`] does. So one part at a time can be changed, and the memory that a recording needs
//! with it compared (`experiments compare`, `replay`, `capacity`).
//!
//! | part | kinds |
//! |---|---|
//! | `size` | `torch`, `torch-one-pool`, `rmm`, `bfc`, `power-of-two` |
//! | `fit` | `best`, `first`, `next`, `tlsf` |
//! | `split` | `torch`, `always`, `bfc`, `never` |
//! | `join` | `at-free`, `on-miss` |
//! | `stream` | `own`, `steal` |
//! | `grow` | `torch`, `doubling`, `fixed`, `exact` |
//! | `source` | `plain`, `expandable` |
//!
//! *A request* is rounded; then a free block of its own stream is searched, then one of another stream if `stream` allows it, then
//! the ladder of `grow` is tried. Every ladder ends like PyTorch's: the cache is released, and the device is asked again. RMM's
//! pool and BFC do not do this by default, so the comparison is of the placement of blocks and not of the moment of giving up. *A
//! free* is PyTorch's, except with `join=on-miss`, which does not coalesce the block.
//!
//! *With `source=expandable`* memory is mapped in ranges of addresses, and with every other part from PyTorch it places each block
//! as [`pytorch-expandable`](super::expandable) does. `grow=exact` maps handles of 2 MiB in both pools. A range belongs to one
//! stream, and free neighbours coalesce immediately, so it requires `stream=own`, `join=at-free` and `grow=torch` or `grow=exact`.
//!
//! *Cost.* That of the parts: a search by `first` or `next` takes a step for each skipped block, `join=on-miss` sorts the free
//! blocks of the list on a miss, `steal` takes an event for each free.

use super::expandable::{self, ExpandableSettings, PyTorchExpandable};
use super::pooled::{Found, Policy, Pooled, Rules};
use super::pytorch::{self, PyTorchSettings, expandable_segments};
use super::registry::{Backend, Capabilities, Needs, SegmentUse, StreamUse, Varying};
use crate::contract::{AllocError, GUARANTEED_ALIGN, Path, PoolKind};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, SegmentSize};
use crate::policy::join::Join;
use crate::policy::size::Size;
use crate::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT};
use crate::policy::source::{Expandable, Sizes, Source};
use crate::policy::split::{BFC_LARGEST_REST, Split};
use crate::policy::stream::Stream;
use crate::space::{Account, FreeList, Space};
use serde::Serialize;
use std::sync::Arc;
use vramlab_device::settings::{Settings as _, bytes, choice};
use vramlab_device::{Driver, DriverError};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "lab",
    summary: "a policy composed of parts: size, fit, split, stream, grow, source",
    capabilities: Capabilities { follows_pytorch: true, ..Pooled::<Lab>::CAPABILITIES },
    // With its default settings it places every block where `caching` does.
    compared: false,
    constructor: &Varying {
        capabilities: |default, settings: &LabSettings| settings.capabilities(default),
        build: |driver, settings| Ok(Arc::new(Lab::new(driver, *settings)?)),
    },
};

vramlab_device::named! {
    /// How requests are rounded, see [`Size`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum SizeKind {
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
}

vramlab_device::named! {
    /// Which free block serves, see [`Fit`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum FitKind {
        /// The smallest.
        Best "best",
        /// The lowest.
        First "first",
        /// The next block.
        Next "next",
        /// A block of the first size class in which all fit.
        Tlsf "tlsf",
    }
}

vramlab_device::named! {
    /// Whether blocks are split, see [`Split`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum SplitKind {
        /// PyTorch.
        Torch "torch",
        /// Always.
        Always "always",
        /// TensorFlow's and XLA's.
        Bfc "bfc",
        /// Never.
        Never "never",
    }
}

vramlab_device::named! {
    /// Whose blocks a stream may take, see [`Stream`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum StreamKind {
        /// Its own.
        Own "own",
        /// Also those of other streams.
        Steal "steal",
    }
}

vramlab_device::named! {
    /// The steps when no free block fits, see [`Ladder`] and [`SegmentSize`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum GrowKind {
        /// PyTorch's ladder and segments.
        Torch "torch",
        /// Each segment twice as large as the largest of its free list.
        Doubling "doubling",
        /// Segments of one size.
        Fixed "fixed",
        /// The size of the request.
        Exact "exact",
    }
}

vramlab_device::named! {
    /// Where segments come from, see [`Source`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum SourceKind {
        /// One driver call each.
        Plain "plain",
        /// Ranges of addresses that are mapped in parts.
        Expandable "expandable",
    }
}

vramlab_device::settings! {
    /// A kind of each part, and the parameters of some kinds.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct LabSettings extends torch: PyTorchSettings {
        /// How requests are rounded.
        pub size: SizeKind = SizeKind::Torch, choice();
        /// Which free block serves a request.
        pub fit: FitKind = FitKind::Best, choice();
        /// Whether a block is split.
        pub split: SplitKind = SplitKind::Torch, choice();
        /// When free neighbours coalesce.
        pub join: Join = Join::AtFree, choice();
        /// Whose free blocks a stream may take.
        pub stream: StreamKind = StreamKind::Own, choice();
        /// The steps when no free block fits.
        pub grow: GrowKind = GrowKind::Torch, choice();
        /// Where segments come from.
        pub source: SourceKind = SourceKind::Plain, choice();
        /// Segments of `grow=fixed`, and the first one of `grow=doubling`.
        pub segment: u64 = 64 << 20, bytes().at_least(2 << 20).at_most(1 << 40);
    }
    check LabSettings::consistent;
}

impl LabSettings {
    fn consistent(&self) -> Result<(), String> {
        let goes = self.stream == StreamKind::Own
            && self.join == Join::AtFree
            && matches!(self.grow, GrowKind::Torch | GrowKind::Exact);
        if self.source == SourceKind::Plain || goes {
            return Ok(());
        }
        Err("source=expandable requires stream=own, join=at-free and grow=torch or grow=exact; write source=plain"
            .into())
    }

    /// The settings that reduce fragmentation.
    fn against_fragmentation(&self) -> Option<String> {
        let expandable = Self { source: SourceKind::Expandable, ..*self };
        let parts = expandable.consistent().is_ok().then_some("source=expandable");
        if self.source == SourceKind::Expandable {
            None
        } else if self.split == SplitKind::Torch {
            self.torch.against_fragmentation(parts)
        } else {
            parts.map(expandable_segments)
        }
    }

    /// The capabilities with these parts, from those with PyTorch's.
    fn capabilities(&self, torch: Capabilities) -> Capabilities {
        let Self { size, fit, split, join, stream, grow, source, .. } = *self;
        let parts = (size, fit, split, grow, source);
        let are_torch = parts == (SizeKind::Torch, FitKind::Best, SplitKind::Torch, GrowKind::Torch, SourceKind::Plain);
        // Free neighbours that other streams may still use coalesce later.
        let coalesces = join == Join::AtFree && stream == StreamKind::Own;
        let of_parts = Capabilities {
            streams: if stream == StreamKind::Steal { StreamUse::Any } else { torch.streams },
            coalesces,
            follows_pytorch: are_torch && coalesces && self.torch.follows_pytorch(),
            ..torch
        };
        match source {
            SourceKind::Plain => of_parts,
            SourceKind::Expandable => {
                Capabilities { needs: Needs::Vmm, segments: SegmentUse::Expandable, restores: false, ..of_parts }
            }
        }
    }

    /// Where memory comes from.
    fn source(&self, driver: Arc<dyn Driver>) -> Result<Source, AllocError> {
        let limit = self.torch.memory_limit;
        if self.source == SourceKind::Plain {
            return Ok(Source::Plain { driver, limit });
        }
        let large = if self.grow == GrowKind::Exact { SMALL_SEGMENT } else { LARGE_SEGMENT };
        let sizes = Sizes { small: SMALL_SEGMENT, large, reserve: None };
        let needed = "virtual memory management for source=expandable (pytorch and caching do without it)";
        let source = Expandable::new(BACKEND.name, driver, limit, sizes).map_err(expandable::needed_for(needed))?;
        Ok(Source::Expandable(source))
    }

    fn size(&self) -> Size {
        match self.size {
            SizeKind::Torch => Size::Torch(self.torch.roundup_power2_divisions),
            SizeKind::TorchOnePool => Size::TorchOnePool(self.torch.roundup_power2_divisions),
            SizeKind::Rmm | SizeKind::Bfc => Size::Multiple(GUARANTEED_ALIGN),
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
            // PyTorch splits off every remainder in ranges that grow.
            SplitKind::Torch if self.source == SourceKind::Expandable => expandable::split(&self.torch),
            SplitKind::Torch => pytorch::split(&self.torch),
            SplitKind::Always => Split::Always,
            SplitKind::Bfc => Split::Bfc { largest_rest: BFC_LARGEST_REST },
            SplitKind::Never => Split::Never,
        }
    }

    fn ladder(&self) -> Ladder {
        let size = match self.grow {
            GrowKind::Torch => return pytorch::ladder(&self.torch),
            GrowKind::Doubling => SegmentSize::Doubling(self.segment),
            GrowKind::Fixed => SegmentSize::Fixed(self.segment),
            GrowKind::Exact => SegmentSize::Exact,
        };
        Ladder::releasing(size)
    }
}

/// Parts, see the [module](self).
#[derive(Debug)]
pub struct Lab {
    settings: LabSettings,
    rules: Rules,
    /// With `source=expandable`, instead of the ladder.
    expandable: Option<PyTorchExpandable>,
}

impl Lab {
    /// An allocator with these parts on a device.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] with `source=expandable` on a device without virtual memory management.
    pub fn new(driver: Arc<dyn Driver>, settings: LabSettings) -> Result<Pooled<Self>, AllocError> {
        let account = match settings.size {
            SizeKind::Torch => Account::with_pools(settings.torch.max_split()),
            _ => Account::new(),
        };
        let source = settings.source(driver)?;
        let heap = Heap::new(Space::new(account), settings.fit(), Stream::Own, source).with_join(settings.join);
        let heap = if settings.stream == StreamKind::Steal { heap.with_steals() } else { heap };
        let (name, size, split, ladder) = (BACKEND.name, settings.size(), settings.split(), settings.ladder());
        let rules = Rules { name, settings: settings.json(), size, split, ladder };
        let torch = ExpandableSettings { torch: settings.torch, ..ExpandableSettings::default() };
        let expandable = (settings.source == SourceKind::Expandable).then(|| PyTorchExpandable::of(torch));
        Ok(Pooled::over(heap, Self { settings, rules, expandable }))
    }
}

impl Policy for Lab {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn prepare(&mut self, heap: &mut Heap, list: FreeList) -> Result<(), DriverError> {
        let collects = self.expandable.is_none() && self.settings.torch.collect_above().is_some();
        if collects && list.pool != Some(PoolKind::Small) {
            heap.space_mut().count_search();
        }
        Ok(())
    }

    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        let largest = self.rules.split.largest(bytes);
        let mut block = match self.expandable {
            Some(_) => expandable::find(heap, list, bytes, largest),
            None => heap.find(list, bytes, largest),
        };
        if block.is_none() && heap.join(list) {
            block = heap.find(list, bytes, largest);
        }
        match block {
            Some(block) => Ok(Some((block, Path::Hit))),
            None => Ok(heap.steal(list, bytes, largest)?.map(|block| (block, Path::WaitInserted))),
        }
    }

    /// PyTorch's rules compare it with the limit.
    fn segment(&self, bytes: u64) -> u64 {
        match (&self.expandable, self.settings.grow) {
            (Some(_), GrowKind::Exact) => bytes.next_multiple_of(SMALL_SEGMENT),
            _ => self.rules.size.segment(bytes),
        }
    }

    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        if let Some(expandable) = &self.expandable {
            return expandable.grow(heap, miss);
        }
        let again = |heap: &mut Heap| Ok(self.find(heap, miss.list, miss.bytes)?.map(|(block, _)| block));
        self.rules.ladder.climb(heap, miss, again)
    }

    fn against_fragmentation(&self) -> Option<String> {
        self.settings.against_fragmentation()
    }
}
