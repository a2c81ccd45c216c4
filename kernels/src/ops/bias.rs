//! A layer's bias; kernels in `cuda/bias.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, area, check_sizes, elementwise_blocks, grid, total};
use crate::cuda::{CudaKernels, Kernel, argument};
use crate::error::KernelError;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{Operation, Work};

/// `y[r,c] = x[r,c] + bias[c]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddBias {
    /// Rows of `x` and `y`.
    pub rows: u32,
    /// Columns of `x` and `y`, elements of `bias`.
    pub cols: u32,
    /// Address of the input, `f32[rows,cols]`.
    pub x: u64,
    /// Address of the bias, `f32[cols]`.
    pub bias: u64,
    /// Address of the output, `f32[rows,cols]`, written.
    pub y: u64,
}

impl AddBias {
    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("cols", self.cols.into())])
    }
}

impl Operation for AddBias {
    fn name(&self) -> &'static str {
        Kernel::AddBias.name()
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.cols);
        Work {
            kernel: self.name(),
            blocks: elementwise_blocks(elements),
            iterations: 1,
            bytes: total([(elements, 2 * F32), (self.cols.into(), F32)]),
            flops: elements,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = area(self.rows, self.cols);
        vec![
            (self.x, total([(elements, F32)])),
            (self.bias, total([(self.cols.into(), F32)])),
            (self.y, total([(elements, F32)])),
        ]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments =
            [argument(&self.x), argument(&self.bias), argument(&self.y), argument(&self.rows), argument(&self.cols)];
        // SAFETY: three addresses and two u32, as `bias.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(Kernel::AddBias, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (x, bias, y) = unsafe {
            (
                buffers.read::<f32>(self.x, area(self.rows, self.cols))?,
                buffers.read::<f32>(self.bias, self.cols.into())?,
                buffers.write::<f32>(self.y, area(self.rows, self.cols))?,
            )
        };
        for (y, x) in y.chunks_exact_mut(bias.len()).zip(x.chunks_exact(bias.len())) {
            for ((y, x), bias) in y.iter_mut().zip(x).zip(bias) {
                *y = x + bias;
            }
        }
        Ok(())
    }
}

/// `db[c] = Σ_r dy[r,c]`, the gradient of [`AddBias`]' bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasGradient {
    /// Rows of `dy`.
    pub rows: u32,
    /// Columns of `dy`, elements of `db`.
    pub cols: u32,
    /// Address of the gradient of the layer's output, `f32[rows,cols]`.
    pub dy: u64,
    /// Address of the gradient of the bias, `f32[cols]`, written.
    pub db: u64,
}

/// A block takes this many columns, and this many warps share out the rows.
const BLOCK_COLS: u64 = 32;
const PARTITIONS: u64 = 8;
const BIAS_GRADIENT_THREADS: u32 = (BLOCK_COLS * PARTITIONS) as u32;

impl BiasGradient {
    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("cols", self.cols.into())])
    }
}

impl Operation for BiasGradient {
    fn name(&self) -> &'static str {
        Kernel::BiasGradient.name()
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.cols);
        Work {
            kernel: self.name(),
            blocks: u64::from(self.cols).div_ceil(BLOCK_COLS),
            iterations: u64::from(self.rows).div_ceil(PARTITIONS),
            bytes: total([(elements, F32), (self.cols.into(), F32)]),
            flops: elements,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = area(self.rows, self.cols);
        vec![(self.dy, total([(elements, F32)])), (self.db, total([(self.cols.into(), F32)]))]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments = [argument(&self.dy), argument(&self.db), argument(&self.rows), argument(&self.cols)];
        // SAFETY: two addresses and two u32, as `bias.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(Kernel::BiasGradient, blocks, BIAS_GRADIENT_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (dy, db) = unsafe {
            (
                buffers.read::<f32>(self.dy, area(self.rows, self.cols))?,
                buffers.write::<f32>(self.db, self.cols.into())?,
            )
        };
        // Row after row, so that the inner loop runs along memory and vectorises.
        db.fill(0.0);
        for row in dy.chunks_exact(db.len()) {
            for (sum, value) in db.iter_mut().zip(row) {
                *sum += value;
            }
        }
        Ok(())
    }
}
