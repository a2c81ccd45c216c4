//! Loading and launching the kernels that do many steps: a module for each precision, loaded when it is first wanted.

use std::ffi::c_void;

use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUmodule, CUstream,
};

use super::module::{Ptx, load_function, ptx};
use super::{CudaKernels, LinearArguments, argument, attribute, driver_error};
use crate::error::KernelError;
use crate::phase::Phase;
use crate::plan::THREADS;
use crate::precision::Precision;

/// Entry points by precision, in the order of [`Precision::ALL`], of which the last has none.
pub(super) const NAMES: [&str; 5] = [
    "persistent_steps_f32",
    "persistent_steps_tf32",
    "persistent_steps_bf16",
    "persistent_steps_f16",
    "persistent_steps_f16acc",
];

/// PTX by precision: for any GPU, and for those that have clusters.
pub(super) const PTX: [[Ptx; 2]; 5] = [
    [ptx!("persistent_f32"), ptx!("persistent_cluster_f32")],
    [ptx!("persistent_tf32"), ptx!("persistent_cluster_tf32")],
    [ptx!("persistent_bf16"), ptx!("persistent_cluster_bf16")],
    [ptx!("persistent_f16"), ptx!("persistent_cluster_f16")],
    [ptx!("persistent_f16acc"), ptx!("persistent_cluster_f16acc")],
];

/// Phases that the kernel's parameters have room for.
pub(crate) const MOST_PHASES: usize = 32;

/// How the blocks of a persistent kernel meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cooperation {
    /// By a word in device memory: a cooperative launch with as many blocks as have work, or as the GPU holds at once.
    Grid,
    /// By the hardware's barrier: one cluster of at most 16 blocks. Needs compute capability 9.0.
    Cluster,
}

/// The kernel of one precision, loaded.
pub(super) struct PersistentKernel {
    module: CUmodule,
    function: CUfunction,
    /// Most dynamic shared memory of a block.
    shared_limit: u32,
    /// Blocks of the largest grid, one for each multiprocessor: where more would fit, they would only make the meetings
    /// longer.
    grid: u32,
    /// Blocks of the largest cluster, if there can be one.
    cluster: Option<u32>,
}

/// What a phase that gathers is given; the struct of the same name in `cuda/persistent.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct GatherArguments {
    pub(crate) source: u64,
    pub(crate) indices: u64,
    pub(crate) cursor: u64,
    pub(crate) out: u64,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) pitch: u32,
    pub(crate) batch: u32,
    pub(crate) source_rows: u32,
    pub(crate) scale: f32,
    pub(crate) shift: f32,
}

/// The same for the two phases of the loss.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct LossArguments {
    pub(crate) logits: u64,
    pub(crate) labels: u64,
    pub(crate) dlogits: u64,
    pub(crate) sums: u64,
    pub(crate) loss: u64,
    pub(crate) cursor: u64,
    pub(crate) rows: u32,
    pub(crate) classes: u32,
    pub(crate) dlogits_pitch: u32,
    pub(crate) advance: u32,
    pub(crate) scale: f32,
}

/// Of one phase; its kind says which.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union PhaseArguments {
    pub(crate) linear: LinearArguments,
    pub(crate) gather: GatherArguments,
    pub(crate) loss: LossArguments,
}

/// The struct `Phase` in `cuda/persistent.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawPhase {
    kind: u32,
    items: u32,
    first: u32,
    meets: u32,
    arguments: PhaseArguments,
}

/// The kernel's parameter.
#[derive(Clone, Copy)]
#[repr(C)]
struct PersistentArguments {
    phases: [RawPhase; MOST_PHASES],
    meeting: u64,
    count: u32,
    steps: u32,
}

// As `cuda/persistent.cuh` asserts of its own.
const _: () = assert!(size_of::<RawPhase>() == 120 && size_of::<PersistentArguments>() == 3856);

impl PersistentArguments {
    /// For `blocks` blocks: which of them takes the first item of a phase depends on their number.
    fn new(groups: &[Vec<Phase>], blocks: u32, meeting: u64, steps: u32) -> Self {
        let arguments = PhaseArguments { gather: GatherArguments::default() };
        let none = RawPhase { kind: 0, items: 0, first: 0, meets: 0, arguments };
        let mut out = Self { phases: [none; MOST_PHASES], meeting, count: 0, steps };
        for group in groups {
            let mut before = 0_u64;
            for (number, phase) in group.iter().enumerate() {
                out.phases[out.count as usize] = RawPhase {
                    kind: phase.kind as u32,
                    items: phase.items,
                    // CAST: below a u32.
                    first: (before % u64::from(blocks)) as u32,
                    meets: (number + 1 == group.len()).into(),
                    arguments: phase.arguments,
                };
                out.count += 1;
                before += u64::from(phase.items);
            }
        }
        out
    }
}

/// What is launched.
pub(crate) struct PersistentLaunch<'a> {
    pub(crate) precision: Precision,
    /// At most [`MOST_PHASES`] phases in all.
    pub(crate) groups: &'a [Vec<Phase>],
    pub(crate) steps: u32,
    /// Address of the word by which a grid meets.
    pub(crate) meeting: u64,
}

impl PersistentLaunch<'_> {
    /// Items of the largest group: more blocks would have nothing to do.
    fn most_items(&self) -> u64 {
        let items = |group: &Vec<Phase>| group.iter().map(|phase| u64::from(phase.items)).sum();
        self.groups.iter().map(items).max().unwrap_or(1).max(1)
    }

    fn shared_bytes(&self) -> u32 {
        self.groups.iter().flatten().map(|phase| phase.shared_bytes).max().unwrap_or(0)
    }

    /// Rounds that a cluster of so many blocks makes beyond one for each group. A round and a meeting of a whole grid take
    /// about the same time, so a cluster pays where this is less than the number of groups.
    fn rounds_beyond(&self, blocks: u32) -> u64 {
        let rounds = |group: &Vec<Phase>| {
            let items: u64 = group.iter().map(|phase| u64::from(phase.items)).sum();
            items.div_ceil(blocks.into()).saturating_sub(1)
        };
        self.groups.iter().map(rounds).sum()
    }
}

/// Blocks of a cluster, in the order in which they are tried: 16 is more than every GPU with clusters promises.
const CLUSTERS: [u32; 2] = [16, 8];

/// Name of the kernel of a precision, or of what there is none of.
pub(crate) fn name(precision: Precision) -> &'static str {
    NAMES.get(precision as usize).copied().unwrap_or("persistent_steps")
}

/// Why there are no steps in such a precision.
pub(crate) fn no_kernel(precision: Precision) -> KernelError {
    KernelError::NotPersistent { operation: name(precision), what: format!("has no kernel for {}", precision.name()) }
}

impl CudaKernels {
    /// Loads the kernel that does many steps in a precision, if it is not there yet.
    ///
    /// # Errors
    ///
    /// As for [`load`](Self::load); [`KernelError::DeviceTooOld`] below compute capability 8.0;
    /// [`KernelError::NotPersistent`] if there is none ([`Precision::is_persistent`]).
    pub fn prepare_persistent(&self, precision: Precision) -> Result<(), KernelError> {
        self.persistent(precision).map(|_| ())
    }

    fn persistent(&self, precision: Precision) -> Result<&PersistentKernel, KernelError> {
        let slot = self.persistent.get(precision as usize).ok_or_else(|| no_kernel(precision))?;
        if let Some(loaded) = slot.get() {
            return Ok(loaded);
        }
        let has_clusters = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? >= 9;
        let module = PTX[precision as usize][usize::from(has_clusters)].load(name(precision))?;
        let loaded = load_function(module, name(precision))
            .and_then(|function| PersistentKernel::new(module, function, self.shared_limit, has_clusters));
        match loaded {
            // Another thread may have been faster; its module is as good, and this one goes.
            Ok(loaded) => slot.set(loaded).unwrap_or_else(|spare| spare.unload()),
            Err(error) => {
                // SAFETY: loaded above, and nobody has it.
                let _ = unsafe { result::module::unload(module) };
                return Err(error);
            }
        }
        Ok(slot.get().expect("a slot that was set holds a value"))
    }

    /// Queues steps on `stream`; `None` lets the shape of the work decide how the blocks meet.
    ///
    /// # Safety
    ///
    /// What [`Operation::launch`](crate::Operation::launch) asks holds for all addresses of the phases, for every step; the
    /// meeting's word is at zero but for its highest bit, and used by no other launch that may run at the same time.
    pub(crate) unsafe fn launch_persistent(
        &self,
        launch: &PersistentLaunch<'_>,
        how: Option<Cooperation>,
        stream: CUstream,
    ) -> Result<(), KernelError> {
        let kernel = self.persistent(launch.precision)?;
        let refuse = |what: String| KernelError::NotPersistent { operation: name(launch.precision), what };
        let shared = launch.shared_bytes();
        if shared > kernel.shared_limit {
            let limit = kernel.shared_limit;
            return Err(refuse(format!("a block needs {shared} bytes of shared memory, and can have {limit}")));
        }
        if how != Some(Cooperation::Grid) {
            let worth = |blocks: u32| how.is_some() || launch.rounds_beyond(blocks) < launch.groups.len() as u64;
            if let Some(blocks) = kernel.cluster.filter(|blocks| worth(*blocks)) {
                let arguments = PersistentArguments::new(launch.groups, blocks, 0, launch.steps);
                let mut parameters: [*mut c_void; 1] = [argument(&arguments)];
                let mut cluster = cluster_of(blocks);
                let config = config(blocks, shared, stream, &mut cluster);
                // SAFETY: the function is loaded as long as `self` lives and takes this struct; the attribute lives to the
                // end of the call; the caller vouches for the rest.
                return unsafe {
                    sys::cuLaunchKernelEx(
                        &raw const config,
                        kernel.function,
                        parameters.as_mut_ptr(),
                        std::ptr::null_mut(),
                    )
                }
                .result()
                .map_err(|error| driver_error("cuLaunchKernelEx", error));
            }
        }
        if how == Some(Cooperation::Cluster) {
            return Err(refuse("this GPU has no room for a cluster of its blocks".to_owned()));
        }
        // CAST: no more than the multiprocessors.
        let blocks = launch.most_items().min(kernel.grid.into()) as u32;
        let arguments = PersistentArguments::new(launch.groups, blocks, launch.meeting, launch.steps);
        let mut parameters: [*mut c_void; 1] = [argument(&arguments)];
        // SAFETY: as above.
        unsafe {
            result::launch_cooperative_kernel(
                kernel.function,
                (blocks, 1, 1),
                (THREADS, 1, 1),
                shared,
                stream,
                &mut parameters,
            )
        }
        .map_err(|error| driver_error("cuLaunchCooperativeKernel", error))
    }
}

fn cluster_of(blocks: u32) -> CUlaunchAttribute {
    // SAFETY: a union of plain numbers, for which zeros are valid.
    let mut value: CUlaunchAttributeValue = unsafe { std::mem::zeroed() };
    value.clusterDim.x = blocks;
    value.clusterDim.y = 1;
    value.clusterDim.z = 1;
    CUlaunchAttribute { id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, pad: [0; 4], value }
}

fn config(blocks: u32, shared: u32, stream: CUstream, cluster: &mut CUlaunchAttribute) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: THREADS,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shared,
        hStream: stream,
        attrs: cluster,
        numAttrs: 1,
    }
}

impl PersistentKernel {
    /// Lets the kernel have as much shared memory as there is, and asks how many of its blocks fit the device at once.
    fn new(module: CUmodule, function: CUfunction, shared_limit: u32, has_clusters: bool) -> Result<Self, KernelError> {
        let set = |attribute, value| {
            // SAFETY: the function belongs to a module that was just loaded.
            unsafe { result::function::set_function_attribute(function, attribute, value) }
                .map_err(|error| driver_error("cuFuncSetAttribute", error))
        };
        // The kernel's own shared memory counts as well.
        let mut own = 0;
        let static_bytes = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: as above; the driver writes one number.
        unsafe { sys::cuFuncGetAttribute(&raw mut own, static_bytes, function) }
            .result()
            .map_err(|error| driver_error("cuFuncGetAttribute", error))?;
        // CAST: both below 228 KiB.
        let shared_limit = shared_limit.saturating_sub(own as u32);
        // CAST: as above.
        set(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_limit as i32)?;
        // CAST: the driver answers with a count.
        let grid = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let mut cluster = None;
        if has_clusters {
            set(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
            cluster = largest_cluster(function, shared_limit);
        }
        Ok(Self { module, function, shared_limit, grid, cluster })
    }

    pub(super) fn unload(&self) {
        // SAFETY: loaded by `persistent`; whoever calls this drops `self`. An error has nobody to go to.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// Blocks of the largest cluster that fits the current context's device.
fn largest_cluster(function: CUfunction, shared: u32) -> Option<u32> {
    for blocks in CLUSTERS {
        let mut cluster = cluster_of(blocks);
        let config = config(blocks, shared, std::ptr::null_mut(), &mut cluster);
        let mut fit = 0;
        // SAFETY: the function is loaded; the attribute lives to the end of the call; the driver writes one number.
        let answer = unsafe { sys::cuOccupancyMaxActiveClusters(&raw mut fit, function, &raw const config) }.result();
        // A size that the driver will not hear of is one that does not fit; other trouble shows in the next call.
        if answer.is_ok() && fit > 0 {
            return Some(blocks);
        }
    }
    None
}
