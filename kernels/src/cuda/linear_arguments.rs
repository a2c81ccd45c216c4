//! Arguments of the linear layers' kernels.

/// Arguments of one kernel; mirrors the struct of the same name in `cuda/linear_epilogues.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LinearArguments {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) out: u64,
    pub(crate) mask: u64,
    pub(crate) master: u64,
    pub(crate) bias: u64,
    pub(crate) workspace: u64,
    pub(crate) tickets: u64,
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
    pub(crate) a_pitch: u32,
    pub(crate) b_pitch: u32,
    pub(crate) out_pitch: u32,
    pub(crate) splits: u32,
    pub(crate) flags: u32,
    pub(crate) scale: f32,
}

impl LinearArguments {
    /// Negative sums become zero.
    pub(crate) const RELU: u32 = 1;
    /// The output is f32, whatever the precision.
    pub(crate) const OUT_F32: u32 = 2;
    /// Updates the weights instead of writing their gradient.
    pub(crate) const STEP: u32 = 4;

    /// Only the memory for split-k is set; the plan sets the number of splits.
    pub(crate) fn new(workspace: u64, tickets: u64) -> Self {
        Self { workspace, tickets, splits: 1, scale: 1.0, ..Self::default() }
    }
}
