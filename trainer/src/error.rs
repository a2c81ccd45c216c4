//! Errors that end a run, and their exit codes.

use crate::data::DataError;
use kernels::KernelError;
use terminal::exit;
use vramlab::output::OutputError;
use vramlab::{AllocError, CudaUnavailable, DriverError};

/// Why a run ended early. Every message is one line that says what, where and how to mend it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Arguments, environment or files that cannot work.
    #[error("{0}")]
    Input(String),
    /// A data set that cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// No CUDA device, though one was asked for.
    #[error(transparent)]
    Cuda(#[from] CudaUnavailable),
    /// An allocation failed, or the allocator found a broken contract.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A kernel could not be loaded or launched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A file of the run record could not be read back.
    #[error("{path}: {error}; the run record is incomplete")]
    Record {
        /// The file.
        path: String,
        /// The fault.
        error: std::io::Error,
    },
    /// The run record could not be written.
    #[error("{0}; the run record is incomplete")]
    Output(OutputError),
    /// A start file could not be written to its end.
    #[error("{0}; no start file was written")]
    Start(OutputError),
    /// The loss is not finite.
    #[error("the loss became {loss} in epoch {epoch}, step {step}: {advice}")]
    Diverged {
        /// Epoch, from 1.
        epoch: u32,
        /// Step of the epoch, from 1.
        step: u64,
        /// The loss.
        loss: f32,
        /// The settings to change, with the values in effect.
        advice: String,
    },
    /// The validation loss is not a number, because of the epoch's last update.
    #[error("the validation loss became {loss} in epoch {epoch}: {advice}")]
    DivergedInValidation {
        /// Epoch, from 1.
        epoch: u32,
        /// The loss.
        loss: f64,
        /// The settings to change, with the values in effect.
        advice: String,
    },
    /// A call of NCCL failed.
    #[error("{call}: {reason}; NCCL_DEBUG=WARN prints more")]
    Nccl {
        /// The call.
        call: &'static str,
        /// NCCL's reason.
        reason: String,
    },
    /// Another rank failed, which ends the run on all.
    #[error("rank {rank}: {message}")]
    Rank {
        /// The rank, from 0.
        rank: u32,
        /// Its exit code.
        code: u8,
        /// Its message.
        message: String,
    },
    /// By a signal.
    #[error("interrupted; what was done so far is in the run record")]
    Interrupted,
}

impl TrainError {
    /// The program's exit code for this error.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input(_) | Self::Data(_) | Self::Cuda(_) => exit::BAD_INPUT,
            Self::Alloc(AllocError::Unsupported { .. } | AllocError::Incapable { .. }) => exit::BAD_INPUT,
            Self::Interrupted => exit::INTERRUPTED,
            Self::Rank { code, .. } => *code,
            _ => exit::FAILED,
        }
    }
}

/// Result of training.
pub type Result<T> = std::result::Result<T, TrainError>;
