//! Why host memory cannot be pinned, in one line each.

use super::Pinning;
use crate::{Bytes, CallKind, DriverError, DriverResult, HostRoom};

/// The text of a file.
pub(super) type Read = fn(&str) -> Option<String>;

/// The text of a file of this system.
pub(super) fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Refuses a request that the system would grant and then kill the process for: pinned memory is never swapped out.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for zero bytes, `CUDA_ERROR_OUT_OF_MEMORY` where the machine, a control group or the address space
/// has less.
pub(super) fn check(call: CallKind, bytes: u64, room: Option<HostRoom>) -> DriverResult<()> {
    if bytes == 0 {
        return Err(DriverError::invalid_value(call, "zero bytes of pinned memory"));
    }
    let Some(room) = room.filter(|room| room.bytes < bytes) else { return Ok(()) };
    let context = format!("{} of pinned memory, and there are {room}; pin less, or raise that limit", Bytes(bytes));
    Err(DriverError::new(call, DriverError::OUT_OF_MEMORY, context))
}

/// The driver's refusal with what this system says of it: the limit of locked memory for memory that is registered, and WSL's limit.
pub(super) fn explained(error: DriverError, bytes: u64, pinning: Pinning, read: Read) -> DriverError {
    let size = Bytes(bytes);
    let limits = [DriverError::OUT_OF_MEMORY, DriverError::NOT_PERMITTED, DriverError::OPERATING_SYSTEM];
    let wsl = || read("/proc/version").is_some_and(|text| text.to_lowercase().contains("microsoft"));
    let context = match locked_limit(read).filter(|limit| *limit < bytes && pinning != Pinning::Alloc) {
        _ if !limits.contains(&error.code) => return error,
        Some(limit) => {
            format!(
                "{size} of pinned memory, and this process may lock {} (ulimit -l); raise it, or pin with cudaHostAlloc",
                Bytes(limit)
            )
        }
        None if wsl() => format!("{size} of pinned memory; WSL allows about 0.5 to 1 GiB in all: pin less"),
        None => format!("{size} of pinned memory; the driver allows no more: pin less"),
    };
    DriverError { context, ..error }
}

/// The limit of locked memory; `None` where there is none, or the system does not report it.
fn locked_limit(read: Read) -> Option<u64> {
    let limits = read("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::HostBound;

    #[test]
    fn less_room_than_the_request_is_one_line() {
        let room = HostRoom { bytes: 1 << 30, bound: HostBound::ControlGroup };
        let error = check(CallKind::HostAlloc, 4 << 30, Some(room)).unwrap_err();
        assert!(error.is_out_of_memory());
        let text = error.to_string();
        for words in ["host_alloc", "4 GiB of pinned memory", "there are 1 GiB", "control group"] {
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(check(CallKind::HostAlloc, 1 << 30, Some(room)), Ok(()));
        assert_eq!(check(CallKind::HostAlloc, 4 << 30, None), Ok(()), "a system that does not tell bounds nothing");
        let zero = check(CallKind::HostRegister, 0, None).unwrap_err();
        assert_eq!(zero.code, DriverError::INVALID_VALUE);
    }

    #[test]
    fn refusals_name_the_limit_that_applies() {
        let limited = |path: &str| match path {
            "/proc/self/limits" => {
                Some("Max locked memory         65536                65536                bytes \n".into())
            }
            _ => None,
        };
        let wsl = |path: &str| match path {
            "/proc/version" => Some("Linux version 5.15.153.1-microsoft-standard-WSL2".into()),
            "/proc/self/limits" => {
                Some("Max locked memory         unlimited            unlimited            bytes \n".into())
            }
            _ => None,
        };
        let register = Pinning::Register { threads: 4 };
        let refused = |code, pinning, read: Read| {
            explained(DriverError::new(CallKind::HostRegister, code, ""), 1 << 20, pinning, read).to_string()
        };
        let locked = refused(DriverError::NOT_PERMITTED, register, limited);
        assert!(locked.contains("may lock 64 KiB (ulimit -l)") && locked.contains("1 MiB"), "{locked}");
        let alloc = refused(DriverError::OUT_OF_MEMORY, Pinning::Alloc, limited);
        assert!(!alloc.contains("ulimit"), "the limit does not bind cudaHostAlloc: {alloc}");
        let within = refused(DriverError::OUT_OF_MEMORY, register, wsl);
        assert!(within.contains("WSL"), "{within}");
        let other = refused(DriverError::INVALID_VALUE, register, limited);
        assert!(!other.contains("ulimit"), "another error keeps its own text: {other}");
    }
}
