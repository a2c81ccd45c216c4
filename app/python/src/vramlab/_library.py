"""The functions of libvramlab for ctypes, and its errors as exceptions."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import weakref
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import vramlab

# The version of the C interface that these declarations follow.
ABI = 1
NO_LIMIT = 2**64 - 1


class Error(Exception):
    """A call of libvramlab failed; the text contains the fault, its location and the fix."""


class OutOfMemoryError(Error, MemoryError):
    """Neither the allocator nor the device has enough memory, or the limit is reached."""


class InvalidError(Error, ValueError):
    """An argument that is never valid."""


class UnknownError(Error, LookupError):
    """The name of an allocator, setting, value, device or pool is unknown; the text suggests the nearest name."""


class NoDeviceError(Error):
    """The GPU does not exist or cannot be used."""


class ForeignError(Error):
    """The address is not a live block of this allocator: it is foreign, already freed, or of another device."""


class IncapableError(Error):
    """The allocator or the device does not support the operation."""


class DriverError(Error):
    """A driver call failed."""


class LiveError(Error):
    """An object is still in use."""


class ForkedError(Error):
    """The process was forked from a process that had opened an allocator."""


class FileError(Error):
    """A file could not be written."""


class InternalError(Error):
    """A bug in the library."""


# Exceptions by status; status 0 is success.
_ERRORS: list[type[Error]] = [
    Error,
    OutOfMemoryError,
    InvalidError,
    UnknownError,
    NoDeviceError,
    ForeignError,
    IncapableError,
    DriverError,
    LiveError,
    ForkedError,
    FileError,
    InternalError,
]


class Segment(ctypes.Structure):
    """`vramlab_segment`."""

    _fields_ = [
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("stream", c_uint64),
        ("pool", c_uint64),
        ("is_large", c_bool),
        ("expandable", c_bool),
        ("allocated_bytes", c_uint64),
        ("active_bytes", c_uint64),
        ("requested_bytes", c_uint64),
    ]


class Block(ctypes.Structure):
    """`vramlab_block`."""

    _fields_ = [("address", c_uint64), ("bytes", c_uint64), ("requested", c_uint64), ("state", c_int32)]


_ACTIONS = ("alloc", "free", "map", "unmap")


class SegmentEvent(ctypes.Structure):
    """`vramlab_segment_event`."""

    _fields_ = [("action", c_int32), ("address", c_uint64), ("bytes", c_uint64), ("stream", c_uint64)]


ON_SEGMENT = ctypes.CFUNCTYPE(None, c_void_p, POINTER(SegmentEvent))
VISIT_SEGMENT = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Segment))
VISIT_BLOCK = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Block))
FREED = ctypes.CFUNCTYPE(None, c_void_p, c_uint64)
CREATED = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_uint64, c_uint64)

_OUT = POINTER(c_uint64)
_TEXT = POINTER(c_void_p)

# Argument types after the allocator, for functions that return a status.
_OF_ALLOCATOR: dict[str, list[Any]] = {
    "close": [],
    "allocate": [c_uint64, c_uint64, _OUT],
    "allocate_in": [c_uint64, c_uint64, c_uint64, _OUT],
    "free": [c_uint64],
    "record_stream": [c_uint64, c_uint64],
    "record_stream_on": [c_uint64, c_uint32, c_uint64],
    "stream_gone": [c_uint64],
    "capturing": [c_bool],
    "reuse_in_captures": [c_bool],
    "pool_create": [_OUT],
    "pool_release": [c_uint64],
    "pool_trim": [c_uint64, _OUT],
    "pool_checkpoint": [c_uint64, POINTER(c_void_p)],
    "pool_restore": [c_void_p, c_void_p, FREED, CREATED],
    "trim": [c_uint64, _OUT],
    "set_limit": [c_uint64],
    "memory": [_OUT, _OUT],
    "stats_json": [_TEXT],
    "reset_peaks": [],
    "reset_accumulated": [],
    "visit": [c_void_p, VISIT_SEGMENT, VISIT_BLOCK],
    "snapshot": [c_char_p],
    "base": [c_uint64, _OUT, _OUT],
    "on_segment": [c_void_p, ON_SEGMENT],
    "trace": [c_bool],
    "trace_write": [c_char_p],
    "latency": [c_bool],
    "latency_json": [_TEXT],
    "calls_json": [_TEXT],
    "can": [POINTER(c_uint32)],
    "sharing_json": [_TEXT],
    "settings_json": [_TEXT],
}


class Library:
    """The loaded libvramlab: its functions without their prefix. `check` turns a status into an exception."""

    def __init__(self, path: Path) -> None:
        """Loads the file and checks that its version is this package's."""
        self.path = path
        self._file = ctypes.CDLL(str(path))
        try:
            abi = self._declare("abi", c_uint32, [])()
        except AttributeError:
            raise ImportError(f"{path} is not libvramlab") from None
        if abi != ABI:
            raise ImportError(f"{path} has interface {abi}, this package knows {ABI}; reinstall vramlab")
        self.version: str = self._declare("version", c_char_p, [])().decode()
        self.error = self._declare("error", c_char_p, [])
        self.text_free = self._declare("text_free", None, [c_void_p])
        self.checkpoint_free = self._declare("checkpoint_free", None, [c_void_p])
        self.open = self._declare("open", c_int32, [c_char_p, c_char_p, POINTER(c_void_p)])
        self._check = self._declare("check", c_int32, [c_char_p])
        self._check_on = self._declare("check_on", c_int32, [c_char_p, c_char_p])
        self.allocators_json = self._declare("allocators_json", c_int32, [_TEXT])
        self._torch_conf_json = self._declare("torch_conf_json", c_int32, [c_char_p, c_char_p, c_uint64, _TEXT])
        for name, arguments in _OF_ALLOCATOR.items():
            setattr(self, name, self._declare(name, c_int32, [c_void_p, *arguments]))

    def __getattr__(self, name: str) -> Any:
        """A function listed in `_OF_ALLOCATOR`."""
        raise AttributeError(name)

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> Any:
        function = getattr(self._file, f"vramlab_{name}")
        function.restype = result
        function.argtypes = arguments
        return function

    def known(self, spec: str) -> None:
        """Raises if a spec contains an unknown allocator, setting or value. Opens nothing."""
        self.check(self._check(spec.encode()))

    def known_on(self, spec: str, device: str) -> None:
        """The same for an allocator of a device's memory, such as "host:cuda"."""
        self.check(self._check_on(spec.encode(), device.encode()))

    def torch_conf(self, spec: str, conf: str, limit: int | None = None) -> dict[str, Any]:
        """PyTorch's settings as an allocator applies them: `settings`, and the `ignored` and `fixed` keys."""
        out: dict[str, Any] = self.json(
            self._torch_conf_json, spec.encode(), os.fsencode(conf), NO_LIMIT if limit is None else limit
        )
        return out

    def check(self, status: int) -> None:
        """Raises the exception of a failed call's status."""
        if status != 0:
            text = self.error().decode(errors="replace")
            raise (_ERRORS[status] if 0 < status < len(_ERRORS) else Error)(text)

    def json(self, function: Any, *arguments: Any) -> Any:
        """Calls a function that returns JSON text."""
        out = c_void_p()
        self.check(function(*arguments, ctypes.byref(out)))
        try:
            return json.loads(ctypes.string_at(out.value or 0))
        finally:
            self.text_free(out)


# Seconds that a close waits for calls on other threads.
_PATIENCE = 30.0


class Handle:
    """An open allocator of the library, and its calls in progress.

    The library must not be closed during a call. Several Python objects may share a handle: it is closed once, by any
    of them, and later calls raise [`Error`].
    """

    def __init__(self, library: Library, spec: str, device: str) -> None:
        """Opens an allocator."""
        self._pointer: int | None = None
        self._library = library
        self._text = f"<vramlab.Allocator {spec!r} on {device}"
        self._pid = os.getpid()
        # Reentrant, because a signal handler may call it too.
        self._changed = threading.Condition(threading.RLock())
        # The thread of each call in progress.
        self._calls: dict[object, int] = {}
        self._closing = False
        self._listener = _Listener()
        out = c_void_p()
        library.check(library.open(spec.encode(), device.encode(), ctypes.byref(out)))
        self._pointer = out.value

    def __repr__(self) -> str:
        """The spec and device, and the state, open or closed."""
        return f"{self._text}{'>' if self.is_open else ', closed>'}"

    def __del__(self) -> None:
        """Closes the allocator if the program did not; a forked child does not close its parent's."""
        if self._pointer is not None and self.is_of_this_process:
            self._library.close(self._pointer)

    @property
    def is_open(self) -> bool:
        """True while the allocator can be called."""
        return self._pointer is not None and not self._closing

    @property
    def is_of_this_process(self) -> bool:
        """False in a child of the process that opened the allocator."""
        return self._pid == os.getpid()

    def call(self, function: Any, *arguments: Any) -> int:
        """Calls a library function and returns its status. The allocator stays open during the call.

        Takes no lock unless the allocator is being closed. A call enters itself before it reads the state, and `close`
        changes the state before it reads the calls, so one of the two sees the other.
        """
        call = object()
        try:
            self._calls[call] = threading.get_ident()
            closing, pointer = self._closing, self._pointer
            if closing or pointer is None:
                pointer = self._open_pointer(closing, pointer)
            status: int = function(pointer, *arguments)
            return status
        finally:
            self._calls.pop(call, None)
            if self._closing and self.is_of_this_process:
                with self._changed:
                    self._changed.notify_all()

    def _calls_of_this_thread(self) -> int:
        return list(self._calls.values()).count(threading.get_ident())

    def _open_pointer(self, closing: bool, pointer: int | None) -> int:
        """The pointer for an entered call that found the allocator closed or being closed."""
        # A call in a callback runs, because the close waits for the outer call. The library refuses a forked child's.
        runs = not closing or self._calls_of_this_thread() > 1 or not self.is_of_this_process
        if pointer is None or not runs:
            raise Error(f"{self!r} was used after it was closed")
        return pointer

    def close(self) -> None:
        """Waits for calls on other threads and closes the allocator. Does nothing if it is already closed.

        Raises [`LiveError`] in a callback, whose call is still running, and when calls on other threads do not return.
        """
        if not self.is_of_this_process:
            if self._pointer is not None:
                self._library.check(self._library.close(self._pointer))
            return
        with self._changed:
            if self._calls_of_this_thread() > 0:
                raise LiveError(f"{self!r} cannot be closed in a callback of it; close it when the call has returned")
            if not self._changed.wait_for(lambda: not self._closing, _PATIENCE):
                raise LiveError(f"{self!r} is being closed by another thread, which does not come to an end")
            if self._pointer is None:
                return
            self._closing = True
            try:
                if not self._changed.wait_for(lambda: not self._calls, _PATIENCE):
                    raise LiveError(
                        f"{self!r} cannot be closed: {len(self._calls)} call(s) of other threads did not return "
                        f"within {_PATIENCE:.0f} s; close it when they have returned"
                    )
                pointer, self._pointer = self._pointer, None
            finally:
                self._closing = False
                self._changed.notify_all()
        self._library.check(self._library.close(pointer))

    def on_segment(self, callback: Callable[[str, int, int, int], None] | None) -> int:
        """Sets or removes the callback for segment events. Returns a status."""
        self._listener.callback = callback
        return self.call(self._library.on_segment, None, ON_SEGMENT() if callback is None else self._listener.function)


class _Listener:
    """The C function for all callbacks of an allocator. It lives as long, as another thread may be running it."""

    def __init__(self) -> None:
        """Starts without a callback."""
        self.callback: Callable[[str, int, int, int], None] | None = None
        # A weak reference, so that both objects are freed after their last use.
        known = weakref.ref(self)

        def tell(_: Any, of: Any) -> None:
            listener, event = known(), of.contents
            callback = None if listener is None else listener.callback
            if callback is not None:
                callback(_ACTIONS[event.action], event.address, event.bytes, event.stream)

        self.function = ON_SEGMENT(tell)


class RawCheckpoint:
    """A checkpoint of the library; released after its last use."""

    def __init__(self, handle: Handle, library: Library, pool: int) -> None:
        """Takes the checkpoint."""
        self.pointer = c_void_p()
        self._library = library
        library.check(handle.call(library.pool_checkpoint, pool, ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        """Releases the checkpoint."""
        self._library.checkpoint_free(self.pointer)


@cache
def _load(path: Path) -> Library:
    return Library(path)


def library() -> Library:
    """The library of this process, loaded from [`vramlab.library_path`]."""
    return _load(vramlab.library_path())


def allocators() -> dict[str, dict[str, Any]]:
    """Every allocator by name: its description, and its settings with their defaults."""
    told = library().json(library().allocators_json)
    return {
        one["name"]: {
            "summary": one["summary"],
            "settings": {setting["name"]: setting["default"] for setting in one["settings"]},
        }
        for one in told
    }


def spec(allocator: str, settings: dict[str, Any]) -> str:
    """`NAME:key=value,…` from a name, which may already contain settings, and further settings as Python values."""
    if not settings:
        return allocator
    parts = [f"{key}={_value(value)}" for key, value in settings.items()]
    return f"{allocator}{',' if ':' in allocator else ':'}{','.join(parts)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
