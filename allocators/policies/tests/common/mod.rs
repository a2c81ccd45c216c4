//! Short forms of allocator calls, over the devices that the tests of devices have.
#![allow(dead_code, reason = "each test binary uses a part of this")]

#[path = "../../../device/tests/common/mod.rs"]
mod device;

#[allow(unused_imports, reason = "as above")]
pub(crate) use device::*;
use proptest::prelude::ProptestConfig;
use proptest::test_runner::contextualize_config;
use std::sync::Arc;
#[allow(unused_imports, reason = "as above")]
pub(crate) use vramlab_conformance::{check_nothing_held, check_stats};
use vramlab_device::{Driver, StreamId};
use vramlab_policies::backends::{self, GraphCapture};
use vramlab_policies::instruments::Checker;
use vramlab_policies::{AllocError, Backend, Block, DeviceAllocator, Path, Request, Selection, Snapshot};

/// `cases` cases unless `PROPTEST_CASES` sets another number; a failed one is printed, not stored in a file.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    // A runner without the macro `proptest` does not read the variable by itself.
    contextualize_config(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
}

/// The backends that support captures.
pub(crate) fn capturing() -> impl Iterator<Item = &'static Backend> {
    backends::all().into_iter().filter(|backend| backend.capabilities.graph_capture != GraphCapture::Refused)
}

pub(crate) fn build(kind: &'static Backend, driver: &Arc<dyn Driver>) -> Arc<dyn DeviceAllocator> {
    Selection::of(kind).build(driver).unwrap()
}

/// Checks an allocator that was built on `driver`.
pub(crate) fn checker(inner: Arc<dyn DeviceAllocator>, driver: Arc<dyn Driver>) -> Checker {
    // SAFETY: see the sentence above.
    unsafe { Checker::new(inner, driver) }
}

pub(crate) fn allocate(allocator: &dyn DeviceAllocator, bytes: u64, stream: StreamId) -> Result<Block, AllocError> {
    allocator.allocate(Request::new(bytes), stream)
}

pub(crate) fn free(allocator: &dyn DeviceAllocator, block: Block, stream: StreamId) -> Result<Path, AllocError> {
    // SAFETY: tests queue every use of a block before they free it, on its stream or on announced ones.
    unsafe { allocator.deallocate(block, stream) }
}

/// Blocks as (offset in the segment, bytes, state's first letter), segment by segment.
pub(crate) fn layout(snapshot: &Snapshot) -> Vec<Vec<(u64, u64, char)>> {
    let letter = |state| match state {
        vramlab_policies::BlockState::Allocated => 'A',
        vramlab_policies::BlockState::PendingFree => 'P',
        vramlab_policies::BlockState::Free => 'F',
    };
    let segment = |segment: &vramlab_policies::SegmentInfo| {
        let base = segment.addr.get();
        segment.blocks.iter().map(|block| (block.addr.get() - base, block.bytes, letter(block.state))).collect()
    };
    snapshot.segments.iter().map(segment).collect()
}
