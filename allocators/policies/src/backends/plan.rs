//! # `plan`: a program that repeats itself is served at the addresses of an offline plan
//!
//! *Idea.* Training steps request the same blocks in the same order. One recorded run contains the begin and end of each block, so
//! all blocks can be placed beforehand (`histories::plan`). That needs hardly more than the peak of active memory, and no search at
//! run time. `vramlab plan HISTORY -o FILE` makes the plan from a recording, a PyTorch snapshot or the event trace of an earlier
//! run of the trainer; `--alloc plan:file=FILE` follows it.
//!
//! *A request* is compared with the plan's next block, which must have the same bytes and stream, and then with the following 256.
//! If every byte of the planned range is free, the request is served there. The first one allocates the arena, one segment of the
//! plan's size. Where the program departs from the plan, the request is served by [`pytorch`]'s rules from other segments, and
//! counted (`num_unplanned`; the others are `num_planned`). The plan is never changed.
//!
//! *A free* coalesces the block with free neighbours. If other streams use it, the free is deferred until events on them complete.
//!
//! *Streams.* Within a stream memory is reusable immediately. A plan also moves memory from one stream to another, but the recorded
//! run had another speed. So each free records an event if the plan has several streams, and a block that gets another stream's
//! memory queries it: if the work has not completed, its stream waits on the device (with `wait=off` the request is served
//! elsewhere). Where no event could be recorded, the memory stays with its stream.
//!
//! *Graphs.* Requests of a capture are served from private pools by `pytorch`'s rules.
//!
//! *Good at* programs whose shapes do not change. *Bad at* all others: the arena is reserved in addition to their own segments.
//! Without a file, the default, it is `pytorch` without support for starting from a snapshot.
//!
//! *Cost.* O(log n) in the free blocks, one comparison for a request in the planned order, and up to 256 for another one. An event
//! for each free with several streams.
//!
//! *Source.* STAlloc (2025) serves from a profiled plan with dynamic memory for other requests; static planners of compilers (TVM,
//! TFLite) do the same without dynamic memory.

mod order;
mod table;

pub use table::{Placement, PlanFile, PlanTable};

use super::pooled::{Policy, Pooled, Rules, put_back, serve};
use super::pytorch::{self, PyTorchSettings};
use super::registry::{Backend, Capabilities, StreamUse, Varying};
use crate::contract::{AllocError, Path, Stats};
use crate::policy::Heap;
use crate::policy::arena::Arena;
use crate::policy::fit::Fit;
use crate::policy::source::Source;
use crate::policy::stream::Stream;
use crate::space::{Account, BlockId, FreeList, Owner, Space};
use order::{LastOwners, Order};
use std::sync::Arc;
use table::Schedule;
use vramlab_device::settings::{Settings as _, bytes, switch, text};
use vramlab_device::{Driver, StreamId};

/// Blocks of a plan are multiples of this, in bytes.
pub const UNIT: u64 = 512;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "plan",
    summary: "serves repeating programs at the addresses of an offline plan, other requests by pytorch's rules",
    capabilities: Capabilities {
        restores: false,
        private_pools: false,
        checkpoints: false,
        ..Pooled::<Plan>::CAPABILITIES
    },
    // Without a plan it places every block where `caching` does.
    compared: false,
    constructor: &Varying {
        // A plan moves memory from one stream to another.
        capabilities: |default, settings: &PlanSettings| match settings.file.0 {
            Some(_) => Capabilities { streams: StreamUse::Any, ..default },
            None => default,
        },
        build: |driver, settings| Ok(Arc::new(Plan::new(driver, settings)?)),
    },
};

vramlab_device::settings! {
    /// The plan, and how it is followed.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct PlanSettings {
        /// The plan, as `vramlab plan` writes it.
        pub file: PlanFile = PlanFile::default(), text("the name of a file, or none");
        /// Let a stream wait for another one whose memory it gets, instead of serving it elsewhere.
        pub wait: bool = true, switch();
        /// Maximum of reserved bytes, the arena included.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
    check PlanSettings::readable;
}

/// How to fix a file.
const HOW_TO: &str = "`vramlab plan HISTORY --out FILE` writes plans";

impl PlanSettings {
    fn table(&self) -> Result<Option<PlanTable>, AllocError> {
        let read = |path: &std::path::PathBuf| {
            let refused = |reason| AllocError::File { allocator: BACKEND.name, path: path.clone(), reason };
            PlanTable::read(path).map_err(|reason| refused(format!("{reason}; {HOW_TO}")))
        };
        self.file.0.as_ref().map(read).transpose()
    }

    fn readable(&self) -> Result<(), String> {
        self.table().map(|_| ()).map_err(|error| match error {
            // The caller names the allocator.
            AllocError::File { path, reason, .. } => format!("cannot use {}: {reason}", path.display()),
            other => other.to_string(),
        })
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Plan {
    /// Those of `pytorch`, for requests that are not planned.
    rules: Rules,
    /// Whether a stream may wait for another one.
    wait: bool,
    planned: Option<Planned>,
}

/// A plan with its state.
#[derive(Debug)]
struct Planned {
    schedule: Schedule,
    /// Used only if the plan has several streams.
    owners: LastOwners,
    /// The segment that planned requests are served from, until it is released.
    arena: Option<Arena>,
    /// Number of releases when the device had no memory for the arena. It is asked again after another release.
    refused_at: Option<u64>,
    served: u64,
    elsewhere: u64,
}

impl Plan {
    /// An allocator that follows a plan on a device.
    ///
    /// # Errors
    /// [`AllocError::File`] when the plan cannot be read.
    pub fn new(driver: Arc<dyn Driver>, settings: &PlanSettings) -> Result<Pooled<Self>, AllocError> {
        let planned = settings.table()?.map(|table| Planned {
            schedule: Schedule::new(table),
            owners: LastOwners::default(),
            arena: None,
            refused_at: None,
            served: 0,
            elsewhere: 0,
        });
        let source = Source::Plain { driver, limit: settings.memory_limit };
        let heap = Heap::new(Space::new(Account::with_pools(u64::MAX)), Fit::best(), Stream::Arena, source);
        let torch = PyTorchSettings { memory_limit: settings.memory_limit, ..PyTorchSettings::default() };
        let rules = Rules { name: BACKEND.name, settings: settings.json(), ..pytorch::rules(&torch) };
        Ok(Pooled::over(heap, Self { rules, wait: settings.wait, planned }))
    }
}

impl Planned {
    /// The arena, unless it was released.
    fn reserved_arena(&self, heap: &Heap) -> Option<Arena> {
        self.arena.filter(|arena| arena.is_reserved(heap))
    }

    /// The arena, which is reserved now if it is not: `None` when the device refuses it. The path is that of a request served from it.
    fn arena(&mut self, heap: &mut Heap, stream: StreamId) -> Result<(Option<Arena>, Path), AllocError> {
        if let Some(arena) = self.reserved_arena(heap) {
            return Ok((Some(arena), Path::Hit));
        }
        let releases = heap.space().account().stats().num_device_free;
        if self.refused_at == Some(releases) {
            return Ok((None, Path::Hit));
        }
        // A list without a pool: no request of the other rules is served from it.
        let list = FreeList { owner: Owner::of(stream), pool: None };
        self.arena = Arena::reserve(heap, list, self.schedule.bytes())?;
        self.refused_at = self.arena.is_none().then_some(releases);
        // The driver released the previous arena when all work on it had completed.
        self.owners.clear(heap);
        Ok((self.arena, Path::DriverAlloc))
    }

    /// Serves a request at its planned address; `None` when it is not in the plan, or the address is not free.
    fn serve(
        &mut self,
        heap: &mut Heap,
        stream: StreamId,
        requested: u64,
        wait: bool,
    ) -> Result<Option<(BlockId, Path)>, AllocError> {
        let Some(offset) = self.schedule.find(requested, stream) else { return Ok(None) };
        let (Some(arena), mut path) = self.arena(heap, stream)? else { return Ok(None) };
        let bytes = requested.next_multiple_of(UNIT);
        let Some(block) = arena.find(heap, offset, bytes) else { return Ok(None) };
        if self.schedule.has_streams() {
            let range = offset..offset + bytes;
            match self.owners.before(heap, &range, stream)? {
                Order::Known => {}
                Order::Waits(events) if wait => {
                    for event in events {
                        heap.source().driver().stream_wait_event(stream, event)?;
                    }
                    path = Path::WaitInserted;
                }
                Order::Waits(_) | Order::Unknown => return Ok(None),
            }
            self.owners.take(heap, range, stream);
        }
        Ok(Some((arena.take(heap, block, (offset, bytes), Owner::of(stream), requested), path)))
    }
}

impl Policy for Plan {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        if let Some(planned) = &mut self.planned {
            if owner.private.is_none() {
                heap.process_events()?;
                if let Some(served) = planned.serve(heap, owner.stream, requested, self.wait)? {
                    planned.served += 1;
                    return Ok(served);
                }
            }
            planned.elsewhere += 1;
        }
        serve(self, heap, owner, requested)
    }

    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        let addr = heap.space()[block].addr;
        let mut recorded = Ok(());
        let arena = self.planned.as_ref().and_then(|planned| planned.reserved_arena(heap));
        if let Some((planned, arena)) = self.planned.as_mut().zip(arena)
            && planned.schedule.has_streams()
            && (arena.addr()..arena.addr() + planned.schedule.bytes()).contains(&addr)
        {
            recorded = planned.owners.free(heap, addr - arena.addr());
        }
        let path = put_back(heap, block, users)?;
        recorded?;
        Ok(path)
    }

    fn restores(&self) -> bool {
        false
    }

    /// A plan has one pool.
    fn has_private_pools(&self) -> bool {
        false
    }

    fn count(&self, stats: &mut Stats) {
        stats.num_planned = self.planned.as_ref().map(|planned| planned.served);
        stats.num_unplanned = self.planned.as_ref().map(|planned| planned.elsewhere);
    }

    fn end(&mut self, heap: &mut Heap) {
        if let Some(planned) = &mut self.planned {
            planned.owners.clear(heap);
        }
    }
}
