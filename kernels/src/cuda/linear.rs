//! Loading and launching the kernels of the linear layers: one module for each precision, loaded on first use.

use cudarc::driver::sys::CUstream;

use super::module::{Module, Ptx, ptx};
use super::warpgroup::{self, WarpgroupKernels};
use super::{CudaKernels, LaunchShape, LinearArguments, argument, grid, queue};
use crate::error::KernelError;
use crate::plan::{Choice, Plan, Product, THREADS, Tile};
use crate::storage::Precision;

/// Kernels of one precision.
const KERNELS: usize = 14;

macro_rules! names {
    ($($precision:literal),*) => {
        [$([
            concat!("linear_forward_", $precision, "_thin16"),
            concat!("linear_forward_", $precision, "_thin32"),
            concat!("linear_forward_", $precision, "_thin64"),
            concat!("linear_forward_", $precision, "_thin128"),
            concat!("linear_forward_", $precision, "_wide"),
            concat!("linear_input_", $precision, "_thin16"),
            concat!("linear_input_", $precision, "_thin32"),
            concat!("linear_input_", $precision, "_thin64"),
            concat!("linear_input_", $precision, "_thin128"),
            concat!("linear_input_", $precision, "_wide"),
            concat!("linear_gradient_", $precision, "_fine"),
            concat!("linear_gradient_", $precision, "_flat"),
            concat!("linear_gradient_", $precision, "_slim"),
            concat!("linear_gradient_", $precision, "_wide"),
        ],)*]
    };
}

/// Entry points by precision, in the order of [`Precision::ALL`].
pub(super) const NAMES: [[&str; KERNELS]; 4] = names!("f32", "tf32", "bf16", "f16");

/// PTX by precision, in the same order.
pub(super) const PTX: [Ptx; 4] = [ptx!("linear_f32"), ptx!("linear_tf32"), ptx!("linear_bf16"), ptx!("linear_f16")];

/// The kernels of one precision, loaded.
pub(super) struct LinearKernels {
    module: Module,
    /// `Some` on a GPU with warpgroups.
    warpgroup: Option<WarpgroupKernels>,
}

impl Plan {
    fn kernel_index(&self) -> usize {
        let first = match self.product {
            Product::Forward => 0,
            Product::Input => 5,
            Product::Gradient | Product::Update => 10,
        };
        let within = self.product.tiles().iter().position(|tile| *tile == self.tile);
        first + within.expect("the plan's tile is one of its product's tiles")
    }

    /// Name of the kernel.
    pub(crate) fn kernel(&self) -> &'static str {
        if self.tile.needs_warpgroups() {
            return warpgroup::name(self.product, self.precision, self.tile);
        }
        NAMES[self.precision as usize][self.kernel_index()]
    }
}

impl CudaKernels {
    /// Loads the kernels of a precision, unless they are loaded. The first launch does so, too, but loading is not
    /// allowed during a stream capture.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load); [`KernelError::DeviceTooOld`] below compute capability 8.0.
    pub fn prepare(&self, precision: Precision) -> Result<(), KernelError> {
        self.linear(precision).map(|_| ())
    }

    /// Returns true if launches with this tile use it on this GPU; otherwise they use another tile.
    #[must_use]
    pub fn has(&self, tile: Tile) -> bool {
        self.warpgroups.is_some() || !tile.needs_warpgroups()
    }

    fn linear(&self, precision: Precision) -> Result<&LinearKernels, KernelError> {
        let slot = &self.linear[precision as usize];
        if let Some(loaded) = slot.get() {
            return Ok(loaded);
        }
        let tiles = [Product::Forward, Product::Input, Product::Gradient]
            .into_iter()
            .flat_map(|product| product.tiles().iter().map(move |&tile| (product, tile)));
        let kernels: Vec<(&'static str, u32)> = tiles
            .map(|(product, tile)| {
                let plan = Plan::with(product, precision, [1, 1, 1], Choice { tile, splits: 1 });
                // The kernel may need more shared memory than the default limit of a launch.
                (plan.kernel(), plan.shared_bytes.min(self.shared_limit))
            })
            .collect();
        let module = Module::load(&PTX[precision as usize], &kernels)?;
        let warpgroup = match self.warpgroups.map(|count| WarpgroupKernels::load(precision, count)).transpose() {
            Ok(warpgroup) => warpgroup.flatten(),
            Err(error) => {
                module.unload();
                return Err(error);
            }
        };
        // If another thread was faster, its module is used and this one is unloaded.
        slot.set(LinearKernels { module, warpgroup }).unwrap_or_else(|spare| spare.unload());
        Ok(slot.get().expect("the slot was set above"))
    }

    /// The plan that a launch uses on this GPU.
    fn supported_plan(&self, kernels: &LinearKernels, plan: &Plan, shape: [u32; 3]) -> Plan {
        let has_warpgroups = kernels.warpgroup.is_some();
        let plan = if has_warpgroups { *plan } else { plan.portable(shape) };
        // If the planned tile does not fit a multiprocessor or is unavailable, a smaller tile without split-k replaces
        // it.
        let smaller = || {
            let gradient = matches!(plan.product, Product::Gradient | Product::Update);
            let tile = if gradient { Tile::Fine } else { Tile::Thin16 };
            Plan::with(plan.product, plan.precision, shape, Choice { tile, splits: 1 })
        };
        let is_available = has_warpgroups || !plan.tile.needs_warpgroups();
        let streams = plan.tile != Tile::Streamed || crate::plan::streams(shape);
        let fits = plan.shared_bytes <= self.shared_limit;
        if is_available && streams && fits { plan } else { smaller() }
    }

    /// Name of the kernel that a launch of this plan uses on this GPU.
    pub(crate) fn kernel_of(&self, plan: &Plan, shape: [u32; 3]) -> Result<&'static str, KernelError> {
        Ok(self.supported_plan(self.linear(plan.precision)?, plan, shape).kernel())
    }

    /// Queues a linear layer's GEMM on `stream`.
    ///
    /// # Safety
    ///
    /// The addresses among the arguments meet the requirements of [`Operation::launch`](crate::Operation::launch), each
    /// matrix is readable up to the pitch of its last row, and the arguments belong to the plan's product and shape.
    pub(crate) unsafe fn launch_linear(
        &self,
        plan: &Plan,
        stream: CUstream,
        arguments: &LinearArguments,
    ) -> Result<(), KernelError> {
        let kernels = self.linear(plan.precision)?;
        let plan = self.supported_plan(kernels, plan, [arguments.m, arguments.n, arguments.k]);
        let arguments = LinearArguments { splits: plan.splits, ..*arguments };
        if let (true, Some(warpgroup)) = (plan.tile.needs_warpgroups(), &kernels.warpgroup) {
            // SAFETY: the caller guarantees the addresses, and the plan's tile has warpgroups.
            return unsafe { warpgroup.launch(&plan, stream, &arguments) };
        }
        let function = kernels.module.functions[plan.kernel_index()];
        let blocks = grid(plan.kernel(), plan.blocks)?;
        let shape = LaunchShape { blocks, threads: THREADS, shared_bytes: plan.shared_bytes };
        // SAFETY: the function is loaded as long as `self` lives, and takes this struct; the caller guarantees the
        // rest.
        unsafe { queue(function, shape, stream, [argument(&arguments)]) }
    }
}

impl LinearKernels {
    pub(super) fn unload(&self) {
        self.warpgroup.iter().for_each(WarpgroupKernels::unload);
        self.module.unload();
    }
}
