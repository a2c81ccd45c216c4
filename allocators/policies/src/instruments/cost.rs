//! The cost of instruments.

use crate::backends::{Caching, CachingSettings};
use crate::contract::{AllocError, DeviceAllocator, Request};
use std::sync::Arc;
use vramlab_device::{Driver, InstrumentCost, NullDriver, StreamId};

const ROUNDS: usize = 5;

/// Measures the time that `wrap` adds to an allocation and a free that hit the cache of a caching allocator on the null device, by
/// the machine's clock: the median of five rounds of `pairs` pairs, alternately with and without it. 10,000 pairs take some
/// milliseconds; an instrument that stores a record of each operation needs fewer.
///
/// # Errors
/// Those of the allocator, which has no reason to fail.
pub fn measure_cost(
    instrument: &str,
    pairs: u32,
    wrap: &dyn Fn(Arc<dyn DeviceAllocator>) -> Arc<dyn DeviceAllocator>,
) -> Result<InstrumentCost, AllocError> {
    let null: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 40));
    let stream = null.stream_create()?;
    measure_cost_on(instrument, pairs, &null, stream, wrap)
}

/// Measures the cost on a device and stream, by that device's clock: for instruments that use the device.
///
/// # Errors
/// Those of the allocator, the instrument and the device.
pub fn measure_cost_on(
    instrument: &str,
    pairs: u32,
    driver: &Arc<dyn Driver>,
    stream: StreamId,
    wrap: &dyn Fn(Arc<dyn DeviceAllocator>) -> Arc<dyn DeviceAllocator>,
) -> Result<InstrumentCost, AllocError> {
    let backend =
        || -> Arc<dyn DeviceAllocator> { Arc::new(Caching::new(Arc::clone(driver), CachingSettings::default())) };
    let clock = driver.clock();
    let round = |allocator: &dyn DeviceAllocator| -> Result<f64, AllocError> {
        let start = clock.now_ns();
        for _ in 0..pairs {
            let block = allocator.allocate(Request::new(4096), stream)?;
            // SAFETY: only the instrument uses the block, on this stream.
            unsafe { allocator.deallocate(block, stream)? };
        }
        // CAST: a duration in nanoseconds, far below 2^53.
        Ok((clock.now_ns() - start) as f64 / (2.0 * f64::from(pairs)))
    };
    let (bare, wrapped) = (backend(), wrap(backend()));
    let mut differences = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let without = round(bare.as_ref())?;
        differences.push(round(wrapped.as_ref())? - without);
    }
    differences.sort_by(f64::total_cmp);
    Ok(InstrumentCost {
        instrument: instrument.to_owned(),
        ns_per_operation: differences[ROUNDS / 2],
        method: format!(
            "median of {ROUNDS} rounds of {pairs} cached allocate and free pairs of 4 KiB on the device '{}', with and without",
            driver.describe().name
        ),
    })
}
