//! NVIDIA's cuBLASLt for the products of linear layers: opened when it is first asked for, with memory of the caller's.
//!
//! What a product needs (descriptors, and the algorithm that the library's heuristic names) is made once by each thread that
//! launches it, and found again without a lock. Making it takes host memory only, so it may be done while a stream is
//! captured; what the library sets up at its first product may not, and [`prepare_cublaslt`](CudaKernels::prepare_cublaslt)
//! sees to that.
//!
//! Source: <https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api>, 13.0.

mod plan;
mod product;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys as lt_sys;
use cudarc::driver::result;
use cudarc::driver::sys::{CUdevice_attribute, CUstream};
use libloading::Library;

use super::{CudaKernels, attribute, driver_error};
use crate::error::KernelError;
use crate::plan::Product;
use crate::precision::{Element, Precision};
use plan::Plans;
pub(crate) use product::LibraryProduct;

macro_rules! names {
    ($($precision:literal),*) => {
        [$([
            concat!("cublaslt_forward_", $precision),
            concat!("cublaslt_input_", $precision),
            concat!("cublaslt_gradient_", $precision),
        ],)*]
    };
}

/// Names of launches by precision and product.
pub(super) const NAMES: [[&str; 3]; 5] = names!("f32", "tf32", "bf16", "f16", "f16acc");

/// The oldest version that is used: the types of biases can be told since then.
const OLDEST: usize = 12_00_00;

/// The workspace begins on a multiple of so many bytes.
const WORKSPACE_ALIGNMENT: u64 = 256;
/// Matrices and biases begin on a multiple of so many bytes.
const OPERAND_ALIGNMENT: u32 = 16;

/// What a launch is called.
pub(crate) const fn name(product: Product, precision: Precision) -> &'static str {
    let product = match product {
        Product::Forward => 0,
        Product::Input => 1,
        // The library adds to weights as it writes a gradient.
        Product::Gradient | Product::Update => 2,
    };
    let precision = match precision {
        // Splitting operands is our own way to be as exact as f32.
        Precision::F32x3 => Precision::F32,
        other => other,
    };
    NAMES[precision as usize][product]
}

/// Version of the library as `cublasLtGetVersion` gives it, if it can be used. Looked for once.
fn version() -> Result<usize, KernelError> {
    static VERSION: OnceLock<Result<usize, KernelError>> = OnceLock::new();
    let look = || {
        let none = |why: String| Err(KernelError::NoCublasLt { why });
        let path = if cfg!(windows) { "PATH" } else { "LD_LIBRARY_PATH" };
        // SAFETY: opens the library again. Any other call of cudarc would panic if it did not find it.
        if !open_library() || !unsafe { lt_sys::is_culib_present() } {
            let file = if cfg!(windows) { "cublasLt64_13.dll" } else { "libcublasLt.so.13" };
            return none(format!(
                "found no {file} or one of version 12: install the library of CUDA 12 or 13, or put its folder into {path}"
            ));
        }
        // SAFETY: every version has this function.
        let found = unsafe { lt_sys::cublasLtGetVersion() };
        if found < OLDEST {
            let (found, oldest) = (in_words(found), in_words(OLDEST));
            return none(format!(
                "version {found} is too old: install {oldest} or newer, or put its folder first in {path}"
            ));
        }
        Ok(found)
    };
    VERSION.get_or_init(look).clone()
}

/// Opens the library for good, if there is one: under its own name, wherever the system looks for libraries, or in the folder
/// of a CUDA toolkit. cudarc, which looks for names only, then gets the one that is open.
fn open_library() -> bool {
    let names = || cudarc::get_lib_name_candidates("cublasLt").into_iter();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = toolkits.chain([PathBuf::from("/usr/local/cuda")]).map(|toolkit| toolkit.join("lib64"));
    let in_toolkits = toolkits.flat_map(|folder| names().map(move |name| folder.join(name)));
    // SAFETY: libraries of this name run nothing but their own initialisation.
    let mut open = names().map(PathBuf::from).chain(in_toolkits).filter_map(|path| unsafe { Library::new(path) }.ok());
    // Closing it would undo what it has set up.
    open.next().map(std::mem::forget).is_some()
}

/// `130002` is `13.0.2`.
fn in_words(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Version of cuBLASLt, such as `13.0.2`; opens the library, which needs no GPU.
///
/// # Errors
///
/// [`KernelError::NoCublasLt`] if there is none, or one that is too old.
pub fn cublaslt_version() -> Result<String, KernelError> {
    version().map(in_words)
}

/// Addresses and factors of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) out: u64,
    pub(crate) bias: u64,
    pub(crate) alpha: f32,
    /// Zero or one.
    pub(crate) beta: f32,
    pub(crate) workspace: u64,
}

/// The library with its handle for one GPU.
pub(super) struct CublasLt {
    handle: lt_sys::cublasLtHandle_t,
    /// Most bytes of workspace that an algorithm may ask for.
    most_workspace: u64,
    /// Tells plans whether this is still there.
    alive: Arc<()>,
}

fn failed(call: &'static str) -> impl FnOnce(CublasError) -> KernelError {
    // CAST: the value of a C enum.
    move |error| KernelError::CublasLt { call, code: error.0 as u32, name: format!("{:?}", error.0) }
}

impl CublasLt {
    /// For the current context.
    fn open() -> Result<Self, KernelError> {
        let version = version()?;
        // 32 MiB for Hopper and what follows it, 4 MiB before, as NVIDIA recommends; PyTorch allows the same.
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let most_workspace = if major >= 9 { 32 << 20 } else { 4 << 20 };
        let handle = lt::create_handle().map_err(|CublasError(status)| KernelError::NoCublasLt {
            why: format!(
                "cublasLtCreate failed with {status:?}: the driver may be too old for version {}; install one that suits \
                 it, or a newer driver",
                in_words(version)
            ),
        })?;
        Ok(Self { handle, most_workspace, alive: Arc::new(()) })
    }

    /// Call with the context current that was so at `open`, once.
    pub(super) fn close(&self) {
        // SAFETY: made by `open`; whoever calls this drops `self`. An error has nobody to go to.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

impl CudaKernels {
    fn library(&self) -> Result<&CublasLt, KernelError> {
        if let Some(open) = self.cublaslt.get() {
            return Ok(open);
        }
        // Another thread may have been faster; its handle is as good, and this one goes.
        self.cublaslt.set(CublasLt::open()?).unwrap_or_else(|spare| spare.close());
        Ok(self.cublaslt.get().expect("a slot that was set holds a value"))
    }

    /// Opens cuBLASLt and has it compute something small, which the first launch would do as well, but must not while a
    /// stream is captured. Takes 100 KiB of device memory and what the library asks for, and gives them back; waits.
    ///
    /// # Errors
    ///
    /// [`KernelError::NoCublasLt`] if the library is not there, too old, or does not go with the driver;
    /// [`KernelError::CublasLt`] and [`KernelError::Driver`] for what fails then.
    pub fn prepare_cublaslt(&self, precision: Precision) -> Result<(), KernelError> {
        const SIZE: u32 = 64;
        const MATRIX: u64 = SIZE as u64 * SIZE as u64 * 4;
        let library = self.library()?;
        let products = Product::ALL.map(|product| LibraryProduct {
            product,
            precision,
            m: SIZE,
            n: SIZE,
            k: SIZE,
            a_pitch: SIZE,
            b_pitch: SIZE,
            out_pitch: SIZE,
            out: if product == Product::Gradient { Element::F32 } else { precision.element() },
            bias: product == Product::Forward,
            relu: product == Product::Forward,
        });
        let mut workspace = 0;
        for product in &products {
            workspace = workspace.max(self.library_workspace(product)?);
        }
        let calls = |error| driver_error("cuMemAlloc and launches on it", error);
        // CAST: 32 MiB at most.
        let bytes = (4 * MATRIX + workspace) as usize;
        // SAFETY: the memory is used by the products below only, which are waited for before it is freed, whatever fails.
        unsafe {
            let memory = result::malloc_sync(bytes).map_err(calls)?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(calls);
            let done = stream.and_then(|stream| {
                let operands = Operands {
                    a: memory,
                    b: memory + MATRIX,
                    out: memory + 2 * MATRIX,
                    bias: memory + 3 * MATRIX,
                    alpha: 1.0,
                    beta: 0.0,
                    workspace: memory + 4 * MATRIX,
                };
                let launched = Plans::with(|plans| {
                    products
                        .iter()
                        .try_for_each(|product| plans.find(library, product)?.launch(library, stream, &operands))
                });
                let waited = result::stream::synchronize(stream).map_err(calls);
                let _ = result::stream::destroy(stream);
                launched.and(waited)
            });
            let _ = result::free_sync(memory);
            done
        }
    }

    /// Bytes of workspace that [`launch_library`](Self::launch_library) needs from an address on that is a multiple of 16.
    pub(crate) fn library_workspace(&self, product: &LibraryProduct) -> Result<u64, KernelError> {
        let library = self.library()?;
        let bytes = Plans::with(|plans| plans.find(library, product).map(|plan| plan.workspace_bytes))?;
        Ok(if bytes == 0 { 0 } else { bytes + WORKSPACE_ALIGNMENT - u64::from(OPERAND_ALIGNMENT) })
    }

    /// Queues a product on `stream`.
    ///
    /// # Safety
    ///
    /// What [`Operation::launch`](crate::Operation::launch) asks holds for the operands, which are of the product's shape;
    /// the workspace is as large as [`library_workspace`](Self::library_workspace) says, and everything begins on 16 bytes.
    pub(crate) unsafe fn launch_library(
        &self,
        product: &LibraryProduct,
        stream: CUstream,
        operands: &Operands,
    ) -> Result<(), KernelError> {
        let library = self.library()?;
        // SAFETY: the caller vouches for the operands.
        Plans::with(|plans| unsafe { plans.find(library, product)?.launch(library, stream, operands) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_they_are_spoken_of() {
        assert_eq!(in_words(13_00_02), "13.0.2");
        assert_eq!(in_words(12_08_05), "12.8.5");
        assert_eq!(in_words(OLDEST), "12.0.0");
    }

    #[test]
    fn a_library_that_cannot_be_used_is_told_of_in_one_line() {
        match cublaslt_version() {
            Ok(version) => assert!(version.split('.').count() == 3, "{version}"),
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, KernelError::NoCublasLt { .. }));
                assert!(text.starts_with("cuBLASLt cannot be used: ") && text.contains("install"), "{text}");
                assert!(!text.contains('\n') && text.contains(if cfg!(windows) { "PATH" } else { "LD_LIBRARY_PATH" }));
            }
        }
    }
}
