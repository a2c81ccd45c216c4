//! Names of CUDA calls: both APIs, every version, and the documented wait of each call.
//!
//! Sources: CUDA C++ programming guide, "Implicit synchronization"; CUDA driver API, "API synchronization behavior" and "Stream
//! synchronization behavior" <https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html>. The documents leave open that
//! `cuMemFree` waits and `cuMemAlloc` does not; captures on an H200 show it. Where a capture shows otherwise, the capture
//! decides: see [`attribute`](crate::attribute).

use serde::Serialize;
use std::fmt::{self, Display};

/// The work that a call can wait for.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// All work that was queued on the device before.
    Device,
    /// The work that was queued on one stream before.
    Stream,
    /// The work that was queued on the event's stream before the event was recorded.
    Event,
    /// The copy that the call itself queues.
    Own,
    /// A free place in the queue of launches.
    Room,
    /// No work.
    Nothing,
}

impl Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Stream => "stream",
            Self::Event => "event",
            Self::Own => "own",
            Self::Room => "room",
            Self::Nothing => "nothing",
        })
    }
}

/// A call's name without version and stream variant: `cudaFree` for `cudaFree_v3020`, `cuLaunchKernel` for `cuLaunchKernel_ptsz`.
#[must_use]
pub fn base(name: &str) -> &str {
    let mut base = name;
    loop {
        let stripped = base.strip_suffix("_ptsz").or_else(|| base.strip_suffix("_ptds")).or_else(|| version(base));
        match stripped {
            Some(shorter) if !shorter.is_empty() => base = shorter,
            _ => return base,
        }
    }
}

fn version(name: &str) -> Option<&str> {
    let (front, digits) = name.rsplit_once("_v")?;
    (!digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(front)
}

/// What a call does, in the words of a run record's `driver_calls`; any other call keeps its base name.
#[must_use]
pub fn kind(base: &str) -> &str {
    let Some(rest) = base.strip_prefix("cuda").or_else(|| base.strip_prefix("cu")) else { return base };
    let runtime = base.starts_with("cuda");
    let known = match rest {
        "CtxSynchronize" | "DeviceSynchronize" | "ThreadSynchronize" => "device_synchronize",
        "StreamSynchronize" => "stream_synchronize",
        "EventSynchronize" => "event_synchronize",
        "StreamWaitEvent" => "stream_wait_event",
        "StreamQuery" => "stream_query",
        "EventRecord" | "EventRecordWithFlags" => "event_record",
        "EventQuery" => "event_query",
        "EventElapsedTime" => "event_elapsed",
        "EventCreate" | "EventCreateWithFlags" => "event_create",
        "EventDestroy" => "event_destroy",
        "MemAllocAsync" | "MemAllocFromPoolAsync" | "MallocAsync" | "MallocFromPoolAsync" => "mem_alloc_async",
        "MemFreeAsync" | "FreeAsync" => "mem_free_async",
        "MemHostAlloc" | "MemAllocHost" | "HostAlloc" | "MallocHost" | "MemHostRegister" | "HostRegister" => {
            "host_alloc"
        }
        "MemFreeHost" | "FreeHost" | "MemHostUnregister" | "HostUnregister" => "host_free",
        "MemAlloc" | "MemAllocPitch" | "MemAllocManaged" => "mem_alloc",
        "Malloc" | "MallocPitch" | "MallocManaged" | "Malloc3D" | "MallocArray" => "mem_alloc",
        "MemFree" | "Free" | "FreeArray" => "mem_free",
        "MemPoolGetAttribute" | "MemPoolSetAttribute" | "MemPoolGetAccess" | "MemPoolSetAccess" => "pool_attribute",
        "MemPoolTrimTo" => "pool_trim",
        "MemPoolCreate" => "pool_create",
        "MemPoolDestroy" => "pool_destroy",
        "MemAddressReserve" => "mem_address_reserve",
        "MemAddressFree" => "mem_address_free",
        "MemCreate" => "mem_create",
        "MemMap" => "mem_map",
        "MemSetAccess" => "mem_set_access",
        "MemUnmap" => "mem_unmap",
        "MemRelease" => "mem_release",
        "MemGetInfo" => "mem_get_info",
        "GraphLaunch" => "graph_launch",
        "ProfilerStart" | "ProfilerStop" => "profiler",
        _ if launch(rest) => "kernel_launch",
        _ if !runtime && rest.starts_with("MemcpyHtoD") => "copy_to_device",
        _ if !runtime && rest.starts_with("MemcpyDtoH") => "copy_to_host",
        _ if rest.starts_with("Memcpy") => "copy",
        _ if rest.starts_with("Memset") => "memset",
        _ => base,
    };
    // The driver API has no `cuMalloc`, and the runtime no `cudaMemAlloc`: such names are those of other libraries.
    let foreign = if runtime { rest.starts_with("MemAlloc") } else { rest.starts_with("Malloc") || rest == "Free" };
    if foreign { base } else { known }
}

fn launch(rest: &str) -> bool {
    let rest = rest.strip_prefix("LaunchCooperative").or_else(|| rest.strip_prefix("Launch"));
    matches!(rest, Some("Kernel" | "KernelEx" | "KernelExC" | "KernelMultiDevice"))
}

/// Whether calls of this kind manage memory.
#[must_use]
pub fn manages_memory(kind: &str) -> bool {
    ["mem_", "host_", "pool_"].iter().any(|prefix| kind.starts_with(prefix))
}

/// The documented wait of a call. A copy waits for itself unless its name ends the call early (`Async`).
#[must_use]
pub fn scope(base: &str) -> Scope {
    match kind(base) {
        "copy" | "copy_to_device" | "copy_to_host" if base.contains("Async") => Scope::Nothing,
        "copy" | "copy_to_device" | "copy_to_host" => Scope::Own,
        "device_synchronize" | "mem_free" | "host_free" | "mem_unmap" => Scope::Device,
        "stream_synchronize" => Scope::Stream,
        "event_synchronize" => Scope::Event,
        "kernel_launch" | "graph_launch" => Scope::Room,
        _ => Scope::Nothing,
    }
}
