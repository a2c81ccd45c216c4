//! Gathering a batch from a data set in device memory; kernels in `cuda/gather.cu`.
//!
//! With a cursor, `indices` is the order of the whole data set. A launch reads the `rows` indices from number `batch ·
//! cursor`, where `cursor` is the number of the step.

use super::{
    ELEMENTWISE_THREADS, F32, U32, area, at_step, check_room, check_sizes, elementwise_blocks, groups, or_null, span,
    step, total, typed,
};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::{HostBuffers, check_range};
use crate::multiply_add::{scale_bytes, scale_floats};
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};
use bytemuck::Pod;
use cudarc::driver::sys::CUstream;

/// Type of a data set's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceElement {
    /// Bytes, for images.
    U8,
    /// `f32`.
    F32,
}

/// `out[r,c] = source[indices[r],c] · scale + shift`, with a fused multiply-add, rounded to the output's type.
///
/// An index outside the source is an error on the host; a GPU reads nothing and writes a row of NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatherRows {
    /// Type of the data set.
    pub source_element: SourceElement,
    /// Type of the output.
    pub element: Element,
    /// Rows of the output: the batch.
    pub rows: u32,
    /// Columns of source and output.
    pub cols: u32,
    /// Elements from one row of the output to the next.
    pub pitch: u32,
    /// Rows of each step except the last, which may have fewer; unused without a cursor.
    pub batch: u32,
    /// Address of the data set, `[source_rows,cols]`.
    pub source: u64,
    /// Rows of the data set.
    pub source_rows: u32,
    /// Address of the row numbers, `u32[rows]`, each below `source_rows`; with a cursor, the row numbers of step 0.
    pub indices: u64,
    /// Address of the number of the step, `u32[1]`, if it selects the batch.
    pub cursor: Option<u64>,
    /// Factor.
    pub scale: f32,
    /// Added after the factor.
    pub shift: f32,
    /// Address of the output, `[rows,cols]`, written.
    pub out: u64,
}

/// Number of 16-byte groups per thread in a large launch, as in `gather.cu`. A thread issues the loads of all its
/// groups before it uses the first, so more loads are in flight.
const MAX_GROUPS: u64 = 4;
/// Minimum number of blocks (at one group a thread) for several groups a thread: about a thousand blocks remain, as
/// many as a large GPU runs simultaneously.
const MANY_BLOCKS: u64 = 4096;

/// Number of groups that each thread processes.
fn groups_each(groups: u64) -> u64 {
    if elementwise_blocks(groups) >= MANY_BLOCKS { MAX_GROUPS } else { 1 }
}

impl GatherRows {
    fn kernel(&self) -> Kernel {
        let kernels = match self.source_element {
            SourceElement::U8 => [Kernel::GatherRowsU8, Kernel::GatherRowsU8Bf16, Kernel::GatherRowsU8F16],
            SourceElement::F32 => [Kernel::GatherRowsF32, Kernel::GatherRowsF32Bf16, Kernel::GatherRowsF32F16],
        };
        typed(self.element, kernels)
    }

    fn groups(&self) -> u64 {
        groups(self.element, self.rows.into(), self.cols.into())
    }

    fn compute_typed<S: Pod, T: Stored>(
        &self,
        buffers: &mut HostBuffers<'_>,
        scale_row: fn(&mut [f32], &[S], f32, f32),
    ) -> Result<(), KernelError> {
        let source = buffers.read::<S>(self.source, area(self.source_rows, self.cols))?;
        let indices = batch_indices(buffers, self.indices, self.rows, self.batch, self.cursor)?;
        let out = buffers.write::<T>(self.out, span(self.rows, self.cols, self.pitch))?;
        check_range(self.name(), "index", indices, self.source_rows)?;
        let cols = self.cols as usize;
        let mut scaled = vec![0.0; cols];
        for (out, &index) in out.chunks_mut(self.pitch as usize).zip(indices) {
            scale_row(&mut scaled, &source[index as usize * cols..][..cols], self.scale, self.shift);
            T::store_all(&scaled, &mut out[..cols]);
        }
        Ok(())
    }
}

impl Definition for GatherRows {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        let sizes = [("rows", self.rows.into()), ("cols", self.cols.into()), ("source_rows", self.source_rows.into())];
        check_sizes(self.name(), sizes)?;
        check_room(self.name(), [("pitch", self.pitch, self.cols)])?;
        check_batch(self.name(), self.rows, self.batch, self.cursor)
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.cols);
        let source_bytes = match self.source_element {
            SourceElement::U8 => 1,
            SourceElement::F32 => F32,
        };
        Work {
            blocks: elementwise_blocks(self.groups().div_ceil(groups_each(self.groups()))),
            iterations: 1,
            bytes: total([(elements, source_bytes + self.element.bytes()), (self.rows.into(), U32)]),
            flops: total([(elements, 2)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = span(self.rows, self.cols, self.pitch);
        vec![
            indices_or_cursor(self.indices, self.rows, self.cursor),
            (self.out, total([(elements, self.element.bytes())])),
        ]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // CAST: 1 or 4.
        let each = groups_each(self.groups()) as u32;
        let arguments = arguments![
            self.source,
            self.indices,
            or_null(self.cursor),
            self.out,
            self.rows,
            self.cols,
            self.pitch,
            self.batch,
            self.source_rows,
            self.scale.to_bits(),
            self.shift.to_bits(),
            each
        ];
        // SAFETY: four addresses, five u32, two f32 and a u32, as `gather.cu` declares; the caller guarantees the
        // addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => match self.source_element {
            SourceElement::U8 => self.compute_typed::<u8, T>(buffers, scale_bytes),
            SourceElement::F32 => self.compute_typed::<f32, T>(buffers, scale_floats),
        })
    }
}

fn check_batch(operation: &'static str, rows: u32, batch: u32, cursor: Option<u64>) -> Result<(), KernelError> {
    if cursor.is_some() { check_room(operation, [("batch", batch, rows)]) } else { Ok(()) }
}

/// The indices of the step that the cursor selects, if there is one.
fn batch_indices<'m>(
    buffers: &mut HostBuffers<'m>,
    indices: u64,
    rows: u32,
    batch: u32,
    cursor: Option<u64>,
) -> Result<&'m [u32], KernelError> {
    let step = step(buffers, cursor)?;
    let first = at_step(buffers.operation(), indices, area(batch, 1) * U32, step)?;
    buffers.read::<u32>(first, rows.into())
}

/// Address and size of the read whose address is known before the launch: with a cursor the cursor, because the address
/// of the indices depends on it.
fn indices_or_cursor(indices: u64, rows: u32, cursor: Option<u64>) -> (u64, u64) {
    cursor.map_or((indices, total([(rows.into(), U32)])), |cursor| (cursor, U32))
}

/// `out[r] = source[indices[r]]`, bytes widened to `u32`.
///
/// An index outside the source is an error on the host; on a GPU it gives the label `u32::MAX`, which is not a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherLabels {
    /// Labels to gather: the batch.
    pub rows: u32,
    /// Labels of each step except the last, which may have fewer; unused without a cursor.
    pub batch: u32,
    /// Address of the data set's labels, `u8[source_rows]`.
    pub source: u64,
    /// Labels in the data set.
    pub source_rows: u32,
    /// Address of the row numbers, `u32[rows]`, each below `source_rows`; with a cursor, the row numbers of step 0.
    pub indices: u64,
    /// Address of the number of the step, `u32[1]`, if it selects the batch.
    pub cursor: Option<u64>,
    /// Address of the output, `u32[rows]`, written.
    pub out: u64,
}

impl Definition for GatherLabels {
    fn name(&self) -> &'static str {
        Kernel::GatherLabels.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("source_rows", self.source_rows.into())])?;
        check_batch(self.name(), self.rows, self.batch, self.cursor)
    }

    fn work(&self) -> Work {
        let rows = u64::from(self.rows);
        Work { blocks: elementwise_blocks(rows), iterations: 1, bytes: total([(rows, 1 + 2 * U32)]), flops: 0 }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![indices_or_cursor(self.indices, self.rows, self.cursor), (self.out, total([(self.rows.into(), U32)]))]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![
            self.source,
            self.indices,
            or_null(self.cursor),
            self.out,
            self.rows,
            self.batch,
            self.source_rows
        ];
        // SAFETY: four addresses and three u32, as `gather.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(Kernel::GatherLabels, self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let source = buffers.read::<u8>(self.source, self.source_rows.into())?;
        let indices = batch_indices(buffers, self.indices, self.rows, self.batch, self.cursor)?;
        let out = buffers.write::<u32>(self.out, self.rows.into())?;
        check_range(self.name(), "index", indices, self.source_rows)?;
        for (out, &index) in out.iter_mut().zip(indices) {
            *out = source[index as usize].into();
        }
        Ok(())
    }
}

/// `cursor[0] += 1`, as the last launch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvanceCursor {
    /// Address of the number of the step, `u32[1]`, read and written.
    pub cursor: u64,
}

impl Definition for AdvanceCursor {
    fn name(&self) -> &'static str {
        Kernel::AdvanceCursor.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn work(&self) -> Work {
        Work { blocks: 1, iterations: 1, bytes: 2 * U32, flops: 0 }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.cursor, U32)]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: an address, as `cursor.cu` declares; the caller guarantees it.
        unsafe { cuda.launch(Kernel::AdvanceCursor, 1, 1, stream, arguments![self.cursor]) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let cursor = buffers.write::<u32>(self.cursor, 1)?;
        cursor[0] = cursor[0].wrapping_add(1);
        Ok(())
    }
}
