//! The error of a driver call.

use super::{CallKind, DeviceAddr};

/// A driver call that failed.
///
/// Contains only the raw code and its name: turning a code into NVIDIA's sentence calls into the driver, which may be missing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {name} ({code}){}{context}", if context.is_empty() { "" } else { ": " })]
pub struct DriverError {
    /// The call that failed.
    pub call: CallKind,
    /// The driver's result code (`CUresult`); the simulated device uses the same codes.
    pub code: u32,
    /// Name of the code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// Details beyond the code; may be empty.
    pub context: String,
}

impl DriverError {
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub const INVALID_VALUE: u32 = 1;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// `CUDA_ERROR_OPERATING_SYSTEM`: the operating system refused something.
    pub const OPERATING_SYSTEM: u32 = 304;
    /// `CUDA_ERROR_INVALID_HANDLE`.
    pub const INVALID_HANDLE: u32 = 400;
    /// `CUDA_ERROR_ILLEGAL_STATE`.
    pub const ILLEGAL_STATE: u32 = 401;
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub const ILLEGAL_ADDRESS: u32 = 700;
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
    pub const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
    /// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
    pub const HOST_MEMORY_NOT_REGISTERED: u32 = 713;
    /// `CUDA_ERROR_NOT_PERMITTED`.
    pub const NOT_PERMITTED: u32 = 800;
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 801;
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
    pub const STREAM_CAPTURE_UNSUPPORTED: u32 = 900;
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
    pub const STREAM_CAPTURE_INVALIDATED: u32 = 901;
    /// `CUDA_ERROR_STREAM_CAPTURE_UNMATCHED`.
    pub const STREAM_CAPTURE_UNMATCHED: u32 = 903;
    /// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION`.
    pub const STREAM_CAPTURE_ISOLATION: u32 = 905;
    /// `CUDA_ERROR_CAPTURED_EVENT`.
    pub const CAPTURED_EVENT: u32 = 907;

    /// An error of the simulated, null or fault-injecting device, under CUDA's code and name.
    #[must_use]
    pub fn new(call: CallKind, code: u32, context: impl Into<String>) -> Self {
        let name = match code {
            Self::INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
            Self::OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
            Self::OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
            Self::INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
            Self::ILLEGAL_ADDRESS => "CUDA_ERROR_ILLEGAL_ADDRESS",
            Self::HOST_MEMORY_ALREADY_REGISTERED => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            Self::HOST_MEMORY_NOT_REGISTERED => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            Self::NOT_PERMITTED => "CUDA_ERROR_NOT_PERMITTED",
            Self::NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
            Self::ILLEGAL_STATE => "CUDA_ERROR_ILLEGAL_STATE",
            Self::STREAM_CAPTURE_UNSUPPORTED => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            Self::STREAM_CAPTURE_INVALIDATED => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            Self::STREAM_CAPTURE_UNMATCHED => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            Self::STREAM_CAPTURE_ISOLATION => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            Self::CAPTURED_EVENT => "CUDA_ERROR_CAPTURED_EVENT",
            _ => "CUDA_ERROR_UNKNOWN",
        };
        Self { call, code, name: name.to_owned(), context: context.into() }
    }

    pub(crate) fn invalid_value(call: CallKind, context: impl Into<String>) -> Self {
        Self::new(call, Self::INVALID_VALUE, context)
    }

    pub(crate) fn illegal_state(call: CallKind, context: impl Into<String>) -> Self {
        Self::new(call, Self::ILLEGAL_STATE, context)
    }

    pub(crate) fn out_of_memory(call: CallKind) -> Self {
        Self::new(call, Self::OUT_OF_MEMORY, "")
    }

    /// For a handle that the device did not make, or has destroyed.
    pub(crate) fn no_such(call: CallKind, what: &str, handle: u64) -> Self {
        Self::new(call, Self::INVALID_HANDLE, format!("no {what} {handle}"))
    }

    /// For an address at which no block begins.
    pub(crate) fn no_block(call: CallKind, addr: DeviceAddr) -> Self {
        Self::invalid_value(call, format!("no block at {:#x}", addr.get()))
    }

    /// Whether the device had no memory left; only then is a retry after releasing memory useful.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == Self::OUT_OF_MEMORY
    }
}
