//! A GPU for tests, if there is one.

use std::ffi::c_int;
use std::io::Write;

use cudarc::driver::{result, sys};
use kernels::{CudaKernels, KernelError, Operation, Precision};

/// The first GPU's primary context, current on this thread, with the kernels loaded.
pub(crate) struct Gpu {
    device: c_int,
    pub(crate) stream: sys::CUstream,
    /// `None` only while being dropped: modules go before their context.
    pub(crate) kernels: Option<CudaKernels>,
}

/// Says why a test does nothing.
fn skip<T>(why: &str) -> Option<T> {
    // Not `eprintln!`: what a passing test prints that way is not shown.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
    None
}

impl Gpu {
    /// `None`, and a line on stderr, if there is none.
    pub(crate) fn find() -> Option<Self> {
        // SAFETY: only tries to open the library. It has to come first: cudarc panics when there is none.
        if !unsafe { sys::is_culib_present() } {
            return skip("no CUDA driver");
        }
        if result::init().is_err() || !result::device::get_count().is_ok_and(|count| count > 0) {
            return skip("no CUDA device");
        }
        let device = result::device::get(0).unwrap();
        // SAFETY: the device exists; the context is released in `drop`.
        unsafe { result::ctx::set_current(result::primary_ctx::retain(device).unwrap()) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Some(Self { device, stream, kernels: Some(CudaKernels::load().unwrap()) })
    }

    /// The same, with the tiles that every GPU has.
    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn find_without_warpgroups() -> Option<Self> {
        let mut gpu = Self::find()?;
        gpu.kernels = gpu.kernels.take().map(CudaKernels::without_warpgroups);
        Some(gpu)
    }

    /// The same if there is also a cuBLASLt.
    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn find_with_cublaslt() -> Option<Self> {
        let gpu = Self::find()?;
        let prepared =
            Precision::ALL.into_iter().try_for_each(|one| gpu.kernels.as_ref().unwrap().prepare_cublaslt(one));
        match prepared {
            Ok(()) => Some(gpu),
            Err(KernelError::NoCublasLt { why }) => skip(&why),
            Err(error) => panic!("cuBLASLt is there and fails: {error}"),
        }
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
        // SAFETY: both were made in `find`, and nothing is queued any more.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
