"""PyTorch's pinned host memory: an allocator of libvramlab under it, and what a program requests of it."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

from vramlab import _build
from vramlab._library import Error, library

# Settings of PyTorch that `host-pytorch` has, too.
_SETTING = re.compile(r"\b(pinned_(?:max_round_threshold_mb|max_cached_size_mb|reserve_segment_size_mb)):(\d+)")
_BACKGROUND = re.compile(r"\bpinned_use_background_threads:(?:True|true)")
# Settings by which it pins; a recording names them.
_REGISTERS = re.compile(r"\bpinned_use_cuda_host_register:(?:True|true)")
_THREADS = re.compile(r"\b(pinned_num_register_threads):(\d+)")
# With these a segment is not one block that stays.
_SHARED = ("pinned_max_cached_size_mb", "pinned_reserve_segment_size_mb")


class _Host:
    """The loaded C++ part, which is compiled for the installed PyTorch."""

    def __init__(self) -> None:
        file = _build.host(_build.Torch.installed())
        # RTLD_GLOBAL, for exceptions between C++ here and PyTorch's.
        self.functions = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        for name, result, arguments in (
            ("error", ctypes.c_char_p, []),
            ("install", ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p]),
            ("watch", ctypes.c_int, []),
            ("requested", ctypes.c_int, [ctypes.POINTER(ctypes.c_uint64)]),
            ("handle", ctypes.c_void_p, []),
            ("listen", ctypes.c_int, [ctypes.c_void_p]),
        ):
            function: Any = getattr(self.functions, f"vramlab_host_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def check(self, failed: int) -> None:
        """Raises the message of a failed call."""
        if failed != 0:
            raise Error(str(self.error().decode(errors="replace")))


_host: _Host | None = None
_asked: str | None = None


def _loaded() -> _Host:
    global _host
    if _host is None:
        _host = _Host()
    return _host


def install(asked: str) -> None:
    """Serves PyTorch's pinned memory from an allocator from now on; blocks that exist stay PyTorch's."""
    global _asked
    if _asked == asked:
        return
    if _asked is not None:
        raise Error(
            f"PyTorch's pinned memory is served by {_asked} already, and cannot change to {asked}: use one allocator "
            "of pinned memory a process"
        )
    functions = library()
    functions.known_on(asked, "host:cuda")
    spec = _as_torch(asked)
    functions.known_on(spec, "host:cuda")
    host = _loaded()
    host.check(host.install(os.fsencode(functions.path), spec.encode()))
    _asked = asked


def _as_torch(asked: str) -> str:
    """`host-pytorch` with the release of the installed PyTorch and its settings, where none are given."""
    name, _, given = asked.partition(":")
    if name != "host-pytorch":
        return asked
    conf = _settings()
    named = {part.partition("=")[0] for part in given.split(",")}
    added = [f"{key}={value}" for key, value in conf.items() if key not in named]
    return f"{name}:{','.join(([given] if given else []) + added)}" if added else asked


def _conf_text() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _settings() -> dict[str, str]:
    """PyTorch's release and its settings of pinned memory, by the names and in the words of `host-pytorch`."""
    text = _conf_text()
    conf = dict(_SETTING.findall(text))
    if _BACKGROUND.search(text):
        conf["pinned_use_background_threads"] = "on"
    conf["release"] = ".".join(map(str, _build.Torch.installed().minor))
    return conf


def recorded_settings() -> tuple[dict[str, str], bool]:
    """The settings for a recording of requests, and whether each segment of PyTorch's own allocator is one block."""
    text = _conf_text()
    conf = _settings() | dict(_THREADS.findall(text))
    if _REGISTERS.search(text):
        conf["pinned_use_cuda_host_register"] = "on"
    return conf, not any(name in conf for name in _SHARED)


def listen(listener: int) -> None:
    """Lets the recorder hear of the requests that VramLab's allocator serves from now on."""
    host = _loaded()
    host.check(host.listen(listener))


def watch() -> None:
    """Counts what is requested of PyTorch's own allocator of pinned memory from now on."""
    host = _loaded()
    host.check(host.watch())


def allocator() -> str | None:
    """The allocator of pinned memory, by its requested name; None for PyTorch's own."""
    return _asked


def stats() -> dict[str, Any]:
    """See `vramlab.torch.host_stats`."""
    import torch

    if _host is None:
        raise Error("nothing counts pinned memory; call vramlab.torch.watch_host() or use(host=...) first")
    numbers = (ctypes.c_uint64 * 3)()
    _host.check(_host.requested(numbers))
    current, peak, count = numbers
    out = {
        "allocator": _asked or "pytorch",
        "requested_bytes": {"current": current, "peak": peak},
        "requests": count,
    }
    handle = _host.handle()
    if handle:
        functions = library()
        stats = functions.json(functions.stats_json, handle)
        out |= {
            "reserved_bytes": {name: stats[f"reserved_bytes.all.{name}"] for name in ("current", "peak")},
            "settings": functions.json(functions.settings_json, handle)["settings"],
            "stats": stats,
            "calls": functions.json(functions.calls_json, handle),
        }
    else:
        of_torch = torch.cuda.host_memory_stats() if _asked is None else {}
        # PyTorch 2.9 calls the same quantity otherwise.
        key = "reserved_bytes" if "reserved_bytes.peak" in of_torch else "allocated_bytes"
        out["reserved_bytes"] = {name: of_torch.get(f"{key}.{name}", 0) for name in ("current", "peak")}
    return out
