"""An allocator of libvramlab for Python, on a GPU or a simulated device; PyTorch is not needed.

    with vramlab.Allocator("caching", device="sim") as allocator:
        block = allocator.alloc(1 << 20)
        allocator.free(block)
        print(allocator.stats()["reserved_bytes.all.current"])

Streams are CUDA handles as numbers (0: the legacy default stream); on a simulated device any number is valid.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from vramlab._library import (
    CREATED,
    FREED,
    NO_LIMIT,
    VISIT_BLOCK,
    VISIT_SEGMENT,
    DriverError,
    Error,
    FileError,
    ForeignError,
    ForkedError,
    Handle,
    IncapableError,
    InternalError,
    InvalidError,
    LiveError,
    NoDeviceError,
    OutOfMemoryError,
    RawCheckpoint,
    UnknownError,
    allocators,
    library,
    spec,
)

__all__ = [
    "Allocator",
    "Checkpoint",
    "DriverError",
    "Error",
    "FileError",
    "ForeignError",
    "ForkedError",
    "IncapableError",
    "InternalError",
    "InvalidError",
    "LiveError",
    "NoDeviceError",
    "OutOfMemoryError",
    "Pool",
    "UnknownError",
    "allocators",
]

_STATES = ("active_allocated", "active_pending_free", "inactive")
_CAPABILITIES = ("pools", "checkpoint", "snapshot", "expand", "follows_pytorch")


def _number(value: int, what: str) -> int:
    """The number itself; raises an error if it is out of range, because ctypes truncates it silently."""
    if not 0 <= value < 2**64:
        raise InvalidError(f"{what} is {value}; write a number from 0 to 2^64 - 1")
    return value


class _NoCopy:
    """An object that owns memory of this process; it cannot be copied or sent to another process."""

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuses `copy.copy`, `copy.deepcopy` and `pickle`."""
        raise Error(f"{self!r} cannot be copied or pickled; share the object, or open another allocator")


class Allocator(_NoCopy):
    """An allocator on one device. Calls may be made from any thread. A call after the close raises [`Error`].

    Raises [`UnknownError`], with the nearest name, if a name or setting is unknown, and [`NoDeviceError`] if the GPU
    cannot be used.
    """

    def __init__(
        self, allocator: str = "caching", device: str = "cuda", *, limit: int | None = None, **settings: Any
    ) -> None:
        """Opens an allocator.

        `allocator` is NAME or NAME:key=value,…; settings may also be given as keywords. `device` is "cuda", "cuda:1",
        "sim" (a simulated H200), "sim:2" (another one), "sim:FILE" (with a profile), or "host:cuda" and the like for
        pinned memory of the host, which a GPU's driver pins: for allocators such as "host-exact". `limit` is as for
        [`set_limit`].
        """
        self._library = library()
        self.name = spec(allocator, settings)
        self.device = device
        self._handle = Handle(self._library, self.name, device)
        if limit is not None:
            self.set_limit(limit)

    def __repr__(self) -> str:
        """The spec and device, and the state, open or closed."""
        return repr(self._handle)

    def __enter__(self) -> Allocator:
        """The allocator itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the allocator."""
        self.close()

    def _call(self, function: str, *arguments: Any) -> None:
        self._library.check(self._handle.call(getattr(self._library, function), *arguments))

    def _ask(self, function: str, *arguments: Any) -> int:
        out = ctypes.c_uint64()
        self._call(function, *arguments, ctypes.byref(out))
        return out.value

    def _json(self, function: str) -> Any:
        return self._library.json(partial(self._handle.call, getattr(self._library, function)))

    def close(self) -> None:
        """Waits for the device and releases all memory, including live blocks. A second call does nothing.

        Calls in progress on other threads finish first, and later calls raise [`Error`]. Raises [`LiveError`] in a
        callback of the allocator, and when calls on other threads do not return.
        """
        self._handle.close()

    # --- blocks ---

    def alloc(self, bytes: int, stream: int = 0) -> int:
        """Allocates a block for work on a stream and returns its address; 0 for zero bytes, which needs no free."""
        return self._ask("allocate", _number(bytes, "a size"), _number(stream, "a stream"))

    def free(self, address: int) -> None:
        """Frees a block. Work that uses it must already be queued, on its stream or on recorded streams."""
        self._call("free", _number(address, "an address"))

    def record_stream(self, address: int, stream: int, gpu: int | None = None) -> None:
        """Records that work queued on another stream uses a block, which is not reused before that work completes.

        Pinned memory may be used by streams of every GPU; `gpu` is the number of the stream's, without it that of the
        device's name. The stream of the request counts only if it is recorded, too.
        """
        numbers = _number(address, "an address"), _number(stream, "a stream")
        if gpu is None:
            self._call("record_stream", *numbers)
        elif not 0 <= gpu < 2**32:
            raise InvalidError(f"a GPU is {gpu}; write a number from 0 to 2^32 - 1")
        else:
            self._call("record_stream_on", numbers[0], gpu, numbers[1])

    def stream_gone(self, stream: int) -> None:
        """Notifies the allocator that a stream will be destroyed. Waits for the device and completes deferred frees."""
        self._call("stream_gone", _number(stream, "a stream"))

    def capturing(self, open: bool) -> None:
        """Notifies the allocator that a graph capture on the device started or ended; calls are counted."""
        self._call("capturing", open)

    def reuse_in_captures(self, on: bool) -> None:
        """Sets whether a capture may reuse blocks that other streams used in it. Off by default."""
        self._call("reuse_in_captures", on)

    def base(self, address: int) -> tuple[int, int]:
        """The address and the size in bytes of the segment that contains an address."""
        base, size = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("base", _number(address, "an address"), ctypes.byref(base), ctypes.byref(size))
        return base.value, size.value

    # --- private pools ---

    def pool(self) -> Pool:
        """Creates a private pool: its memory serves no other request."""
        return Pool(self, self._ask("pool_create"))

    def restore(self, checkpoint: Checkpoint) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Restores a private pool to its state at a checkpoint.

        Returns the addresses of the previously live blocks, which are freed, and (address, bytes, stream) of the
        blocks that are live now. If it raises, nothing has changed.
        """
        freed: list[int] = []
        created: list[tuple[int, int, int]] = []
        on_freed = FREED(lambda _, address: freed.append(address))
        on_created = CREATED(lambda _, address, size, stream: created.append((address, size, stream)))
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidError(f"{checkpoint!r} is no checkpoint; take one with Pool.checkpoint()")
        # This reference keeps the checkpoint alive if another thread drops the object.
        raw = checkpoint._raw
        self._call("pool_restore", raw.pointer, None, on_freed, on_created)
        return freed, created

    # --- memory ---

    def trim(self, keep: int = 0) -> int:
        """Waits for pending frees, releases free segments down to `keep` reserved bytes, returns the released bytes."""
        return self._ask("trim", _number(keep, "a size"))

    def set_limit(self, bytes: int | None) -> None:
        """Sets or removes the limit on reserved bytes, at any time. Memory over it is not released immediately."""
        self._call("set_limit", NO_LIMIT if bytes is None else _number(bytes, "a limit"))

    def memory(self) -> tuple[int, int]:
        """Free and total memory of the device in bytes."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("memory", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # --- statistics and records ---

    def stats(self) -> dict[str, int]:
        """The known statistics, under the keys of `torch.cuda.memory_stats` and the allocator's own keys."""
        stats: dict[str, int] = self._json("stats_json")
        return stats

    def reset_peaks(self) -> None:
        """Resets every peak to its current value."""
        self._call("reset_peaks")

    def reset_accumulated(self) -> None:
        """Resets every sum and count to zero."""
        self._call("reset_accumulated")

    def segments(self) -> list[dict[str, Any]]:
        """The segments in address order, each with its blocks, at one moment."""
        out: list[dict[str, Any]] = []

        def segment(_: Any, of: Any) -> None:
            one = of.contents
            fields = {name: getattr(one, name) for name, _ in one._fields_}
            out.append({**fields, "blocks": []})

        def block(_: Any, of: Any) -> None:
            one = of.contents
            out[-1]["blocks"].append(
                {
                    "address": one.address,
                    "bytes": one.bytes,
                    "requested": one.requested,
                    "state": _STATES[one.state],
                }
            )

        self._call("visit", None, VISIT_SEGMENT(segment), VISIT_BLOCK(block))
        return out

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the segments in PyTorch's format, a pickle, or JSON for a name in `.json`; never a partial file."""
        self._call("snapshot", os.fsencode(path))

    def on_segment(self, callback: Callable[[str, int, int, int], None] | None) -> None:
        """Sets the callback for segment events, called with (action, address, bytes, stream), or removes it.

        The action is alloc, free, map or unmap. The callback runs on the thread whose call caused the event, before
        that call returns, and in the order of events. An exception in it is printed but does not propagate. It may
        call all methods but `close`.
        """
        self._library.check(self._handle.on_segment(callback))

    def trace(self, on: bool = True) -> None:
        """Starts or stops recording every allocation and free, 64 bytes each."""
        self._call("trace", on)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace since the last call, one line of JSON per event."""
        self._call("trace_write", os.fsencode(path))

    def latency(self, on: bool = True) -> None:
        """Starts or stops timing every allocation and free."""
        self._call("latency", on)

    def latencies(self) -> list[dict[str, Any]]:
        """Measured latencies: percentiles in nanoseconds by operation and path."""
        rows: list[dict[str, Any]] = self._json("latency_json")
        return rows

    def calls(self) -> Any:
        """The allocator's driver calls: number and time of each kind."""
        return self._json("calls_json")

    def settings(self) -> dict[str, Any]:
        """The settings in effect."""
        settings: dict[str, Any] = self._json("settings_json")["settings"]
        return settings

    def can(self) -> set[str]:
        """The allocator's capabilities: pools, checkpoint, snapshot, expand, follows_pytorch."""
        bits = ctypes.c_uint32()
        self._call("can", ctypes.byref(bits))
        return {name for at, name in enumerate(_CAPABILITIES) if bits.value >> at & 1}


class Pool(_NoCopy):
    """A private pool of an allocator: memory that serves no other request. A `with` block releases it at its end."""

    def __init__(self, allocator: Allocator, number: int) -> None:
        """Created by [`Allocator.pool`]."""
        self.allocator = allocator
        self.number = number

    def __enter__(self) -> Pool:
        """The pool itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the pool."""
        self.release()

    def alloc(self, bytes: int, stream: int = 0) -> int:
        """Allocates from the pool. The block is freed like any other."""
        pool = _number(self.number, "a pool")
        return self.allocator._ask("allocate_in", pool, _number(bytes, "a size"), _number(stream, "a stream"))

    def release(self) -> None:
        """Ends requests from the pool. Its free segments are released with the allocator's next ones."""
        self.allocator._call("pool_release", _number(self.number, "a pool"))

    def trim(self) -> int:
        """Releases the free segments of the released pool and returns their bytes."""
        return self.allocator._ask("pool_trim", _number(self.number, "a pool"))

    def checkpoint(self) -> Checkpoint:
        """Saves the pool's state for [`Allocator.restore`]."""
        return Checkpoint(self)


class Checkpoint(_NoCopy):
    """The state of a private pool at one moment."""

    def __init__(self, pool: Pool) -> None:
        """Created by [`Pool.checkpoint`]."""
        allocator = pool.allocator
        self._raw = RawCheckpoint(allocator._handle, allocator._library, _number(pool.number, "a pool"))
