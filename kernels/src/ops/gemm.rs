//! General matrix multiplication; kernels in `cuda/gemm.cu`.

use cudarc::driver::sys::CUstream;

use super::{F32, area, check_sizes, total};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};

/// The operand that is stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmLayout {
    /// A is `[m,k]`, B is `[k,n]`: the gradient of a layer's input, `dX = dY·W`.
    NN,
    /// A is `[m,k]`, B is `[n,k]`: a layer's forward GEMM, `Y = X·Wᵀ`.
    NT,
    /// A is `[k,m]`, B is `[k,n]`: the gradient of a layer's weights, `dW = dYᵀ·X`.
    TN,
}

/// `C[m,n] = op(A)·op(B)`, in `f32` (not tf32).
///
/// Kernels: `gemm_{nn,nt,tn}_tiled` if 64×64 tiles would fill a GPU, otherwise `gemm_{nn,nt,tn}_sliced`. The choice
/// depends only on the shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// The operand that is stored transposed.
    pub layout: GemmLayout,
    /// Rows of C; `m`, `n` and `k` are below 2³¹.
    pub m: u32,
    /// Columns of C.
    pub n: u32,
    /// Terms of each sum.
    pub k: u32,
    /// Address of A, `f32`: `[m,k]`, or `[k,m]` for TN.
    pub a: u64,
    /// Address of B, `f32`: `[k,n]`, or `[n,k]` for NT.
    pub b: u64,
    /// Address of C, `f32[m,n]`, written.
    pub c: u64,
}

/// Threads per block of both kernels.
const THREADS: u32 = 256;
/// Side of a block's tile in the `tiled` kernel, and the steps of k in one iteration.
const TILE: u64 = 64;
const TILED_DEPTH: u64 = 16;
/// A block's tile in the `sliced` kernel; its eight warps together process 128 steps of k in one iteration.
const PATCH_ROWS: u64 = 16;
const PATCH_COLS: u64 = 32;
const SLICED_DEPTH: u64 = 128;
/// With fewer 64×64 tiles than this, most of a large GPU (an H200 has 132 multiprocessors) would be idle.
const TILES_TO_FILL_A_GPU: u64 = 96;
/// The tile arithmetic of the kernels is in 32 bits.
const LARGEST: u32 = i32::MAX as u32;

impl Gemm {
    fn tiles(&self) -> u64 {
        u64::from(self.m).div_ceil(TILE) * u64::from(self.n).div_ceil(TILE)
    }

    /// Returns true if 64×64 tiles would fill a GPU.
    fn is_tiled(&self) -> bool {
        // A side of at most half a tile would waste half of each block.
        u64::from(self.m.min(self.n)) > TILE / 2 && self.tiles() >= TILES_TO_FILL_A_GPU
    }

    fn kernel(&self) -> Kernel {
        match (self.layout, self.is_tiled()) {
            (GemmLayout::NN, true) => Kernel::GemmNnTiled,
            (GemmLayout::NT, true) => Kernel::GemmNtTiled,
            (GemmLayout::TN, true) => Kernel::GemmTnTiled,
            (GemmLayout::NN, false) => Kernel::GemmNnSliced,
            (GemmLayout::NT, false) => Kernel::GemmNtSliced,
            (GemmLayout::TN, false) => Kernel::GemmTnSliced,
        }
    }
}

impl Definition for Gemm {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        let operation = self.name();
        check_sizes(operation, [("m", self.m.into()), ("n", self.n.into()), ("k", self.k.into())])?;
        let largest = self.m.max(self.n).max(self.k);
        if largest > LARGEST {
            return Err(KernelError::Shape { operation, what: format!("size {largest} is above {LARGEST}") });
        }
        Ok(())
    }

    fn work(&self) -> Work {
        let k = u64::from(self.k);
        let patches = u64::from(self.m).div_ceil(PATCH_ROWS) * u64::from(self.n).div_ceil(PATCH_COLS);
        let (blocks, depth) = if self.is_tiled() { (self.tiles(), TILED_DEPTH) } else { (patches, SLICED_DEPTH) };
        Work {
            blocks,
            iterations: k.div_ceil(depth),
            bytes: total([(area(self.m, self.k), F32), (area(self.k, self.n), F32), (area(self.m, self.n), F32)]),
            flops: total([(area(self.m, self.n), 2 * k)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![
            (self.a, total([(area(self.m, self.k), F32)])),
            (self.b, total([(area(self.k, self.n), F32)])),
            (self.c, total([(area(self.m, self.n), F32)])),
        ]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.a, self.b, self.c, self.m, self.n, self.k];
        // SAFETY: three addresses and three u32, as `gemm.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let a = buffers.read::<f32>(self.a, area(self.m, self.k))?;
        let b = buffers.read::<f32>(self.b, area(self.k, self.n))?;
        let c = buffers.write::<f32>(self.c, area(self.m, self.n))?;
        let [m, n, k] = [self.m, self.n, self.k].map(|size| size as usize);
        let (a_pitch, b_pitch) = match self.layout {
            GemmLayout::NN => (k, n),
            GemmLayout::NT => (k, k),
            GemmLayout::TN => (m, n),
        };
        product(self.layout, [m, n, k], (a, a_pitch), (b, b_pitch), c);
        Ok(())
    }
}

/// `c = op(a)·op(b)`, dense `[m, n]`, in f32, of matrices with their pitches. Threads divide rows and columns of C but
/// not the sum over k, so their number does not change the result.
pub(super) fn product(
    layout: GemmLayout,
    [m, n, k]: [usize; 3],
    (a, a_pitch): (&[f32], usize),
    (b, b_pitch): (&[f32], usize),
    c: &mut [f32],
) {
    let (a_strides, b_strides) = match layout {
        GemmLayout::NN => ((a_pitch, 1), (b_pitch, 1)),
        GemmLayout::NT => ((a_pitch, 1), (1, b_pitch)),
        GemmLayout::TN => ((1, a_pitch), (b_pitch, 1)),
    };
    let last = |rows: usize, cols: usize, by: (usize, usize)| (rows - 1) * by.0 + (cols - 1) * by.1;
    let inside = last(m, k, a_strides) < a.len() && last(k, n, b_strides) < b.len() && m * n <= c.len();
    assert!(inside, "the slices are large enough for the shapes");
    // CAST: all below the lengths of slices, so below `isize::MAX`.
    let [a_strides, b_strides] = [a_strides, b_strides].map(|(row, col)| (row as isize, col as isize));
    let (a, b, to) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
    // SAFETY: the strides stay within the slices, as asserted, and c overlaps neither a nor b. With beta = 0 the old contents
    // of c are not read.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a,
            a_strides.0,
            a_strides.1,
            b,
            b_strides.0,
            b_strides.1,
            0.0,
            to,
            n as isize,
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gemm(layout: GemmLayout, m: u32, n: u32, k: u32) -> Gemm {
        Gemm { layout, m, n, k, a: 0, b: 0, c: 0 }
    }

    #[test]
    fn thin_shapes_are_sliced_and_large_shapes_tiled() {
        let forward = gemm(GemmLayout::NT, 64, 784, 784);
        assert_eq!(forward.name(), "gemm_nt_sliced");
        assert_eq!((forward.work().blocks, forward.work().iterations), (100, 7));
        let weights = gemm(GemmLayout::TN, 784, 784, 64);
        assert_eq!(weights.name(), "gemm_tn_tiled");
        assert_eq!((weights.work().blocks, weights.work().iterations), (169, 4));
        assert_eq!(gemm(GemmLayout::NT, 10_000, 10, 784).name(), "gemm_nt_sliced");
    }

    #[test]
    fn work_counts_each_matrix_once() {
        let work = gemm(GemmLayout::NN, 2, 3, 5).work();
        assert_eq!((work.bytes, work.flops), (4 * (10 + 15 + 6), 60));
        let huge = gemm(GemmLayout::NN, u32::MAX, u32::MAX, u32::MAX).work();
        assert_eq!((huge.bytes, huge.flops), (u64::MAX, u64::MAX));
    }
}
