//! NVIDIA's cuBLASLt for the products of linear layers: opened when it is first asked for, with memory of the caller's.
//!
//! What a product needs (descriptors, and the algorithm that the library's heuristic names) is made once by each thread that
//! launches it, and found again without a lock. Making it takes host memory only, so it may be done while a stream is
//! captured; what the library sets up at its first product may not, and [`prepare_cublaslt`](CudaKernels::prepare_cublaslt)
//! sees to that.
//!
//! Source: <https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api>, 13.0.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::{Arc, OnceLock, Weak};

use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys::{self as lt_sys, cublasLtEpilogue_t, cudaDataType};
use cudarc::driver::result;
use cudarc::driver::sys::{CUdevice_attribute, CUstream};

use super::{CudaKernels, argument, attribute, driver_error};
use crate::error::KernelError;
use crate::plan::Product;
use crate::precision::{Element, Precision};

use cublasLtEpilogue_t::{
    CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_RELU_BIAS,
};
use lt_sys::cublasComputeType_t as Compute;
use lt_sys::cublasLtMatmulDescAttributes_t as OfProduct;
use lt_sys::cublasLtMatmulPreferenceAttributes_t as OfChoice;

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
pub(super) const NAMES: [[&str; Product::ALL.len()]; 5] = names!("f32", "tf32", "bf16", "f16", "f16acc");

/// The oldest version that is used: the types of biases can be told since then.
const OLDEST: usize = 12_00_00;

/// The workspace begins on a multiple of so many bytes.
const WORKSPACE_ALIGNMENT: u64 = 256;
/// Matrices and biases begin on a multiple of so many bytes.
const OPERAND_ALIGNMENT: u32 = 16;

/// What a launch is called.
pub(crate) const fn name(product: Product, precision: Precision) -> &'static str {
    NAMES[precision as usize][product as usize]
}

/// Version of the library as `cublasLtGetVersion` gives it, if it can be used. Looked for once.
fn version() -> Result<usize, KernelError> {
    static VERSION: OnceLock<Result<usize, KernelError>> = OnceLock::new();
    let look = || {
        let none = |why: String| Err(KernelError::NoCublasLt { why });
        let path = if cfg!(windows) { "PATH" } else { "LD_LIBRARY_PATH" };
        // SAFETY: opens libraries of this name only, which run nothing but their own initialisation. Any other call of
        // cudarc would panic if there is none.
        if !unsafe { lt_sys::is_culib_present() } {
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

/// A product with what the library does right behind it: `out = alpha · a·b + beta · out`, then the bias and the ReLU.
/// Shapes and pitches are those of [`LinearArguments`](super::LinearArguments), row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LibraryProduct {
    pub(crate) product: Product,
    pub(crate) precision: Precision,
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) a_pitch: u32,
    pub(crate) b_pitch: u32,
    pub(crate) out_pitch: u32,
    /// Type of the output, and of its bias.
    pub(crate) out: Element,
    /// Whether a bias is added, one value for each column.
    pub(crate) bias: bool,
    /// Whether negative results become zero.
    pub(crate) relu: bool,
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

const fn data_type(element: Element) -> cudaDataType {
    match element {
        Element::F32 => cudaDataType::CUDA_R_32F,
        Element::Bf16 => cudaDataType::CUDA_R_16BF,
        Element::F16 => cudaDataType::CUDA_R_16F,
    }
}

impl LibraryProduct {
    /// Whether sums are in f16: the library does so only where its output is f16 too. What is added to weights stays in f32.
    fn sums_in_f16(&self) -> bool {
        let half = self.precision == Precision::F16Accumulate && self.out == Element::F16;
        half && self.product != Product::Gradient
    }

    /// How it computes, and the type of alpha and beta.
    fn compute(&self) -> (Compute, cudaDataType) {
        match self.precision {
            _ if self.sums_in_f16() => (Compute::CUBLAS_COMPUTE_16F, cudaDataType::CUDA_R_16F),
            Precision::Tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, cudaDataType::CUDA_R_32F),
            _ => (Compute::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
        }
    }

    fn epilogue(&self) -> cublasLtEpilogue_t {
        match (self.bias, self.relu) {
            (false, false) => CUBLASLT_EPILOGUE_DEFAULT,
            (false, true) => CUBLASLT_EPILOGUE_RELU,
            (true, false) => CUBLASLT_EPILOGUE_BIAS,
            (true, true) => CUBLASLT_EPILOGUE_RELU_BIAS,
        }
    }

    /// Rows, columns and pitch of the library's A, B and D, and which of A and B it transposes.
    ///
    /// The library counts column by column, so every matrix is to it the transpose of ours, and it is asked for
    /// `outᵀ = bᵀ·aᵀ`: its A is our b.
    fn layouts(&self) -> ([(u32, u32, u32); 3], [bool; 2]) {
        let Self { m, n, k, a_pitch, b_pitch, out_pitch, .. } = *self;
        let out = (n, m, out_pitch);
        match self.product {
            // x [m, k] and the weights [n, k].
            Product::Forward => ([(k, n, b_pitch), (k, m, a_pitch), out], [true, false]),
            // dy [m, k] and the weights [k, n].
            Product::Input => ([(n, k, b_pitch), (k, m, a_pitch), out], [false, false]),
            // dy [k, m] and x [k, n].
            Product::Gradient => ([(n, k, b_pitch), (m, k, a_pitch), out], [false, true]),
        }
    }

    /// Where a thread looks for it first.
    fn slot(&self) -> usize {
        let kind = (self.product as u32) | (self.precision as u32) << 2 | u32::from(self.relu) << 5;
        let kind = kind | (self.out as u32) << 6 | u32::from(self.bias) << 8;
        let mixed = kind ^ self.m.rotate_left(9) ^ self.n.rotate_left(15) ^ self.k.rotate_left(22);
        // CAST: six bits.
        (mixed.wrapping_mul(0x9e37_79b1) >> 26) as usize % SLOTS
    }
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

/// How a product is launched: what the library wants to be told each time.
struct LibraryPlan {
    product: LibraryProduct,
    /// Of the handle that the algorithm was chosen with.
    library: Weak<()>,
    descriptor: Descriptor,
    layouts: [Layout; 3],
    algorithm: lt_sys::cublasLtMatmulAlgo_t,
    workspace_bytes: u64,
    /// Address that the descriptor names.
    bias: Cell<u64>,
}

/// Destroyed when dropped, as the two below; that frees host memory.
struct Descriptor(lt_sys::cublasLtMatmulDesc_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

struct Layout(lt_sys::cublasLtMatrixLayout_t);

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

struct Preference(lt_sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

impl Descriptor {
    fn set<T>(&self, attribute: OfProduct, value: T) -> Result<(), KernelError> {
        // SAFETY: the descriptor is live, and the value is of the attribute's type, as every caller sees to.
        unsafe { lt::set_matmul_desc_attribute(self.0, attribute, argument(&value), size_of::<T>()) }
            .map_err(failed("cublasLtMatmulDescSetAttribute"))
    }
}

impl Preference {
    fn set<T>(&self, attribute: OfChoice, value: T) -> Result<(), KernelError> {
        // SAFETY: as for a descriptor.
        unsafe { lt::set_matmul_pref_attribute(self.0, attribute, argument(&value), size_of::<T>()) }
            .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))
    }
}

impl LibraryPlan {
    /// Takes host memory and some tens of microseconds.
    fn new(library: &CublasLt, product: &LibraryProduct) -> Result<Self, KernelError> {
        let (compute, scale_type) = product.compute();
        let made = lt::create_matmul_desc(compute, scale_type).map_err(failed("cublasLtMatmulDescCreate"))?;
        let descriptor = Descriptor(made);
        let (shapes, transposed) = product.layouts();
        for (attribute, transposed) in
            [OfProduct::CUBLASLT_MATMUL_DESC_TRANSA, OfProduct::CUBLASLT_MATMUL_DESC_TRANSB].into_iter().zip(transposed)
        {
            // `CUBLAS_OP_N` and `CUBLAS_OP_T`.
            descriptor.set(attribute, i32::from(transposed))?;
        }
        descriptor.set(OfProduct::CUBLASLT_MATMUL_DESC_EPILOGUE, product.epilogue())?;
        if product.bias {
            descriptor.set(OfProduct::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(product.out))?;
            // Read by nobody: the heuristic looks at its alignment.
            descriptor.set(OfProduct::CUBLASLT_MATMUL_DESC_BIAS_POINTER, u64::from(OPERAND_ALIGNMENT))?;
        }
        let operand = product.precision.element();
        let layout = |(rows, cols, pitch): (u32, u32, u32), element| {
            let made = lt::create_matrix_layout(data_type(element), rows.into(), cols.into(), pitch.into());
            made.map(Layout).map_err(failed("cublasLtMatrixLayoutCreate"))
        };
        let layouts = [layout(shapes[0], operand)?, layout(shapes[1], operand)?, layout(shapes[2], product.out)?];
        let preference = Preference(lt::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?);
        preference.set(OfChoice::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, library.most_workspace)?;
        // The choice must not depend on where an allocator happens to put things.
        for attribute in [
            OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            OfChoice::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, OPERAND_ALIGNMENT)?;
        }
        // Parts of a sum are added in the type of sums, never in that of the output.
        let scheme = lt_sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        preference.set(OfChoice::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)?;
        let [a, b, out] = [&layouts[0], &layouts[1], &layouts[2]].map(|layout| layout.0);
        // SAFETY: all of them are live, and the handle is open.
        let chosen =
            unsafe { lt::get_matmul_algo_heuristic(library.handle, descriptor.0, a, b, out, out, preference.0) }
                .map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?;
        Ok(Self {
            product: *product,
            library: Arc::downgrade(&library.alive),
            descriptor,
            layouts,
            algorithm: chosen.algo,
            workspace_bytes: chosen.workspaceSize as u64,
            bias: Cell::new(0),
        })
    }

    fn suits(&self, library: &CublasLt, product: &LibraryProduct) -> bool {
        std::ptr::eq(self.library.as_ptr(), Arc::as_ptr(&library.alive)) && self.product == *product
    }

    /// # Safety
    ///
    /// As for [`CudaKernels::launch_library`].
    unsafe fn launch(&self, library: &CublasLt, stream: CUstream, operands: &Operands) -> Result<(), KernelError> {
        if self.product.bias && self.bias.get() != operands.bias {
            self.descriptor.set(OfProduct::CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias)?;
            self.bias.set(operands.bias);
        }
        let factors = [operands.alpha, operands.beta];
        let halves = factors.map(half::f16::from_f32);
        let [alpha, beta] = if self.product.sums_in_f16() {
            [argument(&halves[0]), argument(&halves[1])]
        } else {
            [argument(&factors[0]), argument(&factors[1])]
        };
        let [a_layout, b_layout, out_layout] = [&self.layouts[0], &self.layouts[1], &self.layouts[2]].map(|one| one.0);
        let at = |addr: u64| addr as *mut c_void;
        // SAFETY: descriptors and handle are live; alpha and beta are read during the call; the caller vouches for the
        // addresses, of which the library's A is our b. An output that is added to is its own C, as the library allows.
        unsafe {
            lt::matmul(
                library.handle,
                self.descriptor.0,
                alpha,
                beta,
                at(operands.b),
                a_layout,
                at(operands.a),
                b_layout,
                at(operands.out),
                out_layout,
                at(operands.out),
                out_layout,
                &raw const self.algorithm,
                at(operands.workspace.next_multiple_of(WORKSPACE_ALIGNMENT)),
                self.workspace_bytes as usize,
                stream.cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }
}

const SLOTS: usize = 64;

/// The plans of one thread: descriptors are written to, so threads have their own.
struct Plans {
    /// Where a product was found last.
    recent: [u32; SLOTS],
    all: Vec<LibraryPlan>,
}

thread_local! {
    static PLANS: RefCell<Plans> = const { RefCell::new(Plans { recent: [0; SLOTS], all: Vec::new() }) };
}

impl Plans {
    fn find(&mut self, library: &CublasLt, product: &LibraryProduct) -> Result<&LibraryPlan, KernelError> {
        let slot = product.slot();
        let suits = |plan: &LibraryPlan| plan.suits(library, product);
        let mut place = self.recent[slot] as usize;
        if !self.all.get(place).is_some_and(suits) {
            place = match self.all.iter().position(suits) {
                Some(place) => place,
                None => {
                    self.all.retain(|plan| plan.library.strong_count() > 0);
                    self.all.push(LibraryPlan::new(library, product)?);
                    self.all.len() - 1
                }
            };
            // CAST: nowhere near 2^32 shapes.
            self.recent[slot] = place as u32;
        }
        Ok(&self.all[place])
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
                let launched = PLANS.with_borrow_mut(|plans| {
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
        let bytes = PLANS.with_borrow_mut(|plans| plans.find(library, product).map(|plan| plan.workspace_bytes))?;
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
        PLANS.with_borrow_mut(|plans| unsafe { plans.find(library, product)?.launch(library, stream, operands) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(product: Product, precision: Precision, out: Element) -> LibraryProduct {
        let (m, n, k) = (5, 7, 11);
        let (a_pitch, b_pitch) = match product {
            Product::Forward => (k, k),
            Product::Input => (k, n),
            Product::Gradient => (m, n),
        };
        let [a_pitch, b_pitch] = [a_pitch, b_pitch].map(|cols| cols + 9);
        let out_pitch = n + 1;
        LibraryProduct { product, precision, m, n, k, a_pitch, b_pitch, out_pitch, out, bias: false, relu: false }
    }

    #[test]
    fn the_librarys_matrices_are_the_transposes_of_ours() {
        for of in Product::ALL {
            let product = product(of, Precision::F16, Element::F16);
            let ([a, b, out], transposed) = product.layouts();
            let shape =
                |(rows, cols, _): (u32, u32, u32), transposed| if transposed { (cols, rows) } else { (rows, cols) };
            assert_eq!(shape(a, transposed[0]), (product.n, product.k), "{of:?}");
            assert_eq!(shape(b, transposed[1]), (product.k, product.m), "{of:?}");
            assert_eq!(out, (product.n, product.m, product.out_pitch));
            // The library's columns are our rows, so that a pitch has room for what lies between the two.
            assert_eq!((a.2 - a.0, b.2 - b.0), (9, 9), "{of:?}");
        }
    }

    #[test]
    fn sums_are_in_f16_where_the_output_is_and_weights_are_not_stepped() {
        for of in Product::ALL {
            for precision in Precision::ALL {
                for out in [precision.element(), Element::F32] {
                    let product = product(of, precision, out);
                    let expected =
                        precision == Precision::F16Accumulate && out == Element::F16 && of != Product::Gradient;
                    assert_eq!(product.sums_in_f16(), expected, "{product:?}");
                    let (compute, scale) = product.compute();
                    assert_eq!(compute == Compute::CUBLAS_COMPUTE_16F, expected);
                    assert_eq!(scale == cudaDataType::CUDA_R_16F, expected, "alpha and beta are of the type of sums");
                    assert_eq!(compute == Compute::CUBLAS_COMPUTE_32F_FAST_TF32, precision == Precision::Tf32);
                }
            }
        }
    }

    #[test]
    fn the_epilogue_is_what_is_behind_the_product() {
        let plain = product(Product::Forward, Precision::F32, Element::F32);
        let with = |bias, relu| LibraryProduct { bias, relu, ..plain }.epilogue();
        assert_eq!(with(false, false), CUBLASLT_EPILOGUE_DEFAULT);
        assert_eq!(with(true, false), CUBLASLT_EPILOGUE_BIAS);
        assert_eq!(with(false, true), CUBLASLT_EPILOGUE_RELU);
        assert_eq!(with(true, true), CUBLASLT_EPILOGUE_RELU_BIAS);
    }

    #[test]
    fn the_products_of_a_network_are_looked_for_in_different_places() {
        // Three layers of the study in one type: what is launched in turn should not push each other out.
        let mut slots = std::collections::BTreeSet::new();
        let mut count = 0;
        for (inputs, outputs) in [(784, 784), (784, 784), (784, 10)] {
            for of in Product::ALL {
                let (m, n, k) = match of {
                    Product::Forward => (64, outputs, inputs),
                    Product::Input => (64, inputs, outputs),
                    Product::Gradient => (outputs, inputs, 64),
                };
                slots.insert(LibraryProduct { m, n, k, ..product(of, Precision::F16, Element::F16) }.slot());
                count += 1;
            }
        }
        // Two layers are alike.
        assert!(slots.len() >= count - 3 - 1, "{slots:?}");
        assert!(slots.iter().all(|slot| *slot < SLOTS));
    }

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
