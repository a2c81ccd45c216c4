//! Access to host memory through device addresses, for the CPU reference.

use std::ptr::NonNull;

use bytemuck::Pod;

use crate::error::KernelError;

/// Memory of a simulated device: maps device addresses to host memory.
pub trait HostMemory {
    /// Host pointer for the `bytes` bytes from `addr` on, `None` if any of them is not mapped.
    ///
    /// The range is contiguous and initialised, with any values.
    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>>;
}

struct BufferRange {
    addr: u64,
    start: usize,
    end: usize,
    written: bool,
}

/// The buffers of one run on the host. Returns slices, and refuses a buffer that would alias a written one: an
/// allocator under study may be wrong, and its mistake must be reported as an error.
pub(crate) struct HostBuffers<'m> {
    memory: &'m dyn HostMemory,
    operation: &'static str,
    claimed: Vec<BufferRange>,
}

impl<'m> HostBuffers<'m> {
    /// No buffers yet.
    ///
    /// # Safety
    ///
    /// Ranges that `memory` translates to are valid for `'m`. During `'m` nothing else writes them, or reads the bytes
    /// written through this value.
    pub(crate) unsafe fn new(memory: &'m dyn HostMemory, operation: &'static str) -> Self {
        Self { memory, operation, claimed: Vec::new() }
    }

    /// Name of the operation.
    pub(crate) fn operation(&self) -> &'static str {
        self.operation
    }

    /// An input of `count` elements.
    pub(crate) fn read<T: Pod>(&mut self, addr: u64, count: u64) -> Result<&'m [T], KernelError> {
        let (pointer, len) = self.claim::<T>(addr, count, false)?;
        // SAFETY: `claim` has checked mapping, alignment and length, and that no returned `&mut` overlaps the range;
        // the caller of `new` guarantees the rest, and any bytes are a valid `T`.
        Ok(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), len) })
    }

    /// An output of `count` elements.
    pub(crate) fn write<T: Pod>(&mut self, addr: u64, count: u64) -> Result<&'m mut [T], KernelError> {
        let (pointer, len) = self.claim::<T>(addr, count, true)?;
        // SAFETY: as for `read`, and no returned slice overlaps the range.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), len) })
    }

    /// An optional output.
    pub(crate) fn write_some<T: Pod>(
        &mut self,
        addr: Option<u64>,
        count: u64,
    ) -> Result<Option<&'m mut [T]>, KernelError> {
        addr.map(|addr| self.write(addr, count)).transpose()
    }

    fn claim<T: Pod>(&mut self, addr: u64, count: u64, written: bool) -> Result<(NonNull<T>, usize), KernelError> {
        let operation = self.operation;
        let bytes = count
            .checked_mul(size_of::<T>() as u64)
            .filter(|&bytes| isize::try_from(bytes).is_ok() && addr.checked_add(bytes).is_some())
            .ok_or_else(|| KernelError::Shape {
                operation,
                what: format!("{count} elements from {addr:#x} do not fit in the address space"),
            })?;
        let pointer =
            self.memory.translate(addr, bytes).ok_or(KernelError::NotMapped { operation, addr, bytes })?.cast::<T>();
        if !pointer.is_aligned() {
            return Err(KernelError::Misaligned { operation, addr, alignment: align_of::<T>() as u64 });
        }
        // Host addresses, not device addresses, are compared: two device addresses may be mapped to the same memory.
        let start = pointer.as_ptr().addr();
        let new = BufferRange { addr, start, end: start + bytes as usize, written };
        for old in &self.claimed {
            if (old.written || written) && old.start < new.end && new.start < old.end {
                let (output, other) = if written { (addr, old.addr) } else { (old.addr, addr) };
                return Err(KernelError::Overlap { operation, output, other });
            }
        }
        self.claimed.push(new);
        Ok((pointer, count as usize))
    }
}

/// Reports the first of `values` that is not below `limit`.
pub(crate) fn check_range(
    operation: &'static str,
    what: &'static str,
    values: &[u32],
    limit: u32,
) -> Result<(), KernelError> {
    match values.iter().position(|&value| value >= limit) {
        None => Ok(()),
        Some(position) => {
            Err(KernelError::OutOfRange { operation, what, position: position as u64, value: values[position], limit })
        }
    }
}
