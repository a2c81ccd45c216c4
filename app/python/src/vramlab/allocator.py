"""An allocator of libvramlab for Python, on a GPU or a simulated one; needs no PyTorch.

    with vramlab.Allocator("caching", device="sim") as allocator:
        block = allocator.alloc(1 << 20)
        allocator.free(block)
        print(allocator.stats()["reserved_bytes.all.current"])

Streams are CUDA's handles as numbers (0: the legacy default stream); on a simulated device they are any number.
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
    """ctypes cuts a number that is too large without a word."""
    if not 0 <= value < 2**64:
        raise InvalidError(f"{what} is {value}; write a number from 0 to 2^64 - 1")
    return value


class _NoCopy:
    """An object that owns memory of this process; it cannot be copied or sent to another process."""

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuses `copy.copy`, `copy.deepcopy` and `pickle`."""
        raise Error(f"{self!r} cannot be copied or pickled; share the object, or open another allocator")


class Allocator(_NoCopy):
    """An allocator on one device. Calls may come from any thread. A call after the close raises [`Error`].

    Raises [`UnknownError`] for a name or setting that is not there, naming the nearest, and [`NoDeviceError`] for a
    GPU.
    """

    def __init__(
        self, allocator: str = "caching", device: str = "cuda", *, limit: int | None = None, **settings: Any
    ) -> None:
        """Opens one.

        `allocator` is NAME or NAME:key=value,…; settings may stand as keywords, too. `device` is "cuda", "cuda:1",
        "sim" (a simulated H200), "sim:2" (further ones) or "sim:FILE" (with a profile). `limit` is as for
        [`set_limit`].
        """
        self._library = library()
        self.name = spec(allocator, settings)
        self.device = device
        self._handle = Handle(self._library, self.name, device)
        if limit is not None:
            self.set_limit(limit)

    def __repr__(self) -> str:
        """As it was opened, and whether it is."""
        return repr(self._handle)

    def __enter__(self) -> Allocator:
        """The allocator itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def _call(self, function: str, *arguments: Any) -> None:
        self._library.check(self._handle.call(getattr(self._library, function), *arguments))

    def _ask(self, function: str, *arguments: Any) -> int:
        return self._library.number(partial(self._handle.call, getattr(self._library, function)), *arguments)

    def _json(self, function: str) -> Any:
        return self._library.json(partial(self._handle.call, getattr(self._library, function)))

    def close(self) -> None:
        """Waits for the device and gives everything back, also blocks that are held. A second time does nothing.

        Calls of other threads that are under way come first, and later ones raise [`Error`]. Raises [`LiveError`] in a
        callback of the allocator, and when calls of other threads do not return.
        """
        self._handle.close()

    # --- blocks ---

    def alloc(self, bytes: int, stream: int = 0) -> int:
        """Allocates for work on a stream and returns the address; 0 for no bytes, which needs no free."""
        return self._ask("allocate", _number(bytes, "a size"), _number(stream, "a stream"))

    def free(self, address: int) -> None:
        """Frees a block. Work that uses it was queued before, on its stream or on those that were recorded."""
        self._call("free", _number(address, "an address"))

    def record_stream(self, address: int, stream: int) -> None:
        """Says that work queued so far on another stream uses a block: it serves no other request before."""
        self._call("record_stream", _number(address, "an address"), _number(stream, "a stream"))

    def stream_gone(self, stream: int) -> None:
        """Says that a stream is about to be destroyed. Waits for the device; then no block waits for the stream."""
        self._call("stream_gone", _number(stream, "a stream"))

    def capturing(self, open: bool) -> None:
        """Says that the program began to capture a graph on the device, or that such a capture ended; counted."""
        self._call("capturing", open)

    def reuse_in_captures(self, on: bool) -> None:
        """Sets whether blocks that other streams used in a capture may be reused in it. At first they are not."""
        self._call("reuse_in_captures", on)

    def base(self, address: int) -> tuple[int, int]:
        """The segment around an address: where it begins, and its size in bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("base", _number(address, "an address"), ctypes.byref(base), ctypes.byref(size))
        return base.value, size.value

    # --- private pools ---

    def pool(self) -> Pool:
        """Makes a private pool: its memory serves no other request."""
        return Pool(self, self._ask("pool_create"))

    def restore(self, checkpoint: Checkpoint) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Lets a private pool be as it was at a checkpoint.

        Returns the addresses of the blocks that were held, which are freed, and (address, bytes, stream) of those
        that are held now. Where it raises, nothing has changed.
        """
        freed: list[int] = []
        created: list[tuple[int, int, int]] = []
        on_freed = FREED(lambda _, address: freed.append(address))
        on_created = CREATED(lambda _, address, size, stream: created.append((address, size, stream)))
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidError(f"{checkpoint!r} is no checkpoint; take one with Pool.checkpoint()")
        # The name keeps it, whatever becomes of the other object.
        raw = checkpoint._raw
        self._call("pool_restore", raw.pointer, None, on_freed, on_created)
        return freed, created

    # --- memory ---

    def trim(self, keep: int = 0) -> int:
        """Waits for pending frees, gives idle memory back while more than `keep` bytes are held, and says how much."""
        return self._ask("trim", _number(keep, "a size"))

    def set_limit(self, bytes: int | None) -> None:
        """Sets the most bytes that may be held from the device, or none; at any time. Nothing goes back at once."""
        self._call("set_limit", NO_LIMIT if bytes is None else _number(bytes, "a limit"))

    def memory(self) -> tuple[int, int]:
        """Free and total memory of the device in bytes."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("memory", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # --- what it did ---

    def stats(self) -> dict[str, int]:
        """The statistics that are known, under the keys of `torch.cuda.memory_stats` and the allocator's own."""
        stats: dict[str, int] = self._json("stats_json")
        return stats

    def reset_peaks(self) -> None:
        """Lets every peak start again from its current value."""
        self._call("reset_peaks")

    def reset_accumulated(self) -> None:
        """Lets every sum and count start again from zero."""
        self._call("reset_accumulated")

    def segments(self) -> list[dict[str, Any]]:
        """Segments in address order, each with its blocks, at one moment."""
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
        """Writes what is held in PyTorch's layout: a pickle, or JSON for a name in `.json`; whole or not at all."""
        self._call("snapshot", os.fsencode(path))

    def on_segment(self, callback: Callable[[str, int, int, int], None] | None) -> None:
        """Sets what is called with (action, address, bytes, stream) when a segment comes or goes, or nothing.

        The action is alloc, free, map or unmap. It is called on the thread whose call caused it, before that call
        returns, and events come in their order. An exception in it is printed and goes no further. It may call
        everything but `close`.
        """
        self._library.check(self._handle.on_segment(callback))

    def trace(self, on: bool = True) -> None:
        """Records every allocation and free from now on, 64 bytes each, or no longer."""
        self._call("trace", on)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what was recorded since the last time, a line of JSON each."""
        self._call("trace_write", os.fsencode(path))

    def latency(self, on: bool = True) -> None:
        """Times every allocation and free from now on, or no longer."""
        self._call("latency", on)

    def latencies(self) -> list[dict[str, Any]]:
        """Measured latencies: percentiles in nanoseconds by operation and path."""
        rows: list[dict[str, Any]] = self._json("latency_json")
        return rows

    def calls(self) -> Any:
        """The driver calls that the allocator made: number and time of each kind."""
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
    """A private pool of an allocator: memory that serves no other request. As a context it is released at the end."""

    def __init__(self, allocator: Allocator, number: int) -> None:
        """Made by [`Allocator.pool`]."""
        self.allocator = allocator
        self.number = number

    def __enter__(self) -> Pool:
        """The pool itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases it."""
        self.release()

    def alloc(self, bytes: int, stream: int = 0) -> int:
        """Allocates from the pool. The block is freed as any other."""
        pool = _number(self.number, "a pool")
        return self.allocator._ask("allocate_in", pool, _number(bytes, "a size"), _number(stream, "a stream"))

    def release(self) -> None:
        """Says that no more requests come. Idle memory goes back when idle memory goes back the next time."""
        self.allocator._call("pool_release", _number(self.number, "a pool"))

    def trim(self) -> int:
        """Gives back what is idle of the released pool, and returns how many bytes."""
        return self.allocator._ask("pool_trim", _number(self.number, "a pool"))

    def checkpoint(self) -> Checkpoint:
        """Takes down what the pool is like now, for [`Allocator.restore`]."""
        return Checkpoint(self)


class Checkpoint(_NoCopy):
    """The state of a private pool at one moment."""

    def __init__(self, pool: Pool) -> None:
        """As [`Pool.checkpoint`]."""
        allocator = pool.allocator
        self._raw = RawCheckpoint(allocator._handle, allocator._library, _number(pool.number, "a pool"))
