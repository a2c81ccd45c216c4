//! Detection of the driver and its GPUs, without a panic where there is none.

use super::check;
use crate::DriverError;
use crate::{CallKind, DriverResult, MemoryProperties};
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};
use std::ffi::{CStr, c_int};
use std::fmt;

/// The newest version of CUDA that the driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion {
    /// Major part: 13 of 13.0.
    pub major: u32,
    /// Minor part: 0 of 13.0.
    pub minor: u32,
}

impl CudaVersion {
    /// The oldest sufficient version. The kernels are compiled to PTX ISA 8.4, which drivers accept from here on.
    /// <https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#release-notes>
    pub const NEEDED: Self = Self { major: 12, minor: 4 };
    /// The oldest version that serves memory to a program with kernels of its own: the one that brought stream-ordered memory.
    pub const NEEDED_FOR_MEMORY: Self = Self { major: 11, minor: 2 };

    /// The first driver of a version that is needed.
    fn driver(self) -> u32 {
        if self <= Self::NEEDED_FOR_MEMORY { 460 } else { 550 }
    }

    /// From `cuDriverGetVersion`'s number, 1000 × major + 10 × minor.
    fn from_raw(raw: c_int) -> Self {
        let raw = raw.unsigned_abs();
        Self { major: raw / 1000, minor: raw % 1000 / 10 }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The reason why no CUDA device can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaUnavailable {
    /// The driver's library is not on this machine.
    #[error("no NVIDIA driver: libcuda was not found; install one or use --device sim")]
    NoDriverLibrary,
    /// The library exists but does not start.
    #[error("the NVIDIA driver did not start: {name} ({code}); check whether nvidia-smi works, or use --device sim")]
    InitFailed {
        /// The driver's result code.
        code: u32,
        /// Name of the code.
        name: String,
    },
    /// The driver runs but shows no GPU.
    #[error("the NVIDIA driver shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device sim")]
    NoDevice,
    /// The driver shows fewer GPUs than the requested number implies.
    #[error(
        "there is no GPU {asked}: the driver shows {count}, counted from 0; ask for a lower number or use --device sim"
    )]
    NoSuchDevice {
        /// Requested number.
        asked: usize,
        /// Number of GPUs.
        count: usize,
    },
    /// The driver is older than the kernels require.
    #[error(
        "the NVIDIA driver supports CUDA {found} and {needed} is needed: install driver {} or newer, or use --device sim",
        .needed.driver()
    )]
    DriverTooOld {
        /// The driver's version.
        found: CudaVersion,
        /// The oldest sufficient version.
        needed: CudaVersion,
    },
    /// The driver exists, but a query failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The driver's description of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDeviceInfo {
    /// Its number, counted from 0 among the GPUs that the driver shows.
    pub ordinal: usize,
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Total memory in bytes.
    pub total_bytes: u64,
    /// Whether it has stream-ordered pools.
    pub pools: bool,
    /// Whether it has virtual memory management.
    pub vmm: bool,
    /// The properties that created memory can have, as far as the driver claims.
    pub memory: MemoryProperties,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Size of the L2 cache in bytes.
    pub l2_bytes: u64,
    /// Whether it reads the host's pageable memory by itself, through the host's page tables (as Grace does).
    pub host_page_tables: bool,
}

/// Starts the driver, if there is one of the `needed` version, and returns its version. Cheap when it is running.
pub(super) fn start(needed: CudaVersion) -> Result<CudaVersion, CudaUnavailable> {
    // SAFETY: loading a library runs its initialisers, which must be sound; for libcuda that is NVIDIA's promise. Every other
    // cudarc call panics when the library is missing, so this one comes first.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaUnavailable::NoDriverLibrary);
    }
    // SAFETY: the library is loaded (checked above); 0 is the only valid flag of cuInit.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => {}
        CUresult::CUDA_ERROR_NO_DEVICE => return Err(CudaUnavailable::NoDevice),
        // CAST: the enum has the driver's codes as its values.
        failed => return Err(CudaUnavailable::InitFailed { code: failed as u32, name: format!("{failed:?}") }),
    }
    let mut raw = 0;
    // SAFETY: the pointer is to a live integer of the type that the call writes.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut raw) };
    check(CallKind::DeviceQuery, result)?;
    let version = CudaVersion::from_raw(raw);
    if version < needed {
        return Err(CudaUnavailable::DriverTooOld { found: version, needed });
    }
    Ok(version)
}

/// The number of GPUs that the started driver shows; an error for none.
pub(super) fn device_count() -> Result<usize, CudaUnavailable> {
    match count(CallKind::DeviceQuery)? {
        0 => Err(CudaUnavailable::NoDevice),
        count => Ok(count),
    }
}

/// The number of GPUs that the started driver shows.
pub(super) fn count(call: CallKind) -> DriverResult<usize> {
    let mut count: c_int = 0;
    // SAFETY: the driver is started (callers do) and the pointer is to a live integer of the type that the call writes.
    check(call, unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The driver's handle of a GPU and its description.
pub(super) fn device(ordinal: usize, count: usize) -> Result<(CUdevice, CudaDeviceInfo), CudaUnavailable> {
    let number = match c_int::try_from(ordinal) {
        Ok(number) if ordinal < count => number,
        _ => return Err(CudaUnavailable::NoSuchDevice { asked: ordinal, count }),
    };
    let mut device = 0;
    // SAFETY: the driver is started (callers do) and the pointer is to a live handle of the type that the call writes.
    let result = unsafe { sys::cuDeviceGet(&raw mut device, number) };
    check(CallKind::DeviceQuery, result)?;
    let ask = |attribute| ask(device, attribute);
    let info = CudaDeviceInfo {
        ordinal,
        name: name(device)?,
        compute_capability: (
            ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        total_bytes: total_bytes(device)?,
        pools: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
        vmm: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0,
        memory: MemoryProperties {
            file_descriptors: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
                != 0,
            fabric: ask_later(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)? != 0,
            rdma: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)? != 0,
        },
        multiprocessors: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        host_page_tables: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)?
            != 0,
    };
    Ok((device, info))
}

/// One attribute; the attributes that are queried here are never negative.
fn ask(device: CUdevice, attribute: CUdevice_attribute) -> DriverResult<u32> {
    let (value, result) = attribute_of(device, attribute);
    check(CallKind::DeviceQuery, result)?;
    Ok(value)
}

/// An attribute that came after [`CudaVersion::NEEDED_FOR_MEMORY`]: 0 where the driver does not know it.
fn ask_later(device: CUdevice, attribute: CUdevice_attribute) -> DriverResult<u32> {
    match attribute_of(device, attribute) {
        (_, CUresult::CUDA_ERROR_INVALID_VALUE) => Ok(0),
        (value, result) => check(CallKind::DeviceQuery, result).map(|()| value),
    }
}

fn attribute_of(device: CUdevice, attribute: CUdevice_attribute) -> (u32, CUresult) {
    let mut value = 0;
    // SAFETY: `device` came from cuDeviceGet and the pointer is to a live integer of the type that the call writes.
    let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
    (value.unsigned_abs(), result)
}

fn name(device: CUdevice) -> DriverResult<String> {
    const LENGTH: c_int = 256;
    let mut text = [0u8; LENGTH as usize];
    // SAFETY: the buffer is live and as long as the call is told; `device` came from cuDeviceGet.
    let result = unsafe { sys::cuDeviceGetName(text.as_mut_ptr().cast(), LENGTH, device) };
    check(CallKind::DeviceQuery, result)?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn total_bytes(device: CUdevice) -> DriverResult<u64> {
    let mut bytes = 0usize;
    // SAFETY: `device` came from cuDeviceGet and the pointer is to a live integer of the type that the call writes.
    let result = unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, device) };
    check(CallKind::DeviceQuery, result)?;
    // CAST: widening.
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::{CudaUnavailable, CudaVersion};
    use crate::cuda::CudaDriver;

    #[test]
    fn a_missing_driver_is_one_sentence_and_no_panic() {
        match CudaDriver::probe() {
            Err(error @ CudaUnavailable::NoDriverLibrary) => {
                assert_eq!(
                    error.to_string(),
                    "no NVIDIA driver: libcuda was not found; install one or use --device sim"
                );
                assert_eq!(CudaDriver::new(0).map(|_| ()), Err(error));
            }
            other => eprintln!("skipped: this machine has an NVIDIA driver ({other:?})"),
        }
    }

    #[test]
    fn every_reason_is_one_line_with_a_mend() {
        let version = CudaVersion::from_raw(12_020);
        let reasons = [
            CudaUnavailable::NoDriverLibrary,
            CudaUnavailable::InitFailed { code: 803, name: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH".into() },
            CudaUnavailable::NoDevice,
            CudaUnavailable::NoSuchDevice { asked: 3, count: 1 },
            CudaUnavailable::DriverTooOld { found: version, needed: CudaVersion::NEEDED },
            CudaUnavailable::DriverTooOld {
                found: CudaVersion::from_raw(11_010),
                needed: CudaVersion::NEEDED_FOR_MEMORY,
            },
        ];
        assert!(reasons[4].to_string().contains("driver 550 ") && reasons[5].to_string().contains("driver 460 "));
        for text in reasons.map(|reason| reason.to_string()) {
            assert!(!text.contains('\n') && text.ends_with("use --device sim"), "{text}");
        }
    }

    #[test]
    fn versions_are_read_and_ordered() {
        assert_eq!(CudaVersion::from_raw(13_000).to_string(), "13.0");
        assert_eq!(CudaVersion::from_raw(12_080), CudaVersion { major: 12, minor: 8 });
        assert!(CudaVersion::from_raw(11_080) < CudaVersion::NEEDED);
        assert!(CudaVersion::from_raw(12_040) >= CudaVersion::NEEDED);
    }
}
