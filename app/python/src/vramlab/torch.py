"""Replaces PyTorch's allocator by one of libvramlab; PyTorch's statistics, snapshots, graphs and MemPools still work.

    import torch, vramlab.torch
    vramlab.torch.use("remap")  # before CUDA is used

Set VRAMLAB_ALLOC=remap for a program that cannot be changed, and start it by `vramlab run` or with the start hook.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from types import TracebackType
from typing import Any

import torch

from vramlab import _build, _pinned
from vramlab._library import NO_LIMIT, Error, library, spec

__all__ = [
    "MemPool",
    "allocator",
    "host_allocator",
    "host_stats",
    "latency",
    "set_limit",
    "stats",
    "use",
    "watch_host",
]

_lock = threading.Lock()


class _Shim:
    """The loaded and installed shim."""

    def __init__(self, spec: str, file: str, latency: bool) -> None:
        self.spec = spec
        self.latency = latency
        # RTLD_GLOBAL, for exceptions between the shim's C++ and PyTorch's.
        self.functions = ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
        for name, result, arguments in (
            ("error", ctypes.c_char_p, []),
            ("install", ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p]),
            ("set_limit", ctypes.c_int, [ctypes.c_uint64]),
            ("latency", ctypes.c_int, [ctypes.c_bool]),
            ("allocator", ctypes.c_void_p, [ctypes.c_int]),
            ("pool", ctypes.c_void_p, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p]),
        ):
            function: Any = getattr(self.functions, f"vramlab_shim_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name if name != "latency" else "set_latency", function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def error_text(self) -> str:
        """The message of the last failed call."""
        return str(self.error().decode(errors="replace"))


_shim: _Shim | None = None


def use(
    allocator: str | None = None,
    *,
    host: str | None = None,
    limit: int | None = None,
    latency: bool = False,
    **settings: Any,
) -> None:
    """Serves PyTorch's memory from now on: CUDA memory from `allocator`, pinned memory of the host from `host`.

    One that is not named stays PyTorch's own; without both, CUDA memory is served by caching. Call it before CUDA is
    used. Pinned memory may be in use: its blocks stay PyTorch's. `host` is the name of an allocator of pinned memory
    with its settings, such as "host-exact"; see [`host_stats`]. The other arguments are about CUDA memory.

    `allocator` is NAME or NAME:key=value,…, and settings may be given as keywords. `limit` is the limit on reserved
    bytes per GPU. `latency` times every call, for [`stats`]. Settings in PYTORCH_CUDA_ALLOC_CONF apply if the allocator
    has them; a warning lists the others.

    The first call for a version of PyTorch compiles the shim, which takes some ten seconds. A second call with the
    same allocator does nothing. Raises [`vramlab.Error`] if CUDA is in use, another allocator is installed, the name
    or a setting is unknown, or the shim cannot be built.
    """
    with _lock:
        if host is not None:
            if allocator is None and (settings or limit is not None or latency):
                raise Error(
                    "a limit, latency and settings are of CUDA memory; name its allocator, too: use('caching', ...)"
                )
            # Before anything is installed.
            library().known_on(host, "host:cuda")
        if allocator is not None or host is None:
            _use_on_gpus(spec(allocator or "caching", settings), limit, latency)
        if host is not None:
            _pinned.install(host)


def _use_on_gpus(asked: str, limit: int | None, latency: bool) -> None:
    global _shim
    _check_limit(limit)
    if _shim is not None and asked in (_shim.spec, _shim.spec.partition(":")[0]):
        if limit is not None:
            _set_limit(_shim, limit)
        return
    if _shim is not None:
        raise Error(
            f"PyTorch runs under {_shim.spec} already, and cannot change to {asked}: blocks of both would mix. Use "
            "one allocator a process, or vramlab.torch.MemPool for a part of it"
        )
    if torch.cuda.is_initialized():
        raise Error(
            "CUDA is in use already, under PyTorch's own allocator. Call vramlab.torch.use() before the first use "
            f"of CUDA, or start the program with VRAMLAB_ALLOC={asked}"
        )
    conf, ignored = _from_conf(asked, limit)
    file = _build.shim(_build.Torch.installed())
    made = _Shim(spec(asked, conf), str(file), latency)
    options = ",".join([f"limit={limit}"] * (limit is not None) + [f"latency={int(latency)}"])
    if made.install(os.fsencode(library().path), made.spec.encode(), options.encode()) != 0:
        raise Error(made.error_text())
    if ignored:
        text = f"vramlab: of PyTorch's settings {asked} does not have {', '.join(ignored)}; they do nothing"
        warnings.warn(text, stacklevel=3)
    _tell_of_changes(asked)
    # The requested name: a second call requests the same one.
    made.spec = asked
    _shim = made


def _installed() -> _Shim:
    if _shim is None:
        raise Error("PyTorch runs under its own allocator; call vramlab.torch.use() before CUDA is used")
    return _shim


def allocator() -> str | None:
    """The allocator that PyTorch uses, by its requested name; None for PyTorch's own."""
    return None if _shim is None else _shim.spec


def host_allocator() -> str | None:
    """The allocator of PyTorch's pinned host memory, by its requested name; None for PyTorch's own."""
    return _pinned.allocator()


def watch_host() -> None:
    """Counts the pinned memory that is requested of PyTorch's own allocator from now on, for [`host_stats`].

    PyTorch's statistics count blocks, whose sizes are rounded. No decision of the allocator changes. Does nothing under
    an allocator of vramlab.
    """
    _pinned.watch()


def host_stats() -> dict[str, Any]:
    """Pinned host memory of this process, after `use(host=...)` or [`watch_host`].

    `allocator` ("pytorch" for PyTorch's own), `requested_bytes` (what the program holds, before rounding) and
    `reserved_bytes` (what is pinned), each `current` and `peak`, and the number of `requests`. Of an allocator of
    vramlab also its `settings`, `stats` and driver `calls`. `torch.cuda.reset_peak_host_memory_stats()` resets the
    peaks.
    """
    return _pinned.stats()


def set_limit(limit: int | None) -> None:
    """Sets or removes the limit on reserved bytes per GPU. The program's own memory fraction applies if it is lower."""
    _set_limit(_installed(), limit)


def _check_limit(limit: int | None) -> None:
    if limit is not None and not (isinstance(limit, int) and 0 <= limit < NO_LIMIT):
        raise Error(f"a limit of {limit!r}: write a number of bytes, or None")


def _set_limit(shim: _Shim, limit: int | None) -> None:
    _check_limit(limit)
    if shim.set_limit(NO_LIMIT if limit is None else limit) != 0:
        raise Error(shim.error_text())


def latency(on: bool = True) -> None:
    """Starts or stops timing every allocation and free; [`stats`] contains the times."""
    shim = _installed()
    if shim.set_latency(on) != 0:
        raise Error(shim.error_text())


def stats(device: int | None = None) -> dict[str, Any]:
    """Statistics that PyTorch does not have, of one GPU, or of each GPU in use by its number as text.

    Per GPU: `allocator`, the `settings` in effect, `stats` (PyTorch's keys and additional ones, such as moved pages),
    driver `calls` by kind, and with [`latency`] percentiles in nanoseconds by operation and path. `pages` has the
    properties of memory mapped in pages: whether other processes can map it by `file_descriptors` or `fabric` handles,
    whether network adapters can use it (`rdma`), and its `granularity` in bytes.
    """
    shim, functions = _installed(), library()
    if device is not None:
        handle = shim.allocator(device)
        if not handle:
            raise Error(shim.error_text() or f"no memory was asked for on cuda:{device} yet")
        return _stats_of(functions, handle)
    if not torch.cuda.is_initialized():
        return {}
    handles = {str(index): shim.allocator(index) for index in range(torch.cuda.device_count())}
    return {index: _stats_of(functions, handle) for index, handle in handles.items() if handle}


def _stats_of(functions: Any, handle: int) -> dict[str, Any]:
    told = functions.json(functions.settings_json, handle)
    return {
        "allocator": told["allocator"],
        "settings": told["settings"],
        "stats": functions.json(functions.stats_json, handle),
        "calls": functions.json(functions.calls_json, handle),
        "latency": functions.json(functions.latency_json, handle),
        "pages": functions.json(functions.sharing_json, handle)["pages"],
    }


class MemPool(torch.cuda.MemPool):  # type: ignore[misc]
    """A pool with its own allocator, for a part of a program.

        pool = vramlab.torch.MemPool("rmm-pool")
        with pool:
            x = torch.empty(1 << 20, device="cuda")

    It is a `torch.cuda.MemPool`, so `torch.cuda.use_mem_pool` accepts it. It belongs to the GPU that is current when it
    is created. The rest of the program must use an allocator of vramlab, for example `use("caching")`. A tensor may
    outlive its pool.
    """

    def __init__(self, allocator: str = "caching", **settings: Any) -> None:
        """Creates the pool; `allocator` and settings are as for [`use`]."""
        shim = _installed()
        asked = spec(allocator, settings)
        library().known(asked)
        super().__init__()
        self._device = torch.cuda.current_device()
        self._contexts: list[Any] = []
        first, second = self.id
        self._handle = shim.pool(self._device, first, second, asked.encode())
        if not self._handle:
            raise Error(shim.error_text())

    def __enter__(self) -> MemPool:
        """Serves this thread's requests from the pool."""
        context = torch.cuda.use_mem_pool(self, self._device)
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Serves them from the previous pool again."""
        self._contexts.pop().__exit__(kind, error, trace)

    def stats(self) -> dict[str, Any]:
        """Statistics of the pool's allocator, in the form of [`stats`] of one GPU."""
        return _stats_of(library(), self._handle)


# --- PyTorch's settings ---


def _from_conf(asked: str, limit: int | None) -> tuple[dict[str, str], list[str]]:
    """The allocator's settings inferred from PyTorch's, and the keys that it ignores; raises if it is unknown."""
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    conf = library().torch_conf(asked, text, limit)
    return conf["settings"], conf["ignored"]


def _tell_of_changes(asked: str) -> None:
    """Makes PyTorch's call that changes settings warn about changes that the running allocator does not apply."""
    change = torch._C._accelerator_setAllocatorSettings

    def tell_and_change(env: str) -> None:
        change(env)
        try:
            fixed = library().torch_conf(asked, env)["fixed"]
        except Error as error:
            # PyTorch accepted the text, so it may have a form that the library does not know yet.
            warnings.warn(f"vramlab: {asked} keeps the settings that it began with: {error}", stacklevel=2)
            return
        if fixed:
            text = f"vramlab: {asked} keeps the settings that it began with; {', '.join(fixed)} did not change"
            warnings.warn(text, stacklevel=2)

    torch._C._accelerator_setAllocatorSettings = tell_and_change
