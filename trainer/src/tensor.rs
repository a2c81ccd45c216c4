//! Matrices on the device.

use crate::device::Device;
use crate::error::{Result, TrainError};
use bytemuck::Pod;
use kernels::Element;
use std::sync::Arc;
use vramlab::{DeviceBuffer, Memory};

/// Device memory and the means to use it, for one run.
#[derive(Debug)]
pub struct Context {
    /// The allocator under study. Declared first, so that it is dropped before the device it allocates from.
    pub memory: Arc<Memory>,
    /// The device; everything below uses its compute stream.
    pub device: Device,
}

impl Context {
    /// Memory for `count` values of four or one bytes each, whose contents are undefined.
    ///
    /// # Errors
    /// Errors of the allocator.
    pub fn allocate<T: Pod>(&self, count: usize) -> Result<DeviceBuffer> {
        let bytes = count.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| TrainError::Input(format!("a tensor of {count} values is too large")))?;
        Ok(self.memory.allocate(bytes, self.device.stream())?)
    }

    /// A matrix of f32 without padding, whose contents are undefined.
    ///
    /// # Errors
    /// Errors of the allocator.
    pub fn matrix(&self, rows: u32, cols: u32) -> Result<Matrix> {
        self.pitched(Element::F32, rows, cols, cols)
    }

    /// A matrix with `pitch` elements from one row to the next, whose contents are undefined.
    ///
    /// # Errors
    /// Errors of the allocator.
    ///
    /// # Panics
    /// When a row is longer than the pitch.
    pub fn pitched(&self, element: Element, rows: u32, cols: u32, pitch: u32) -> Result<Matrix> {
        assert!(cols <= pitch, "a row should end before the next begins");
        let elements = rows as usize * pitch as usize;
        let buffer = match element {
            Element::F32 => self.allocate::<f32>(elements)?,
            Element::Bf16 | Element::F16 => self.allocate::<u16>(elements)?,
        };
        Ok(Matrix { buffer, rows, cols, pitch, element })
    }

    /// Writes the values of a whole matrix, row by row, rounded to its elements.
    ///
    /// # Errors
    /// Errors of the copy.
    ///
    /// # Panics
    /// When there are not as many values as the matrix has.
    pub fn write_values(&self, matrix: &Matrix, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), matrix.rows as usize * matrix.cols as usize, "a matrix should be written as a whole");
        if matrix.element == Element::F32 && matrix.pitch == matrix.cols {
            return self.write(&matrix.buffer, values);
        }
        self.write(&matrix.buffer, &matrix.element.pack(values, matrix.cols, matrix.pitch))
    }

    /// Waits for the compute stream and reads the values of a matrix, row by row, without padding.
    ///
    /// # Errors
    /// Errors of the copy, and of earlier work.
    pub fn read_values(&self, matrix: &Matrix) -> Result<Vec<f32>> {
        // CAST: a matrix lies in memory, so its bytes fit.
        let bytes = self.read::<u8>(&matrix.buffer, (matrix.elements() * matrix.element.bytes()) as usize)?;
        Ok(matrix.element.unpack(&bytes, matrix.rows, matrix.cols, matrix.pitch))
    }

    /// A buffer that holds `values`.
    ///
    /// # Errors
    /// Errors of the allocator and of the copy.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<DeviceBuffer> {
        let buffer = self.allocate::<T>(values.len())?;
        self.write(&buffer, values)?;
        Ok(buffer)
    }

    /// Copies `values` to the start of a buffer; they may be reused on return.
    ///
    /// # Errors
    /// Errors of the copy.
    ///
    /// # Panics
    /// When the buffer is smaller than the values.
    pub fn write<T: Pod>(&self, buffer: &DeviceBuffer, values: &[T]) -> Result<()> {
        let bytes = bytemuck::cast_slice(values);
        assert!(bytes.len() as u64 <= buffer.bytes(), "a buffer should hold what is written to it");
        // SAFETY: the buffer is valid for its size until it is dropped, which its stream orders after this copy.
        unsafe { self.device.driver().copy_to_device(buffer.addr(), bytes, self.device.stream())? };
        Ok(())
    }

    /// Waits for the compute stream and reads the first `count` values of a buffer.
    ///
    /// # Errors
    /// Errors of the copy, and of earlier work.
    ///
    /// # Panics
    /// When the buffer is smaller than that.
    pub fn read<T: Pod>(&self, buffer: &DeviceBuffer, count: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        assert!(bytes.len() as u64 <= buffer.bytes(), "a buffer should hold what is read from it");
        // The copy would wait as well; waiting first keeps the wait and the copy apart in the account of driver calls.
        self.device.synchronize()?;
        // SAFETY: the buffer is valid for its size.
        unsafe { self.device.driver().copy_to_host(bytes, buffer.addr(), self.device.stream())? };
        Ok(values)
    }
}

/// A row-major matrix; freed when dropped.
#[derive(Debug)]
pub struct Matrix {
    /// Its memory, `rows * pitch` elements.
    pub buffer: DeviceBuffer,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Elements from one row to the next. What lies between the columns and the pitch is undefined.
    pub pitch: u32,
    /// Element type.
    pub element: Element,
}

impl Matrix {
    /// First address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.buffer.addr().get()
    }

    /// Number of elements, padding included.
    #[must_use]
    pub fn elements(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.pitch)
    }
}
