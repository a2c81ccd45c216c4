"""The functions of libvramlab for ctypes, and its errors as exceptions."""

from __future__ import annotations

import ctypes
import json
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import vramlab

# Number of the interface that these declarations follow.
ABI = 1
NO_LIMIT = 2**64 - 1


class Error(Exception):
    """A call of libvramlab failed; the text says what, where and how to mend it."""


class OutOfMemoryError(Error, MemoryError):
    """Neither the allocator nor the device has the memory, or the limit does not allow it."""


class InvalidError(Error, ValueError):
    """An argument that can never be served."""


class UnknownError(Error, LookupError):
    """No allocator, setting, value, device or pool is called so; the text names the nearest."""


class NoDeviceError(Error):
    """That GPU is not there, or cannot be worked on."""


class ForeignError(Error):
    """No live block of this allocator begins there: it is foreign, was freed before, or is another device's."""


class IncapableError(Error):
    """The allocator or the device cannot do this."""


class DriverError(Error):
    """A call of the driver failed."""


class LiveError(Error):
    """Something is still in use."""


class ForkedError(Error):
    """The process was forked from one that had opened an allocator."""


class FileError(Error):
    """A file could not be written."""


class InternalError(Error):
    """A bug of the library."""


# By status; 0 is no failure.
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

# Arguments behind the allocator, of what returns a status.
_OF_ALLOCATOR: dict[str, list[Any]] = {
    "close": [],
    "allocate": [c_uint64, c_uint64, _OUT],
    "allocate_in": [c_uint64, c_uint64, c_uint64, _OUT],
    "free": [c_uint64],
    "record_stream": [c_uint64, c_uint64],
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
    "settings_json": [_TEXT],
}


class Library:
    """libvramlab, loaded: its functions without their prefix. `check` turns a status into an exception."""

    def __init__(self, path: Path) -> None:
        """Loads the file and looks whether it is of this package's version."""
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
        self.allocators_json = self._declare("allocators_json", c_int32, [_TEXT])
        for name, arguments in _OF_ALLOCATOR.items():
            setattr(self, name, self._declare(name, c_int32, [c_void_p, *arguments]))

    def __getattr__(self, name: str) -> Any:
        """The functions that `_OF_ALLOCATOR` names."""
        raise AttributeError(name)

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> Any:
        function = getattr(self._file, f"vramlab_{name}")
        function.restype = result
        function.argtypes = arguments
        return function

    def known(self, spec: str) -> None:
        """Raises where a text names no allocator, or settings or values that it has not. Opens nothing."""
        self.check(self._check(spec.encode()))

    def check(self, status: int) -> None:
        """Raises what a call's status says."""
        if status != 0:
            text = self.error().decode(errors="replace")
            raise (_ERRORS[status] if 0 < status < len(_ERRORS) else Error)(text)

    def number(self, function: Any, *arguments: Any) -> int:
        """Calls what returns a number through its last argument."""
        out = c_uint64()
        self.check(function(*arguments, ctypes.byref(out)))
        return out.value

    def json(self, function: Any, *arguments: Any) -> Any:
        """Calls what hands out a text of JSON."""
        out = c_void_p()
        self.check(function(*arguments, ctypes.byref(out)))
        try:
            return json.loads(ctypes.string_at(out.value or 0))
        finally:
            self.text_free(out)


@cache
def _load(path: Path) -> Library:
    return Library(path)


def library() -> Library:
    """The library of this process: [`vramlab.library_path`] says which file."""
    return _load(vramlab.library_path())


def allocators() -> dict[str, dict[str, Any]]:
    """Every allocator by name: what it is, and its settings with their defaults."""
    told = library().json(library().allocators_json)
    return {
        one["name"]: {
            "summary": one["summary"],
            "settings": {setting["name"]: setting["default"] for setting in one["settings"]},
        }
        for one in told
    }


def spec(allocator: str, settings: dict[str, Any]) -> str:
    """`NAME:key=value,…` of a name, which may have settings already, and further ones as Python has them."""
    if not settings:
        return allocator
    parts = [f"{key}={_value(value)}" for key, value in settings.items()]
    return f"{allocator}{',' if ':' in allocator else ':'}{','.join(parts)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
