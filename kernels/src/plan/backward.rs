//! Whether both products of the way back through a layer are made by one kernel, and its grid; kernel in
//! `cuda/streamed_backward.cuh`.

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
}

/// Inputs of a block.
const ACROSS: u64 = 64;
/// Outputs of one trip of its loop.
const DOWN: u64 = 256;
/// Blocks that give every multiprocessor of an H200 something to do.
const BUSY_BLOCKS: u64 = 128;
/// Inputs of the smallest layer for which one kernel pays.
const FEWEST_INPUTS: u32 = 512;
/// Weights of more bytes are not all in the L2 cache of an H200 when they are read for the second time.
const CACHED_BYTES: u64 = 50 << 20;

impl BackwardPlan {
    /// Threads of a block: four warpgroups, and a warp that asks for copies.
    pub(crate) const THREADS: u32 = 4 * 128 + 32;
    /// Dynamic shared memory of a block, for either number of examples: stages, the strip of inputs, barriers, and room to
    /// begin on 1,024 bytes.
    pub(crate) const SHARED_BYTES: u32 = 196_608 + 64 * 128 + 9 * 8 + 1024;

    /// Whether one kernel is faster than two. Below 512 inputs there are too few blocks, and two kernels can run side by side
    /// on two streams.
    ///
    /// Measured on an H200 (f16): with 32 examples it takes 0.73 to 0.89 of what both products take one after the other, at
    /// 512 to 8,192 inputs and outputs and at 8,192 inputs and 10 outputs; with 64 examples 0.69 where the weights do not fit
    /// into the cache, and 0.97 to 1.11 where they do. Where it pays, the splits of this rule were the fastest of those that
    /// were tried (1 to 16), or within 2 % of them.
    pub(crate) fn pays(precision: Precision, rows: u32, inputs: u32, outputs: u32) -> bool {
        let weights = u64::from(inputs) * u64::from(outputs) * precision.element().bytes();
        inputs >= FEWEST_INPUTS && (rows <= 32 || weights > CACHED_BYTES)
    }

    /// For half types, few examples, and rows of weights that end on 16 bytes.
    pub(crate) fn of(precision: Precision, rows: u32, inputs: u32, outputs: u32) -> Option<Self> {
        if precision.element() == Element::F32 || !streams([outputs, inputs, rows]) {
            return None;
        }
        let strips = u64::from(inputs).div_ceil(ACROSS);
        let trips = u64::from(outputs).div_ceil(DOWN);
        let splits = BUSY_BLOCKS.div_ceil(strips).next_power_of_two().max(2).min(trips);
        let examples = if rows <= 32 { 32 } else { 64 };
        Some(Self {
            strips,
            // CAST: at most 128.
            splits: splits as u32,
            iterations: trips.div_ceil(splits),
            split_bytes: (examples * ACROSS + examples) * 4,
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
