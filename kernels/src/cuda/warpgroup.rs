//! Loading and launching the linear layers' kernels with warpgroups and TMA, for compute capability 9.0 and tensor
//! cores; one module for each precision.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    self, CUstream, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use super::module::{Module, Ptx, ptx};
use super::{LaunchShape, LinearArguments, argument, driver_error, grid, queue};
use crate::error::KernelError;
use crate::plan::{Choice, Plan, Product, Tile, streams};
use crate::storage::{Element, Precision};

/// Products and tiles of the kernels of 16-bit types, in the order of their names.
const HALF_KERNELS: [(Product, Tile); 6] = [
    (Product::Forward, Tile::Warpgroup),
    (Product::Forward, Tile::WarpgroupThin),
    (Product::Input, Tile::Warpgroup),
    (Product::Input, Tile::WarpgroupThin),
    (Product::Gradient, Tile::Warpgroup),
    (Product::Update, Tile::Streamed),
];
/// The same for tf32.
const TF32_KERNELS: [(Product, Tile); 2] = [(Product::Forward, Tile::Warpgroup), (Product::Gradient, Tile::Warpgroup)];

macro_rules! half_names {
    ($precision:literal) => {
        &[
            concat!("linear_forward_", $precision, "_warpgroup"),
            concat!("linear_forward_", $precision, "_warpgroup_thin"),
            concat!("linear_input_", $precision, "_warpgroup"),
            concat!("linear_input_", $precision, "_warpgroup_thin"),
            concat!("linear_gradient_", $precision, "_warpgroup"),
            concat!("linear_update_", $precision, "_streamed"),
        ]
    };
}
/// Entry points by precision: bf16, f16, tf32.
pub(super) const NAMES: [&[&str]; 3] =
    [half_names!("bf16"), half_names!("f16"), &["linear_forward_tf32_warpgroup", "linear_gradient_tf32_warpgroup"]];

/// PTX by precision, in the same order.
pub(super) const PTX: [Ptx; 3] = [ptx!("linear_hopper_bf16"), ptx!("linear_hopper_f16"), ptx!("linear_hopper_tf32")];

fn index(precision: Precision) -> Option<usize> {
    match precision {
        Precision::F32 => None,
        Precision::Bf16 => Some(0),
        Precision::F16 => Some(1),
        Precision::Tf32 => Some(2),
    }
}

fn kernels_of(precision: Precision) -> &'static [(Product, Tile)] {
    if precision.element() == Element::F32 { &TF32_KERNELS } else { &HALF_KERNELS }
}

fn kernel_index(product: Product, precision: Precision, tile: Tile) -> usize {
    // An update with tiles that do not stream is an epilogue of the gradient's kernel.
    let product = if tile == Tile::Warpgroup && product == Product::Update { Product::Gradient } else { product };
    let index = kernels_of(precision).iter().position(|kernel| *kernel == (product, tile));
    index.expect("the plan's tile is one of its product's tiles")
}

/// Name of the kernel of a tile with warpgroups.
pub(super) fn name(product: Product, precision: Precision, tile: Tile) -> &'static str {
    NAMES[index(precision).expect("f32 has no tiles with warpgroups")][kernel_index(product, precision, tile)]
}

/// The kernels of one precision, loaded.
pub(super) struct WarpgroupKernels {
    module: Module,
    multiprocessors: u32,
}

impl WarpgroupKernels {
    /// Loads the kernels of a precision, if it has any.
    pub(super) fn load(precision: Precision, multiprocessors: u32) -> Result<Option<Self>, KernelError> {
        let Some(index) = index(precision) else { return Ok(None) };
        let shared_bytes = kernels_of(precision).iter().map(|&(product, tile)| {
            Plan::with(product, precision, [64, 64, 64], Choice { tile, splits: 1 }).shared_bytes
        });
        let kernels: Vec<(&'static str, u32)> = NAMES[index].iter().copied().zip(shared_bytes).collect();
        Ok(Some(Self { module: Module::load(&PTX[index], &kernels)?, multiprocessors }))
    }

    /// Queues a GEMM on `stream`.
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
        debug_assert!(plan.tile != Tile::Streamed || streams([m, n, k]), "plans stream only shapes that can stream");
        let (rows, cols) = if plan.tile == Tile::WarpgroupThin { (32, 64) } else { (128, 128) };
        let element = plan.precision.element();
        // A TMA box is 128 bytes wide. A stage has as many steps of k as fit in 128 bytes, or 32 if a streamed update
        // has at most 32 examples.
        let wide = if element == Element::F32 { 32 } else { 64 };
        let depth = if plan.tile == Tile::Streamed && k <= 32 { 32 } else { wide };
        // If k is contiguous, a box has all lines of a tile; otherwise it has 128 bytes of lines, and all steps of k of
        // a stage.
        let operand = |address, k_contiguous, lines, pitch, tile_lines| {
            if k_contiguous {
                tensor_map(element, address, [k, lines], pitch, [wide, tile_lines])
            } else {
                tensor_map(element, address, [lines, k], pitch, [wide, depth])
            }
        };
        let (a_contiguous, b_contiguous) = plan.product.contiguous();
        let a = operand(arguments.a, a_contiguous, m, a_pitch, rows)?;
        let b = operand(arguments.b, b_contiguous, n, b_pitch, cols)?;
        let streamed = plan.tile == Tile::Streamed;
        let out = if streamed { tensor_map(element, arguments.out, [n, m], out_pitch, [64, 64])? } else { a };
        // Streamed updates and f32 use persistent blocks: one on each multiprocessor, which processes several tiles.
        let persistent = streamed || element == Element::F32;
        let blocks = if persistent { plan.blocks.min(self.multiprocessors.into()) } else { plan.blocks };
        let blocks = grid(plan.kernel(), blocks)?;
        let arguments = [argument(arguments), argument(&a), argument(&b), argument(&out)];
        let function = self.module.functions[kernel_index(plan.product, plan.precision, plan.tile)];
        let shape = LaunchShape { blocks, threads: plan.threads(), shared_bytes: plan.shared_bytes };
        // SAFETY: the function is loaded as long as `self` lives, and takes these four arguments; the caller guarantees
        // the rest.
        unsafe { queue(function, shape, stream, arguments) }
    }

    pub(super) fn unload(&self) {
        self.module.unload();
    }
}

/// TMA descriptor of a matrix `[cols, rows]`, whose boxes have rows of 128 bytes, swizzled in shared memory. The driver
/// computes it on the host and keeps no reference to it.
fn tensor_map(
    element: Element,
    address: u64,
    [cols, rows]: [u32; 2],
    pitch: u32,
    [box_cols, box_rows]: [u32; 2],
) -> Result<CUtensorMap, KernelError> {
    let mut map = MaybeUninit::uninit();
    let sizes = [u64::from(cols), u64::from(rows)];
    let strides = [u64::from(pitch) * element.bytes()];
    // Integer types, so that the bits are copied unchanged.
    let kind = match element {
        Element::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        Element::Bf16 | Element::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
    };
    let (boxes, steps) = ([box_cols, box_rows], [1, 1]);
    // SAFETY: the arrays have the two entries that a matrix requires, and the driver writes the map if it succeeds.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            kind,
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
