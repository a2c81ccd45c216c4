"""Names of CUDA calls: both APIs, every version, and what each call is documented to wait for.

Sources: CUDA C++ programming guide, "Implicit synchronization"; CUDA driver API, "API synchronization behavior" and
"Stream synchronization behavior" <https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html>. That
`cuMemFree` waits and `cuMemAlloc` does not is what captures on an H200 show; the documents leave it open. A capture
that shows otherwise is believed, see `vramlab_analysis.nsight.attribution`.
"""

from __future__ import annotations

import re
from functools import lru_cache

# cudaFree_v3020, cuMemFree_v2, cuLaunchKernel_ptsz, cuMemcpyDtoHAsync_v2_ptsz: version and per-thread stream variants.
_SUFFIX = re.compile(r"(_v\d+|_ptsz|_ptds)+$")

# Objects that a call can wait for.
DEVICE = "device"  # all work queued earlier
STREAM = "stream"  # work queued earlier on one stream
EVENT = "event"  # work queued on the event's stream before the event was recorded
OWN = "own"  # the copy that the call itself queued
ROOM = "room"  # a free entry in the queue of launches
NOTHING = "nothing"


@lru_cache(maxsize=4096)
def base_name(name: str) -> str:
    """A call's name without version and stream variant: `cudaFree` for `cudaFree_v3020`."""
    return _SUFFIX.sub("", name)


# Names as in the run record's `driver_calls`; the first pattern that matches the whole base name decides.
_KINDS = [
    (r"cu(Ctx|da?Device|daThread)Synchronize", "device_synchronize"),
    (r"cu(da)?StreamSynchronize", "stream_synchronize"),
    (r"cu(da)?EventSynchronize", "event_synchronize"),
    (r"cu(da)?StreamWaitEvent", "stream_wait_event"),
    (r"cu(da)?StreamQuery", "stream_query"),
    (r"cu(da)?EventRecord(WithFlags)?", "event_record"),
    (r"cu(da)?EventQuery", "event_query"),
    (r"cu(da)?EventElapsedTime", "event_elapsed"),
    (r"cu(da)?EventCreate(WithFlags)?", "event_create"),
    (r"cu(da)?EventDestroy", "event_destroy"),
    (r"cu(MemAlloc(FromPool)?Async|daMalloc(FromPool)?Async)", "mem_alloc_async"),
    (r"cu(MemFreeAsync|daFreeAsync)", "mem_free_async"),
    (r"cuMemHostAlloc|cuMemAllocHost|cudaHostAlloc|cudaMallocHost|cu(Mem|da)HostRegister", "host_alloc"),
    (r"cuMemFreeHost|cudaFreeHost|cu(Mem|da)HostUnregister", "host_free"),
    (r"cuMemAlloc(Pitch|Managed)?|cudaMalloc(Pitch|Managed|3D|Array)?", "mem_alloc"),
    (r"cuMemFree|cudaFree(Array)?", "mem_free"),
    (r"cu(da)?MemPool(Get|Set)(Attribute|Access)", "pool_attribute"),
    (r"cu(da)?MemPoolTrimTo", "pool_trim"),
    (r"cu(da)?MemPoolCreate", "pool_create"),
    (r"cu(da)?MemPoolDestroy", "pool_destroy"),
    (r"cuMemAddressReserve", "mem_address_reserve"),
    (r"cuMemAddressFree", "mem_address_free"),
    (r"cuMemCreate", "mem_create"),
    (r"cuMemMap", "mem_map"),
    (r"cuMemSetAccess", "mem_set_access"),
    (r"cuMemUnmap", "mem_unmap"),
    (r"cuMemRelease", "mem_release"),
    (r"cu(Mem|daMem)GetInfo", "mem_get_info"),
    (r"cu(da)?GraphLaunch", "graph_launch"),
    (r"cu(da)?Launch(Cooperative)?Kernel(Ex|ExC|MultiDevice)?", "kernel_launch"),
    (r"cuMemcpyHtoD.*", "copy_to_device"),
    (r"cuMemcpyDtoH.*", "copy_to_host"),
    (r"cu(da)?Memcpy.*", "copy"),
    (r"cu(da)?Memset.*", "memset"),
    (r"cu(da)?ProfilerSt(art|op)", "profiler"),
]
_COMPILED = [(re.compile(pattern), kind) for pattern, kind in _KINDS]

MEMORY_KINDS = frozenset(kind for _, kind in _KINDS if kind.startswith(("mem_", "host_", "pool_")))

_SCOPES = {
    "device_synchronize": DEVICE,
    "mem_free": DEVICE,
    "host_free": DEVICE,
    "mem_unmap": DEVICE,
    "stream_synchronize": STREAM,
    "event_synchronize": EVENT,
    "kernel_launch": ROOM,
    "graph_launch": ROOM,
}


@lru_cache(maxsize=4096)
def kind(name: str) -> str:
    """A call's name in the run record; other calls keep their own name."""
    base = base_name(name)
    for pattern, known in _COMPILED:
        if pattern.fullmatch(base):
            return known
    return base


@lru_cache(maxsize=4096)
def scope(name: str) -> str:
    """The object that a call is documented to wait for; synchronous copies wait for themselves."""
    known = kind(name)
    if known in ("copy", "copy_to_device", "copy_to_host"):
        return NOTHING if "Async" in base_name(name) else OWN
    return _SCOPES.get(known, NOTHING)
