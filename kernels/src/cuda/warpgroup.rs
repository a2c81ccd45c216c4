//! Loading and launching the linear layers' kernels that take warpgroups and the copy engine: compute capability 9.0 and
//! 16-bit types; a module for each precision.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUfunction, CUfunction_attribute, CUmodule, CUstream, CUtensorMap, CUtensorMapDataType,
    CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use super::{LinearArguments, argument, driver_error, load_function, load_module};
use crate::error::KernelError;
use crate::ops::grid;
use crate::plan::{BackwardPlan, Choice, Plan, Product, Tile, streams};
use crate::precision::Precision;

/// Kernels of one precision; the last is that of both products of the way back.
const KERNELS: usize = 7;
const BACKWARD: usize = KERNELS - 1;
/// Products and tiles in the order of the others.
const PLACES: [(Product, Tile); BACKWARD] = [
    (Product::Forward, Tile::Warpgroup),
    (Product::Forward, Tile::WarpgroupThin),
    (Product::Input, Tile::Warpgroup),
    (Product::Input, Tile::WarpgroupThin),
    (Product::Gradient, Tile::Warpgroup),
    (Product::Update, Tile::Streamed),
];

macro_rules! names {
    ($($precision:literal),*) => {
        [$([
            concat!("linear_forward_", $precision, "_warpgroup"),
            concat!("linear_forward_", $precision, "_warpgroup_thin"),
            concat!("linear_input_", $precision, "_warpgroup"),
            concat!("linear_input_", $precision, "_warpgroup_thin"),
            concat!("linear_gradient_", $precision, "_warpgroup"),
            concat!("linear_update_", $precision, "_streamed"),
            concat!("linear_backward_", $precision, "_streamed"),
        ],)*]
    };
}

/// Entry points by precision: bf16, f16, f16 with sums in f16.
pub(super) const NAMES: [[&str; KERNELS]; 3] = names!("bf16", "f16", "f16acc");

macro_rules! ptx {
    ($($precision:literal),*) => {
        [$(concat!(include_str!(concat!("../../ptx/linear_hopper_", $precision, ".ptx")), "\0"),)*]
    };
}

/// PTX by precision, each with a NUL at its end.
pub(super) const PTX: [&str; 3] = ptx!("bf16", "f16", "f16acc");

fn index(precision: Precision) -> Option<usize> {
    match precision {
        Precision::F32 | Precision::Tf32 | Precision::F32x3 => None,
        Precision::Bf16 => Some(0),
        Precision::F16 => Some(1),
        Precision::F16Accumulate => Some(2),
    }
}

fn place(product: Product, tile: Tile) -> usize {
    // An update in tiles that do not stream is a gradient's epilogue.
    let product = if tile == Tile::Warpgroup && product == Product::Update { Product::Gradient } else { product };
    let found = PLACES.iter().position(|place| *place == (product, tile));
    found.expect("a plan has one of its product's tiles")
}

/// Name of the kernel of a tile with warpgroups.
pub(super) fn name(product: Product, precision: Precision, tile: Tile) -> &'static str {
    NAMES[index(precision).expect("only 16-bit types have such tiles")][place(product, tile)]
}

/// Name of the kernel that makes both products of the way back; only 16-bit types have it.
pub(crate) fn backward_name(precision: Precision) -> Option<&'static str> {
    index(precision).map(|index| NAMES[index][BACKWARD])
}

/// The kernels of one precision, loaded.
pub(super) struct WarpgroupKernels {
    module: CUmodule,
    functions: [CUfunction; KERNELS],
    multiprocessors: u32,
}

impl WarpgroupKernels {
    /// Those of a precision, if there are any.
    pub(super) fn load(precision: Precision, multiprocessors: u32) -> Result<Option<Self>, KernelError> {
        let Some(index) = index(precision) else { return Ok(None) };
        let module = load_module(PTX[index], NAMES[index][0])?;
        let mut functions = [std::ptr::null_mut(); KERNELS];
        let planned = PLACES.map(|(product, tile)| {
            Plan::with(product, precision, [64, 64, 64], Choice { tile, splits: 1 }).shared_bytes
        });
        let shared_bytes = planned.into_iter().chain([BackwardPlan::SHARED_BYTES]);
        let filled =
            functions.iter_mut().zip(NAMES[index]).zip(shared_bytes).try_for_each(|((function, name), bytes)| {
                *function = load_function(module, name)?;
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function belongs to a module that was just loaded. CAST: below 228 KiB.
                unsafe { result::function::set_function_attribute(*function, attribute, bytes as i32) }
                    .map_err(|error| driver_error("cuFuncSetAttribute", error))
            });
        match filled {
            Ok(()) => Ok(Some(Self { module, functions, multiprocessors })),
            Err(error) => {
                // SAFETY: loaded above, and nobody has it.
                let _ = unsafe { result::module::unload(module) };
                Err(error)
            }
        }
    }

    /// Queues a product on `stream`.
    ///
    /// # Safety
    ///
    /// As for `CudaKernels::launch_linear`; the plan has a tile with warpgroups.
    pub(super) unsafe fn launch(
        &self,
        plan: &Plan,
        stream: CUstream,
        arguments: &LinearArguments,
    ) -> Result<(), KernelError> {
        let LinearArguments { m, n, k, a_pitch, b_pitch, out_pitch, .. } = *arguments;
        debug_assert!(plan.tile != Tile::Streamed || streams([m, n, k]), "plans stream only what can");
        let (rows, cols) = if plan.tile == Tile::WarpgroupThin { (32, 64) } else { (128, 128) };
        // The kernels' stages have 64 steps of k, or as many as there are examples.
        let depth = if plan.tile == Tile::Streamed && k <= 32 { 32 } else { 64 };
        // With k along the rows a box has all lines of a tile, else 64 of them and all steps.
        let operand = |address, k_contiguous, lines, pitch, tile_lines| {
            if k_contiguous {
                tensor_map(address, [k, lines], pitch, [64, tile_lines])
            } else {
                tensor_map(address, [lines, k], pitch, [64, depth])
            }
        };
        let (a_contiguous, b_contiguous) = match plan.product {
            Product::Forward => (true, true),
            Product::Input => (true, false),
            Product::Gradient | Product::Update => (false, false),
        };
        let a = operand(arguments.a, a_contiguous, m, a_pitch, rows)?;
        let b = operand(arguments.b, b_contiguous, n, b_pitch, cols)?;
        let (out, blocks) = if plan.tile == Tile::Streamed {
            // Blocks stay, one on each multiprocessor, and take tile after tile.
            (tensor_map(arguments.out, [n, m], out_pitch, [64, 64])?, plan.blocks.min(self.multiprocessors.into()))
        } else {
            (a, plan.blocks)
        };
        let blocks = grid(plan.kernel(), blocks)?;
        let mut parameters: [*mut c_void; 4] = [argument(arguments), argument(&a), argument(&b), argument(&out)];
        let function = self.functions[place(plan.product, plan.tile)];
        // SAFETY: the function is loaded as long as `self` lives and takes these four; the caller vouches for the rest.
        unsafe {
            result::launch_kernel(
                function,
                (blocks, 1, 1),
                (plan.threads(), 1, 1),
                plan.shared_bytes,
                stream,
                &mut parameters,
            )
        }
        .map_err(|error| driver_error("cuLaunchKernel", error))
    }

    /// Queues both products of the way back on `stream`.
    ///
    /// # Safety
    ///
    /// As for `CudaKernels::launch_backward`.
    pub(super) unsafe fn launch_backward(
        &self,
        plan: &BackwardPlan,
        stream: CUstream,
        arguments: &LinearArguments,
        x: (u64, u32),
    ) -> Result<(), KernelError> {
        let LinearArguments { m, n, k, a_pitch, b_pitch, .. } = *arguments;
        let examples = if m <= 32 { 32 } else { 64 };
        let dy = tensor_map(arguments.a, [k, m], a_pitch, [64, examples])?;
        let x = tensor_map(x.0, [n, m], x.1, [64, examples])?;
        let weight = tensor_map(arguments.b, [n, k], b_pitch, [64, 64])?;
        let blocks = grid("linear_backward", plan.blocks())?;
        let mut parameters: [*mut c_void; 4] = [argument(arguments), argument(&dy), argument(&x), argument(&weight)];
        // SAFETY: the function is loaded as long as `self` lives and takes these four; the caller vouches for the rest.
        unsafe {
            result::launch_kernel(
                self.functions[BACKWARD],
                (blocks, 1, 1),
                (BackwardPlan::THREADS, 1, 1),
                BackwardPlan::SHARED_BYTES,
                stream,
                &mut parameters,
            )
        }
        .map_err(|error| driver_error("cuLaunchKernel", error))
    }

    pub(super) fn unload(&self) {
        // SAFETY: loaded by `load`; whoever calls this drops `self`. An error has nobody to go to.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// A matrix of 16-bit elements as the copy engine sees it, `[cols, rows]`, with rows of 128 bytes swizzled in shared memory.
/// A calculation on the host: nothing of it stays with the driver.
fn tensor_map(
    address: u64,
    [cols, rows]: [u32; 2],
    pitch: u32,
    [box_cols, box_rows]: [u32; 2],
) -> Result<CUtensorMap, KernelError> {
    let mut map = MaybeUninit::uninit();
    let sizes = [u64::from(cols), u64::from(rows)];
    let strides = [u64::from(pitch) * 2];
    let (boxes, steps) = ([box_cols, box_rows], [1, 1]);
    // SAFETY: the arrays have as many entries as a matrix asks for, and the driver writes the map if it succeeds.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            address as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()
        .map_err(|error| driver_error("cuTensorMapEncodeTiled", error))?;
        Ok(map.assume_init())
    }
}
