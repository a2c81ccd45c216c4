//! Picking a batch out of a data set that lies on the device; kernels in `cuda/gather.cu`.

use bytemuck::Pod;
use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, U32, area, check_sizes, elementwise_blocks, grid, total};
use crate::cuda::{CudaKernels, Kernel, argument};
use crate::error::KernelError;
use crate::fused::{scale_bytes, scale_floats};
use crate::host::{HostBuffers, HostMemory, check_range};
use crate::operation::{Operation, Work};

/// `out[r,c] = source[indices[r],c] · scale + shift`, from bytes, with a fused multiply-add.
///
/// An index outside the source is an error on the host; on a GPU it reads nothing and gives a row of NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherRowsU8 {
    /// Rows of the output: the batch.
    pub rows: u32,
    /// Columns of source and output.
    pub cols: u32,
    /// Address of the data set, `u8[source_rows,cols]`.
    pub source: u64,
    /// Rows of the data set.
    pub source_rows: u32,
    /// Address of the row numbers, `u32[rows]`, each below `source_rows`.
    pub indices: u64,
    /// Factor.
    pub scale: f32,
    /// Added after the factor.
    pub shift: f32,
    /// Address of the output, `f32[rows,cols]`, written.
    pub out: u64,
}

/// `out[r,c] = source[indices[r],c] · scale + shift`, from `f32`, with a fused multiply-add.
///
/// An index outside the source is an error on the host; on a GPU it reads nothing and gives a row of NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherRowsF32 {
    /// Rows of the output: the batch.
    pub rows: u32,
    /// Columns of source and output.
    pub cols: u32,
    /// Address of the data set, `f32[source_rows,cols]`.
    pub source: u64,
    /// Rows of the data set.
    pub source_rows: u32,
    /// Address of the row numbers, `u32[rows]`, each below `source_rows`.
    pub indices: u64,
    /// Factor.
    pub scale: f32,
    /// Added after the factor.
    pub shift: f32,
    /// Address of the output, `f32[rows,cols]`, written.
    pub out: u64,
}

/// Both are the same but for the source's element.
macro_rules! gather_rows {
    ($operation:ident, $element:ty, $scale_row:ident) => {
        impl $operation {
            fn check(&self) -> Result<(), KernelError> {
                check_sizes(
                    self.name(),
                    [("rows", self.rows.into()), ("cols", self.cols.into()), ("source_rows", self.source_rows.into())],
                )
            }
        }

        impl Operation for $operation {
            fn name(&self) -> &'static str {
                Kernel::$operation.name()
            }

            fn work(&self) -> Work {
                let elements = area(self.rows, self.cols);
                Work {
                    kernel: self.name(),
                    blocks: elementwise_blocks(elements),
                    iterations: 1,
                    bytes: total([(elements, size_of::<$element>() as u64 + F32), (self.rows.into(), U32)]),
                    flops: total([(elements, 2)]),
                }
            }

            fn buffers(&self) -> Vec<(u64, u64)> {
                let elements = area(self.rows, self.cols);
                vec![(self.indices, total([(self.rows.into(), U32)])), (self.out, total([(elements, F32)]))]
            }

            unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
                self.check()?;
                let blocks = grid(self.name(), self.work().blocks)?;
                let arguments = [
                    argument(&self.source),
                    argument(&self.indices),
                    argument(&self.out),
                    argument(&self.rows),
                    argument(&self.cols),
                    argument(&self.source_rows),
                    argument(&self.scale),
                    argument(&self.shift),
                ];
                // SAFETY: three addresses, three u32 and two f32, as `gather.cu` declares; the caller vouches for the
                // addresses.
                unsafe { cuda.launch(Kernel::$operation, blocks, ELEMENTWISE_THREADS, stream, arguments) }
            }

            unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
                self.check()?;
                let mut buffers = HostBuffers::new(memory, self.name());
                // SAFETY: the caller vouches for the memory behind these addresses.
                let (source, indices, out) = unsafe {
                    (
                        buffers.read::<$element>(self.source, area(self.source_rows, self.cols))?,
                        buffers.read::<u32>(self.indices, self.rows.into())?,
                        buffers.write::<f32>(self.out, area(self.rows, self.cols))?,
                    )
                };
                check_range(self.name(), "index", indices, self.source_rows)?;
                let cols = self.cols as usize;
                for (out, &index) in out.chunks_exact_mut(cols).zip(indices) {
                    $scale_row(out, row(source, cols, index), self.scale, self.shift);
                }
                Ok(())
            }
        }
    };
}

gather_rows!(GatherRowsU8, u8, scale_bytes);
gather_rows!(GatherRowsF32, f32, scale_floats);

fn row<T: Pod>(source: &[T], cols: usize, index: u32) -> &[T] {
    let start = index as usize * cols;
    &source[start..start + cols]
}

/// `out[r] = source[indices[r]]`, bytes widened to `u32`.
///
/// An index outside the source is an error on the host; on a GPU it gives the label `u32::MAX`, which is no class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherLabels {
    /// Labels to gather: the batch.
    pub rows: u32,
    /// Address of the data set's labels, `u8[source_rows]`.
    pub source: u64,
    /// Labels in the data set.
    pub source_rows: u32,
    /// Address of the row numbers, `u32[rows]`, each below `source_rows`.
    pub indices: u64,
    /// Address of the output, `u32[rows]`, written.
    pub out: u64,
}

impl GatherLabels {
    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("source_rows", self.source_rows.into())])
    }
}

impl Operation for GatherLabels {
    fn name(&self) -> &'static str {
        Kernel::GatherLabels.name()
    }

    fn work(&self) -> Work {
        let rows = u64::from(self.rows);
        Work {
            kernel: self.name(),
            blocks: elementwise_blocks(rows),
            iterations: 1,
            bytes: total([(rows, 1 + 2 * U32)]),
            flops: 0,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.indices, total([(self.rows.into(), U32)])), (self.out, total([(self.rows.into(), U32)]))]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments = [
            argument(&self.source),
            argument(&self.indices),
            argument(&self.out),
            argument(&self.rows),
            argument(&self.source_rows),
        ];
        // SAFETY: three addresses and two u32, as `gather.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(Kernel::GatherLabels, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (source, indices, out) = unsafe {
            (
                buffers.read::<u8>(self.source, self.source_rows.into())?,
                buffers.read::<u32>(self.indices, self.rows.into())?,
                buffers.write::<u32>(self.out, self.rows.into())?,
            )
        };
        check_range(self.name(), "index", indices, self.source_rows)?;
        for (out, &index) in out.iter_mut().zip(indices) {
            *out = source[index as usize].into();
        }
        Ok(())
    }
}
