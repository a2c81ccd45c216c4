"""A memory resource of RMM over an allocator of libvramlab, for cuDF, CuPy, Numba and what else takes RMM's resources.

    import rmm, vramlab.rmm
    rmm.mr.set_current_device_resource(vramlab.rmm.resource("caching"))

RMM calls back into Python for each allocation and each free, so each takes Python's lock.

The allocator waits for the streams that its memory was used on when it gives memory back, and does not learn that
one is destroyed. A program that destroys a stream and goes on says so before, by
`resource.vramlab.stream_gone(handle)`; at the end, when its blocks are freed, it need not.
"""

from __future__ import annotations

from typing import Any

from vramlab.allocator import Allocator, Error

__all__ = ["resource"]


def resource(
    allocator: str = "caching", device: str | None = None, *, limit: int | None = None, **settings: Any
) -> Any:
    """An `rmm.mr.CallbackMemoryResource` whose memory comes from an allocator of libvramlab.

    `device` is "cuda:N"; without it CUDA's current device is taken. The allocator is its attribute `vramlab`, for
    statistics and snapshots, and lives as long.
    """
    import rmm

    if device is None:
        from cuda.bindings import runtime

        error, current = runtime.cudaGetDevice()
        if int(error) != 0:
            raise RuntimeError(f"cudaGetDevice: {error}")
        device = f"cuda:{current}"
    own = Allocator(allocator, device, limit=limit, **settings)
    # Blocks whose stream is not the legacy default one.
    streams: dict[int, int] = {}

    def allocate(size: int, stream: Any) -> int:
        handle = stream.__cuda_stream__()[1]
        address = own.alloc(size, handle)
        if handle:
            streams[address] = handle
        return address

    def deallocate(address: int, size: int, stream: Any) -> None:
        # Destructors of C++ call this, where an exception ends the process. What is left when the allocator was closed,
        # as at the end of the program, went back with it; what a forked child inherited is its parent's.
        if not own._handle.is_open or not own._handle.is_of_this_process:
            return
        handle = stream.__cuda_stream__()[1]
        try:
            # A free is in the order of its own stream, which may be another one than the block's.
            if streams.pop(address, 0) != handle:
                own.record_stream(address, handle)
            own.free(address)
        except Error:
            # Another thread may have closed it meanwhile.
            if own._handle.is_open:
                raise

    class Resource(rmm.mr.CallbackMemoryResource):  # type: ignore[misc]
        """RMM's resource, with its allocator."""

        vramlab = own

    return Resource(allocate, deallocate)
