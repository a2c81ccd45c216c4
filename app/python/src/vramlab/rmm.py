"""A memory resource of RMM over an allocator of libvramlab, for cuDF, CuPy, Numba and other users of RMM's resources.

    import rmm, vramlab.rmm
    rmm.mr.set_current_device_resource(vramlab.rmm.resource("caching"))

RMM calls back into Python for each allocation and each free, so each acquires the GIL.

Before the allocator releases memory, it waits for the streams that used the memory. It is not notified when a stream is
destroyed: a program that destroys a stream and continues must first call `resource.vramlab.stream_gone(handle)`. At the
end of the program, when its blocks are freed, the call is not needed.
"""

from __future__ import annotations

from typing import Any

from vramlab.allocator import Allocator, Error

__all__ = ["resource"]


def resource(
    allocator: str = "caching", device: str | None = None, *, limit: int | None = None, **settings: Any
) -> Any:
    """An `rmm.mr.CallbackMemoryResource` whose memory comes from an allocator of libvramlab.

    `device` is "cuda:N"; the default is CUDA's current device. The attribute `vramlab` is the allocator, for statistics
    and snapshots; it lives as long as the resource.
    """
    import rmm

    if device is None:
        from cuda.bindings import runtime

        error, current = runtime.cudaGetDevice()
        if int(error) != 0:
            raise RuntimeError(f"cudaGetDevice: {error}")
        device = f"cuda:{current}"
    own = Allocator(allocator, device, limit=limit, **settings)
    # Live blocks of streams other than the legacy default stream.
    streams: dict[int, int] = {}

    def allocate(size: int, stream: Any) -> int:
        handle = stream.__cuda_stream__()[1]
        address = own.alloc(size, handle)
        if handle:
            streams[address] = handle
        return address

    def deallocate(address: int, size: int, stream: Any) -> None:
        # C++ destructors call this, where an exception ends the process. Closing the allocator, as at the end of the
        # program, has released the remaining blocks; blocks that a forked child inherited belong to its parent.
        if not own._handle.is_open or not own._handle.is_of_this_process:
            return
        handle = stream.__cuda_stream__()[1]
        try:
            # A free is ordered on its own stream, which may differ from the block's.
            if streams.pop(address, 0) != handle:
                own.record_stream(address, handle)
            own.free(address)
        except Error:
            # Another thread may have closed it in the meantime.
            if own._handle.is_open:
                raise

    class Resource(rmm.mr.CallbackMemoryResource):  # type: ignore[misc]
        """RMM's resource, with its allocator."""

        vramlab = own

    return Resource(allocate, deallocate)
