//! Blocks of this crate's allocators and of the library's are distinguishable: `cargo test`.

use bump_allocator::BACKEND;
use std::sync::Arc;
use vramlab::backends::naive;
use vramlab::{AllocError, Block, DeviceAllocator, Driver, NullDriver, Request, Selection, StreamId};

/// An allocator on its own device, and a block of it.
fn made(kind: &'static vramlab::Backend) -> (Arc<dyn DeviceAllocator>, StreamId, Block) {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 30));
    let allocator = Selection::of(kind).build(&driver).unwrap();
    let stream = driver.stream_create().unwrap();
    let block = allocator.allocate(Request::new(4096), stream).unwrap();
    (allocator, stream, block)
}

#[test]
fn a_block_of_one_allocator_is_refused_by_all_others() {
    // Each kind several times: if tokens were counted by kind, they would collide.
    let allocators: Vec<_> =
        [&BACKEND, &naive::BACKEND].into_iter().flat_map(|kind| (0..4).map(move |_| made(kind))).collect();
    for (number, (allocator, stream, own)) in allocators.iter().enumerate() {
        for (_, _, foreign) in
            allocators.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, other)| other)
        {
            assert_eq!(own.addr(), foreign.addr(), "the devices return the same addresses");
            let refused = allocator.record_use(foreign, *stream);
            assert!(matches!(refused, Err(AllocError::ForeignBlock { .. })), "{own:?} and {foreign:?}");
        }
        allocator.record_use(own, *stream).unwrap();
    }
}
