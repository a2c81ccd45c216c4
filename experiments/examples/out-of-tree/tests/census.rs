//! An instrument of this crate passes on the calls that it does not count: `cargo test`.

use bump_allocator::{BACKEND, census::Census};
use std::sync::Arc;
use vramlab::backends::caching;
use vramlab::{AllocError, DeviceAllocator, Driver, NullDriver, Path, Request, Selection};

/// An allocator under the instrument, on a device.
fn counted(kind: &'static vramlab::Backend) -> (Arc<dyn Driver>, Arc<Census>, Arc<dyn DeviceAllocator>) {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 34));
    let census = Arc::new(Census::new(Selection::of(kind).build(&driver).unwrap()));
    (driver, Arc::clone(&census), census)
}

#[test]
fn requests_are_counted_and_everything_else_passes() {
    let (driver, census, allocator) = counted(&caching::BACKEND);
    let [stream, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    // SAFETY: the null device queues no work.
    let free = |block| unsafe { allocator.deallocate(block, stream) }.unwrap();
    assert_eq!(allocator.name(), "caching");
    // A capture keeps its memory until the graph's pool is released.
    let capture = allocator.capture_begin(stream).unwrap();
    let captured = allocator.allocate(Request::new(700), stream).unwrap();
    let captured_addr = captured.addr();
    free(captured);
    allocator.capture_end(capture).unwrap();
    let outside = allocator.allocate(Request::new(700), stream).unwrap();
    assert_ne!(outside.addr(), captured_addr, "the capture's memory is not reused");
    allocator.capture_release(capture).unwrap();
    // Memory of a private pool.
    let pool = allocator.pool_create().unwrap();
    free(allocator.allocate_in(Request::new(9), stream, pool).unwrap());
    allocator.pool_release(pool).unwrap();
    assert!(allocator.pool_trim(pool).unwrap() > 0);
    // A destroyed stream, and a memory limit.
    allocator.record_use(&outside, other).unwrap();
    allocator.forget_stream(other);
    assert_ne!(free(outside), Path::Deferred, "no block waits for a destroyed stream");
    assert!(allocator.set_memory_limit(Some(1 << 20)));
    assert_eq!(census.sizes().into_iter().collect::<Vec<_>>(), [(9, 1), (700, 2)]);
}

#[test]
fn a_part_that_the_allocator_inside_lacks_is_refused() {
    let (driver, _, allocator) = counted(&BACKEND);
    let stream = driver.stream_create().unwrap();
    assert!(allocator.parts().graphs.is_none() && allocator.parts().private_pools.is_none());
    assert!(matches!(allocator.capture_begin(stream), Err(AllocError::Incapable { allocator: "bump", .. })));
    assert!(matches!(allocator.pool_create(), Err(AllocError::Incapable { allocator: "bump", .. })));
    assert!(!allocator.set_memory_limit(None) && !allocator.tell_completed(true));
}
