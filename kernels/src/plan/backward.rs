//! Whether both products of the way back through a layer are made by one kernel, and its grid; kernels in
//! `cuda/streamed_backward.cuh` and `cuda/streamed_backward_f32.cuh`.

use super::streams;
use crate::storage::{Element, Precision};

/// How both products are launched at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BackwardPlan {
    /// Blocks of 64 inputs each.
    strips: u64,
    /// Blocks that share out the outputs of a strip, and the sums of its gradient.
    pub(crate) splits: u32,
    /// Trips of a block's main loop.
    pub(crate) iterations: u64,
    /// Bytes of a strip's gradient for one split of it.
    split_bytes: u64,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Rows and columns of the boxes that are copied: of dy and x, and of the weights.
    pub(crate) boxes: [[u32; 2]; 2],
}

/// Inputs of a block.
const ACROSS: u64 = 64;
/// Blocks that give every multiprocessor of an H200 something to do.
const BUSY_BLOCKS: u64 = 128;
/// Inputs of the smallest layer for which one kernel pays.
const FEWEST_INPUTS: u32 = 512;
/// Weights of more bytes are not all in the L2 cache of an H200 when they are read for the second time.
const CACHED_BYTES: u64 = 50 << 20;

impl BackwardPlan {
    /// Dynamic shared memory of a block, of any precision: stages, the strip of inputs, barriers, and room to begin on 1,024
    /// bytes.
    pub(crate) const SHARED_BYTES: u32 = 196_608 + 64 * 128 + 17 * 8 + 1024;

    /// Whether one kernel is faster than two. Below 512 inputs there are too few blocks, and two kernels can run side by side
    /// on two streams.
    ///
    /// Measured on an H200 (f16): with 32 examples it takes 0.73 to 0.89 of what both products take one after the other, at
    /// 512 to 8,192 inputs and outputs and at 8,192 inputs and 10 outputs; with 64 examples 0.69 where the weights do not fit
    /// into the cache, and 0.97 to 1.11 where they do. Where it pays, the splits of this rule were the fastest of those that
    /// were tried (1 to 16), or within 2 % of them.
    ///
    /// On an H100 with 32 examples it takes 0.50 to 0.80 of both in f32x3, and 0.48 to 0.81 in tf32, at the same shapes. The
    /// splits of the rule were the fastest of those that were tried (1 to 32), or within 2 % of them.
    pub(crate) fn pays(precision: Precision, rows: u32, inputs: u32, outputs: u32) -> bool {
        let weights = u64::from(inputs) * u64::from(outputs) * precision.element().bytes();
        inputs >= FEWEST_INPUTS && (rows <= 32 || weights > CACHED_BYTES)
    }

    /// For tensor cores, few examples (64 in half types, else 32), and rows of weights that end on 16 bytes.
    pub(crate) fn of(precision: Precision, rows: u32, inputs: u32, outputs: u32) -> Option<Self> {
        let halves = precision.element() != Element::F32;
        let possible = match precision {
            Precision::F32 => false,
            Precision::Tf32 | Precision::F32x3 => rows <= 32 && inputs.is_multiple_of(4),
            Precision::Bf16 | Precision::F16 => streams([outputs, inputs, rows]),
        };
        if !possible {
            return None;
        }
        // Outputs of one trip of a block's loop.
        let down = if halves { 256 } else { 64 };
        let strips = u64::from(inputs).div_ceil(ACROSS);
        let trips = u64::from(outputs).div_ceil(down);
        let splits = if halves {
            BUSY_BLOCKS.div_ceil(strips).next_power_of_two().max(2)
        } else {
            // All blocks at once: each has a multiprocessor to itself.
            (BUSY_BLOCKS / strips).max(1)
        };
        let iterations = trips.div_ceil(splits.min(trips));
        let splits = if halves { splits.min(trips) } else { trips.div_ceil(iterations) };
        let examples = if rows <= 32 { 32 } else { 64 };
        Some(Self {
            strips,
            // CAST: at most 128.
            splits: splits as u32,
            iterations,
            split_bytes: (examples * ACROSS + examples) * 4,
            // Those that multiply, and a warp that asks for copies; in f32 a warpgroup, which also steps the bias.
            threads: if halves { 4 * 128 + 32 } else { 2 * 128 + 128 },
            // CAST: 32 or 64.
            boxes: if halves { [[examples as u32, 64], [64, 64]] } else { [[32, 32], [16, 32]] },
        })
    }

    /// Thread blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.strips * u64::from(self.splits)
    }

    /// Memory for sums that blocks share; a multiple of 16.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        if self.splits > 1 { self.blocks() * self.split_bytes } else { 0 }
    }

    /// Counters of blocks that are done, u32 each.
    pub(crate) fn tickets(&self) -> u64 {
        if self.splits > 1 { self.strips } else { 0 }
    }
}
