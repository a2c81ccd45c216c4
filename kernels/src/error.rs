//! Errors of operations.

/// Why an operation could not be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A call into the CUDA driver failed.
    #[error("{call} failed with {name} ({code})")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Value of the `CUresult`.
        code: u32,
        /// Name of the `CUresult`.
        name: String,
    },

    /// The driver is too old to read the embedded PTX.
    #[error("the NVIDIA driver is too old for these kernels (PTX ISA 8.4); install driver 550 or newer")]
    DriverTooOld,

    /// The GPU is older than the embedded PTX's baseline.
    #[error("these kernels need a GPU of compute capability 7.5 or newer")]
    DeviceTooOld,

    /// A kernel is missing from the embedded PTX.
    #[error("kernel {kernel} is not in the embedded PTX; run kernels/ptx.sh and rebuild")]
    NoPtx {
        /// Name of the kernel.
        kernel: &'static str,
    },

    /// An invalid shape.
    #[error("{operation}: {what}")]
    Shape {
        /// Name of the operation.
        operation: &'static str,
        /// The fault.
        what: String,
    },

    /// Part of a buffer is not mapped.
    #[error("{operation}: no memory is mapped at {bytes} bytes from {addr:#x}")]
    NotMapped {
        /// Name of the operation.
        operation: &'static str,
        /// Device address of the buffer.
        addr: u64,
        /// Length of the buffer in bytes.
        bytes: u64,
    },

    /// A buffer does not begin on a multiple of its element's size.
    #[error("{operation}: address {addr:#x} is not a multiple of {alignment}")]
    Misaligned {
        /// Name of the operation.
        operation: &'static str,
        /// Device address of the buffer.
        addr: u64,
        /// Alignment of the element in bytes.
        alignment: u64,
    },

    /// An output shares memory with another buffer of the same operation.
    #[error("{operation}: the output at {output:#x} overlaps the buffer at {other:#x}")]
    Overlap {
        /// Name of the operation.
        operation: &'static str,
        /// Device address of the output.
        output: u64,
        /// Device address of the other buffer.
        other: u64,
    },

    /// A label or index is out of range.
    #[error("{operation}: {what} {value} at position {position} is out of range; it must be below {limit}")]
    OutOfRange {
        /// Name of the operation.
        operation: &'static str,
        /// `"label"` or `"index"`.
        what: &'static str,
        /// Its index in its buffer, from 0.
        position: u64,
        /// The value.
        value: u32,
        /// The number of classes, or of rows in the source.
        limit: u32,
    },
}
