//! What a thread keeps about the products that it launches.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::{Arc, Weak};

use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;

use super::product::{LibraryProduct, data_type};
use super::{CublasLt, OPERAND_ALIGNMENT, Operands, WORKSPACE_ALIGNMENT, failed};
use crate::cuda::argument;
use crate::error::KernelError;

use sys::cublasLtMatmulDescAttributes_t as OfProduct;
use sys::cublasLtMatmulPreferenceAttributes_t as OfChoice;

/// How a product is launched: what the library wants to be told each time.
pub(super) struct LibraryPlan {
    product: LibraryProduct,
    /// Of the handle that the algorithm was chosen with.
    library: Weak<()>,
    descriptor: Descriptor,
    layouts: [Layout; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    pub(super) workspace_bytes: u64,
    /// Address that the descriptor names.
    bias: Cell<u64>,
}

/// Destroyed when dropped, as the two below; that frees host memory.
struct Descriptor(sys::cublasLtMatmulDesc_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed nowhere else.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

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
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
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
    /// As for `CudaKernels::launch_library`.
    pub(super) unsafe fn launch(
        &self,
        library: &CublasLt,
        stream: CUstream,
        operands: &Operands,
    ) -> Result<(), KernelError> {
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
pub(super) struct Plans {
    /// Where a product was found last.
    recent: [u32; SLOTS],
    all: Vec<LibraryPlan>,
}

thread_local! {
    static PLANS: RefCell<Plans> = const { RefCell::new(Plans { recent: [0; SLOTS], all: Vec::new() }) };
}

impl Plans {
    /// Does something with those of this thread.
    pub(super) fn with<T>(work: impl FnOnce(&mut Self) -> T) -> T {
        PLANS.with_borrow_mut(work)
    }

    /// The plan of a product, made now if this thread has none yet.
    pub(super) fn find(&mut self, library: &CublasLt, product: &LibraryProduct) -> Result<&LibraryPlan, KernelError> {
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
