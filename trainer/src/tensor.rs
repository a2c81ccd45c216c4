//! Matrices on the device.

use crate::device::Device;
use crate::error::{Result, TrainError};
use allocators::{DeviceBuffer, Memory};
use bytemuck::Pod;
use std::sync::Arc;

/// Device memory and the means to use it, for one run.
#[derive(Debug)]
pub struct Context {
    /// The allocator under study. Declared first, so that it goes before the device it allocates from.
    pub memory: Arc<Memory>,
    /// The device; everything below uses its compute stream.
    pub device: Device,
}

impl Context {
    /// Memory for `count` values of four or one bytes each, whose contents are undefined.
    ///
    /// # Errors
    /// Those of the allocator.
    pub fn allocate<T: Pod>(&self, count: usize) -> Result<DeviceBuffer> {
        let bytes = count.checked_mul(size_of::<T>()).and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| TrainError::Input(format!("a tensor of {count} values is too large")))?;
        Ok(self.memory.allocate(bytes, self.device.stream())?)
    }

    /// A matrix whose contents are undefined.
    ///
    /// # Errors
    /// Those of the allocator.
    pub fn matrix(&self, rows: u32, cols: u32) -> Result<Matrix> {
        Ok(Matrix { buffer: self.allocate::<f32>(rows as usize * cols as usize)?, rows, cols })
    }

    /// A buffer that holds `values`.
    ///
    /// # Errors
    /// Those of the allocator and of the copy.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<DeviceBuffer> {
        let buffer = self.allocate::<T>(values.len())?;
        self.write(&buffer, values)?;
        Ok(buffer)
    }

    /// Copies `values` to the start of a buffer; they may be reused on return.
    ///
    /// # Errors
    /// Those of the copy.
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
    /// Those of the copy, and of earlier work.
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

/// A row-major matrix of f32; freed when dropped.
#[derive(Debug)]
pub struct Matrix {
    /// Its memory.
    pub buffer: DeviceBuffer,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

impl Matrix {
    /// First address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.buffer.addr().get()
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols)
    }

    /// Never: a matrix has at least one value.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
