//! A GPU for tests, if there is one.

use std::ffi::c_int;

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};
use kernels::{CudaKernels, KernelError, Operation};

/// Whose turn it is. While one thread captures a stream, the driver refuses others' allocations, and calls of theirs can spoil
/// the capture.
static TURN: Mutex<()> = Mutex::new(());

/// The first GPU's primary context, current on this thread, with the kernels loaded; one at a time.
pub(crate) struct Gpu {
    device: c_int,
    pub(crate) stream: sys::CUstream,
    /// `None` only while being dropped: modules go before their context.
    pub(crate) kernels: Option<CudaKernels>,
    _turn: MutexGuard<'static, ()>,
}

/// The reason that no GPU can be tested, if any.
fn no_gpu() -> Option<String> {
    // SAFETY: only tries to open the library. It has to come first: cudarc panics when there is none.
    if !unsafe { sys::is_culib_present() } {
        return Some("no CUDA driver".into());
    }
    let there = result::init().is_ok() && result::device::get_count().is_ok_and(|count| count > 0);
    (!there).then(|| "no CUDA device".into())
}

impl Gpu {
    /// The reason that tests cannot run: there is no GPU.
    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn missing() -> Option<String> {
        no_gpu()
    }

    /// Panics where there is none.
    pub(crate) fn new() -> Self {
        assert_eq!(no_gpu(), None, "this test needs a GPU");
        // A test that failed has let go of its own context.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let device = result::device::get(0).unwrap();
        // SAFETY: the device exists; the context is released in `drop`.
        unsafe { result::ctx::set_current(result::primary_ctx::retain(device).unwrap()) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { device, stream, kernels: Some(CudaKernels::load().unwrap()), _turn: turn }
    }

    /// With the tiles that every GPU has.
    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn without_warpgroups() -> Self {
        let mut gpu = Self::new();
        gpu.kernels = gpu.kernels.take().map(CudaKernels::without_warpgroups);
        gpu
    }

    #[allow(dead_code, reason = "not asked where a test chooses how to launch")]
    pub(crate) fn launch(&self, operation: &dyn Operation) -> Result<(), KernelError> {
        // SAFETY: the context is current, and callers pass operations on live memory of their own.
        unsafe { operation.launch(self.kernels.as_ref().unwrap(), self.stream) }
    }

    /// Uploads `image`, runs `work` with its address, and downloads it.
    pub(crate) fn with_region(&self, image: &[u8], work: impl FnOnce(u64)) -> Vec<u8> {
        let mut after = vec![0; image.len()];
        // SAFETY: the region is as long as `image` and `after`, and is freed when the stream is done with it.
        unsafe {
            let region = result::malloc_sync(image.len()).unwrap();
            result::memcpy_htod_sync(region, image).unwrap();
            // That copy returns once its source is staged; the stream does not wait for the rest of it.
            result::ctx::synchronize().unwrap();
            work(region);
            result::stream::synchronize(self.stream).unwrap();
            result::memcpy_dtoh_sync(&mut after, region).unwrap();
            result::free_sync(region).unwrap();
        }
        after
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        drop(self.kernels.take());
        // SAFETY: both were made in `new`, and nothing is queued any more.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
