//! Loading the embedded PTX and launching kernels from it.

mod linear;
mod linear_arguments;
mod module;
mod warpgroup;

use std::ffi::c_void;
use std::sync::OnceLock;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUresult, CUstream};

use crate::error::KernelError;
use linear::LinearKernels;
pub(crate) use linear_arguments::LinearArguments;
use module::{Module, Ptx};

/// CUDA's limit on the first dimension of a grid.
const MAX_BLOCKS: u64 = (1 << 31) - 1;

struct Source {
    ptx: Ptx,
    kernels: &'static [Kernel],
}

/// Declares every kernel once: the file it is in, the operation's handle for it, and its entry point.
macro_rules! kernels {
    ($($file:literal { $($kernel:ident = $name:literal,)* })*) => {
        /// A kernel of the embedded PTX; its value is its index in [`CudaKernels`]' table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum Kernel { $($($kernel,)*)* }

        impl Kernel {
            const ALL: &[Kernel] = &[$($(Kernel::$kernel,)*)*];

            /// The CUDA entry point.
            pub(crate) const fn name(self) -> &'static str {
                match self { $($(Kernel::$kernel => $name,)*)* }
            }
        }

        const SOURCES: &[Source] = &[$(
            Source {
                ptx: module::ptx!($file),
                kernels: &[$(Kernel::$kernel,)*],
            },
        )*];
    };
}

kernels! {
    "gemm" {
        GemmNnTiled = "gemm_nn_tiled",
        GemmNtTiled = "gemm_nt_tiled",
        GemmTnTiled = "gemm_tn_tiled",
        GemmNnSliced = "gemm_nn_sliced",
        GemmNtSliced = "gemm_nt_sliced",
        GemmTnSliced = "gemm_tn_sliced",
    }
    "bias" {
        AddBias = "add_bias",
        AddBiasBf16 = "add_bias_bf16",
        AddBiasF16 = "add_bias_f16",
        BiasGradient = "bias_gradient",
        BiasGradientBf16 = "bias_gradient_bf16",
        BiasGradientF16 = "bias_gradient_f16",
    }
    "relu" {
        Relu = "relu",
        ReluBf16 = "relu_bf16",
        ReluF16 = "relu_f16",
        ReluBackward = "relu_backward",
        ReluBackwardBf16 = "relu_backward_bf16",
        ReluBackwardF16 = "relu_backward_f16",
    }
    "loss" {
        SoftmaxCrossEntropy = "softmax_cross_entropy",
        SoftmaxCrossEntropyBf16 = "softmax_cross_entropy_bf16",
        SoftmaxCrossEntropyF16 = "softmax_cross_entropy_f16",
        CrossEntropyLoss = "cross_entropy_loss",
        MeanLoss = "mean_loss",
    }
    "softmax_loss" {
        SoftmaxLoss = "softmax_loss",
        SoftmaxLossBf16 = "softmax_loss_bf16",
        SoftmaxLossF16 = "softmax_loss_f16",
    }
    "accuracy" {
        CountCorrect = "count_correct",
    }
    "sgd" {
        Sgd = "sgd",
        SgdBf16 = "sgd_bf16",
        SgdF16 = "sgd_f16",
    }
    "gather" {
        GatherRowsU8 = "gather_rows_u8",
        GatherRowsU8Bf16 = "gather_rows_u8_bf16",
        GatherRowsU8F16 = "gather_rows_u8_f16",
        GatherRowsF32 = "gather_rows_f32",
        GatherRowsF32Bf16 = "gather_rows_f32_bf16",
        GatherRowsF32F16 = "gather_rows_f32_f16",
        GatherLabels = "gather_labels",
    }
    "convert" {
        ConvertF32Bf16 = "convert_f32_bf16",
        ConvertF32F16 = "convert_f32_f16",
        ConvertBf16F32 = "convert_bf16_f32",
        ConvertF16F32 = "convert_f16_f32",
    }
    "cursor" {
        AdvanceCursor = "advance_cursor",
    }
    "fill" {
        Fill = "fill",
    }
}

/// Names of all kernels, which are the possible results of [`Operation::name`](crate::Operation::name).
pub fn kernel_names() -> impl Iterator<Item = &'static str> {
    Kernel::ALL
        .iter()
        .map(|kernel| kernel.name())
        .chain(linear::NAMES.into_iter().flatten())
        .chain(warpgroup::NAMES.into_iter().flatten().copied())
}

/// The kernels, compiled for and loaded on one GPU.
///
/// Dropping it unloads the kernels: it temporarily makes the context that loaded them current, and does not wait for
/// launches. It must be dropped after the last launch has finished and before the context is destroyed.
pub struct CudaKernels {
    context: cudarc::driver::sys::CUcontext,
    /// In the order of `SOURCES`.
    modules: Vec<Module>,
    /// By kernel.
    functions: Vec<CUfunction>,
    /// By precision, in the order of [`Precision::ALL`](crate::Precision::ALL).
    linear: [OnceLock<LinearKernels>; linear::NAMES.len()],
    /// Maximum shared memory of a block.
    shared_limit: u32,
    /// Number of multiprocessors of a GPU with warpgroups and TMA; `None` on other GPUs.
    warpgroups: Option<u32>,
}

// SAFETY: the fields are handles of the driver, which any thread may use; fields that change after `load` are behind a
// lock.
unsafe impl Send for CudaKernels {}
// SAFETY: as above.
unsafe impl Sync for CudaKernels {}

impl CudaKernels {
    /// Loads all kernels except those of the linear layers ([`prepare`](Self::prepare)) into the current context. It
    /// decompresses the embedded PTX, and the driver compiles it for the GPU. The driver caches the result on disk, so
    /// only the first load takes noticeable time.
    ///
    /// # Errors
    ///
    /// [`KernelError::DriverTooOld`], [`KernelError::DeviceTooOld`], or [`KernelError::Driver`] (without a current
    /// context: `CUDA_ERROR_INVALID_CONTEXT`).
    ///
    /// # Panics
    ///
    /// If the driver's library is absent: check `cudarc::driver::sys::is_culib_present()` before any call into CUDA.
    pub fn load() -> Result<Self, KernelError> {
        let context = result::ctx::get_current()
            .map_err(|error| driver_error("cuCtxGetCurrent", error))?
            .ok_or_else(|| driver_error("cuCtxGetCurrent", DriverError(CUresult::CUDA_ERROR_INVALID_CONTEXT)))?;
        // Filled incrementally, so that modules already loaded are unloaded if a later one fails.
        let mut loaded = Self {
            context,
            modules: Vec::with_capacity(SOURCES.len()),
            functions: Vec::with_capacity(Kernel::ALL.len()),
            linear: Default::default(),
            shared_limit: shared_limit()?,
            warpgroups: warpgroups()?,
        };
        for source in SOURCES {
            let kernels: Vec<(&'static str, u32)> = source.kernels.iter().map(|kernel| (kernel.name(), 0)).collect();
            let module = Module::load(&source.ptx, &kernels)?;
            // Kernels are numbered in the order of their sources.
            loaded.functions.extend(&module.functions);
            loaded.modules.push(module);
        }
        Ok(loaded)
    }

    /// Disables the kernels for compute capability 9.0, for comparisons: launches use the tiles for all GPUs, and give
    /// the same bits as on such GPUs. Call it before [`prepare`](Self::prepare).
    #[must_use]
    pub fn without_warpgroups(mut self) -> Self {
        self.warpgroups = None;
        self
    }

    /// Queues `kernel` on `stream` with a one-dimensional grid and no dynamic shared memory.
    ///
    /// # Safety
    ///
    /// `arguments` have the types of the kernel's parameters, in order, and the addresses among them meet the
    /// requirements of [`Operation::launch`](crate::Operation::launch).
    #[inline]
    pub(crate) unsafe fn launch<const N: usize>(
        &self,
        kernel: Kernel,
        blocks: u64,
        threads: u32,
        stream: CUstream,
        arguments: [u64; N],
    ) -> Result<(), KernelError> {
        let shape = LaunchShape { blocks: grid(kernel.name(), blocks)?, threads, shared_bytes: 0 };
        // SAFETY: the function belongs to a module that is loaded as long as `self` lives; the caller guarantees the
        // rest.
        unsafe { queue(self.functions[kernel as usize], shape, stream, arguments.each_ref().map(argument)) }
    }
}

impl Drop for CudaKernels {
    fn drop(&mut self) {
        // Best effort: after a failure the context is broken or destroyed, and the modules with it.
        let current = result::ctx::get_current().ok().flatten();
        // SAFETY: the context was current when the modules were loaded, and outlives `self` by the type's contract.
        let bound = unsafe { result::ctx::set_current(self.context) };
        if bound.is_ok() {
            self.modules.iter().for_each(Module::unload);
            self.linear.iter().filter_map(OnceLock::get).for_each(LinearKernels::unload);
        }
        // SAFETY: this context was current on this thread before; null stands for no context.
        let _ = unsafe { result::ctx::set_current(current.unwrap_or(std::ptr::null_mut())) };
    }
}

impl std::fmt::Debug for CudaKernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaKernels").field("kernels", &Kernel::ALL.len()).finish_non_exhaustive()
    }
}

/// Maximum shared memory of a block on the current context's device.
fn shared_limit() -> Result<u32, KernelError> {
    // CAST: the driver returns a size.
    attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN).map(|bytes| bytes as u32)
}

/// Number of multiprocessors of the current context's device, if its compute capability is 9.0: later GPUs do not have
/// these instructions.
fn warpgroups() -> Result<Option<u32>, KernelError> {
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // CAST: a number of multiprocessors.
    Ok(((major, minor) == (9, 0)).then_some(multiprocessors as u32))
}

/// Attributes of the current context's device, read from the driver.
fn attribute(attribute: CUdevice_attribute) -> Result<i32, KernelError> {
    let mut device = 0;
    // SAFETY: the driver writes the device of the current context, or fails.
    unsafe { sys::cuCtxGetDevice(&raw mut device) }.result().map_err(|error| driver_error("cuCtxGetDevice", error))?;
    // SAFETY: the device of a context that is current.
    let value = unsafe { result::device::get_attribute(device, attribute) };
    value.map_err(|error| driver_error("cuDeviceGetAttribute", error))
}

/// The grid of a launch, if it is within CUDA's limit.
fn grid(operation: &'static str, blocks: u64) -> Result<u32, KernelError> {
    u32::try_from(blocks).ok().filter(|_| blocks <= MAX_BLOCKS).ok_or_else(|| KernelError::Shape {
        operation,
        what: format!("{blocks} thread blocks exceed CUDA's limit of {MAX_BLOCKS}"),
    })
}

/// Grid, block and dynamic shared memory of a launch; the first two have one dimension.
struct LaunchShape {
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
}

/// Queues a launch.
///
/// # Safety
///
/// The function is loaded, `arguments` point at values of the types of its parameters, in order, and the addresses
/// among them meet the requirements of [`Operation::launch`](crate::Operation::launch).
unsafe fn queue<const N: usize>(
    function: CUfunction,
    shape: LaunchShape,
    stream: CUstream,
    mut arguments: [*mut c_void; N],
) -> Result<(), KernelError> {
    let LaunchShape { blocks, threads, shared_bytes } = shape;
    // SAFETY: the caller guarantees all of it.
    unsafe { result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), shared_bytes, stream, &mut arguments) }
        .map_err(|error| driver_error("cuLaunchKernel", error))
}

/// Pointer to a kernel argument. The driver copies the value during the launch call and writes nothing.
fn argument<T>(value: &T) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

/// The arguments of a launch, in the order of the kernel's parameters: integers, addresses, and the bits of floats.
/// Each has eight bytes, of which the driver copies the lower ones, up to the parameter's size.
macro_rules! arguments {
    ($($value:expr),*) => { [$(u64::from($value)),*] };
}
pub(crate) use arguments;

/// The error contains only the code's name, because formatting a `DriverError` would call into the driver.
fn driver_error(call: &'static str, error: DriverError) -> KernelError {
    KernelError::Driver { call, code: error.0 as u32, name: format!("{:?}", error.0) }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use super::*;

    fn entries(ptx: &str) -> BTreeSet<&str> {
        ptx.lines()
            .filter_map(|line| line.trim().strip_prefix(".visible .entry "))
            .map(|rest| rest.trim_end_matches('('))
            .collect()
    }

    /// Names and architectures of the modules: those in a source's lines `// module NAME: ARCHITECTURE, KERNELS`, or
    /// one with the source's name for the oldest GPUs.
    fn sources() -> BTreeMap<String, String> {
        let mut out = BTreeMap::new();
        for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "cu") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let module_line = |line: &str| {
                let (name, rest) = line.strip_prefix("// module ")?.split_once(": compute_")?;
                Some((name.to_owned(), rest.split(',').next()?.to_owned()))
            };
            let before = out.len();
            out.extend(text.lines().filter_map(module_line));
            if out.len() == before {
                out.insert(path.file_stem().unwrap().to_str().unwrap().to_owned(), "75".to_owned());
            }
        }
        out
    }

    /// Every module with the kernels that it declares.
    fn modules() -> Vec<(Ptx, BTreeSet<&'static str>)> {
        let small =
            SOURCES.iter().map(|source| (source.ptx, source.kernels.iter().map(|kernel| kernel.name()).collect()));
        let linear = linear::PTX.into_iter().zip(linear::NAMES).map(|(ptx, names)| (ptx, names.into()));
        let warpgroup = warpgroup::PTX.into_iter().zip(warpgroup::NAMES);
        let warpgroup = warpgroup.map(|(ptx, names)| (ptx, names.iter().copied().collect()));
        small.chain(linear).chain(warpgroup).collect()
    }

    #[test]
    fn each_source_has_its_ptx_and_each_ptx_is_embedded() {
        let embedded: BTreeSet<String> = modules().iter().map(|(ptx, _)| ptx.stem.to_owned()).collect();
        assert_eq!(embedded.len(), modules().len());
        assert_eq!(sources().into_keys().collect::<BTreeSet<_>>(), embedded);
        let stored = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx")).unwrap();
        let stored = stored.map(|entry| entry.unwrap().file_name().into_string().unwrap().replace(".ptx.xz", ""));
        assert_eq!(stored.collect::<BTreeSet<_>>(), embedded);
    }

    #[test]
    fn each_ptx_contains_exactly_the_declared_kernels() {
        for (ptx, declared) in modules() {
            let text = ptx.text().unwrap_or_else(|| panic!("{} is damaged", ptx.stem));
            assert_eq!(entries(text.to_str().unwrap()), declared, "{}", ptx.stem);
        }
    }

    #[test]
    fn ptx_is_for_the_stated_architecture_and_names_no_folder() {
        let sources = sources();
        for (ptx, _) in modules() {
            let (stem, text) = (ptx.stem, ptx.text().unwrap());
            let text = text.to_str().unwrap();
            let header = format!("\n.version 8.4\n.target sm_{}\n", sources[stem]);
            assert!(text.contains(&header), "{stem}");
            assert!(!text.contains(".file") && !text.contains("/home") && !text.contains("/tmp"), "{stem}");
        }
    }

    #[test]
    fn kernel_value_is_its_index() {
        for (index, &kernel) in Kernel::ALL.iter().enumerate() {
            assert_eq!(kernel as usize, index);
        }
        let linear = linear::NAMES.as_flattened().len() + warpgroup::NAMES.concat().len();
        assert_eq!(kernel_names().collect::<BTreeSet<_>>().len(), Kernel::ALL.len() + linear);
    }

    #[test]
    fn driver_error_is_formatted_without_the_driver() {
        let error = driver_error("cuLaunchKernel", DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(error.to_string(), "cuLaunchKernel failed with CUDA_ERROR_OUT_OF_MEMORY (2)");
    }
}
