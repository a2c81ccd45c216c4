//! Sizes in proportion to the backend: a policy with large segments gets a larger device and larger requests.

use super::support::{GIB, MIB, allocate, free};
use std::sync::Arc;
use vramlab_device::{Driver, NullDriver};
use vramlab_policies::backends::Selection;
use vramlab_policies::contract::AllocError;

/// The largest segment for which the sizes in the checks are written: PyTorch's for a request of 1 to 10 MiB.
const USUAL_SEGMENT: u64 = 20 * MIB;

/// Factor between the usual sizes and those for a backend: the largest amount that it reserves for the first request of a stream,
/// in usual segments, and at least 1. A backend that fails here gets the usual sizes: the checks then report the failure.
pub(super) fn scale(selection: &Selection) -> u64 {
    let reserved = [1, 3 * MIB, 12 * MIB].map(|bytes| first_reservation(selection, bytes).unwrap_or(0));
    reserved.into_iter().fold(1, |scale, reserved| scale.max(reserved.div_ceil(USUAL_SEGMENT)))
}

/// Bytes that are reserved for a request of one stream after a request of another. A backend may reserve a share of the device
/// with its first request of all.
fn first_reservation(selection: &Selection, bytes: u64) -> Result<u64, AllocError> {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(64 * GIB));
    let allocator = selection.build(&driver)?;
    let [earlier, stream] = [driver.stream_create()?, driver.stream_create()?];
    let reserved = || allocator.stats().reserved_bytes.all.current;
    let first = allocate(allocator.as_ref(), 1, earlier)?;
    let before = reserved();
    let block = allocate(allocator.as_ref(), bytes, stream)?;
    let after = reserved();
    free(allocator.as_ref(), block, stream)?;
    free(allocator.as_ref(), first, earlier)?;
    Ok(after.saturating_sub(before))
}
