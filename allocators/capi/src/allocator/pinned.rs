//! Pinned memory of the host: streams of several GPUs, and the time of pinning.

use super::{Allocator, check};
use crate::arguments::{allocator, conclude_and_tell, give, text};
use crate::error::{Failure, Outcome, Status, answer, attempt};
use crate::host::{Host, Pinning};
use std::ffi::c_char;
use std::sync::Arc;

impl Allocator {
    fn host(&self) -> Outcome<&Arc<Host>> {
        let text = "this allocator is of one GPU's memory; GPUs are named for pinned memory only (device host:cuda)";
        self.device.host().ok_or_else(|| Failure::new(Status::Incapable, text))
    }

    fn record_stream_on(&self, address: u64, device: u32, stream: u64) -> Outcome<()> {
        let host = self.host()?;
        if address == 0 {
            return Ok(());
        }
        self.record_use(address, host.stream(device, stream)?)
    }
}

/// Whether `vramlab_open` would accept an allocator and its settings on a device such as `host:cuda`. Opens nothing.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_check_on(name: *const c_char, device: *const c_char) -> Status {
    answer(|| {
        // SAFETY: as promised.
        let (name, device) = unsafe { (text(name, "the allocator's name")?, text(device, "the device")?) };
        check(name, device)
    })
}

/// Announces that work queued so far on a stream of a GPU, such as a copy, uses a block of pinned memory: it serves no other request
/// before that work has completed. An allocator of pinned memory ignores the stream of a request, because the host uses a block at
/// once, so every stream that uses a block has to be announced. `vramlab_record_stream` announces a stream of the GPU in the name of
/// the device. The status is `VRAMLAB_STATUS_INCAPABLE` for an allocator of a GPU's memory.
///
/// # Safety
/// See the top of this file; the stream is of the GPU with this number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_record_stream_on(
    vramlab: *mut Allocator,
    address: u64,
    device: u32,
    stream: u64,
) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }?.record_stream_on(address, device, stream))
}

/// Announces that a stream of a GPU is about to be destroyed, as `vramlab_stream_gone` does for the GPU in the name of the device.
///
/// # Safety
/// As of `vramlab_stream_gone`; the stream is of the GPU with this number.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vramlab_stream_gone_on(vramlab: *mut Allocator, device: u32, stream: u64) -> Status {
    // SAFETY: as promised.
    let result = attempt(|| unsafe { allocator(vramlab) }?.host()?.gpu(device)?.forget(stream));
    // SAFETY: as promised.
    unsafe { conclude_and_tell(vramlab, result, None) }
}

/// The times of calls that pinned memory and released it. The status is `VRAMLAB_STATUS_INCAPABLE` for an allocator of a GPU's memory.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_read_pinning(vramlab: *mut Allocator, out: *mut Pinning) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || Ok(allocator(vramlab)?.host()?.pinning())) })
}
