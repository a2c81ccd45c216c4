"""CUDA is in use from the first call of `init` on, as in PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import _C
from torch.cuda import memory  # noqa: F401

_queued: list[Callable[[], None]] = []
_initialized = False
TOTAL = 80 << 30
GPUS = int(os.environ.get("FAKE_GPUS", "2"))


def is_initialized() -> bool:
    return _initialized


def _lazy_call(call: Callable[[], None]) -> None:
    if _initialized:
        call()
    else:
        _queued.append(call)


def init() -> None:
    global _initialized
    if not _initialized:
        for call in _queued:
            call()
        _initialized = True
        _C.note("init")


def device_count() -> int:
    return GPUS


def set_device(index: int) -> None:
    init()
    _C._cuda_setDevice(index)


def get_device_properties(index: int) -> Any:
    return SimpleNamespace(total_memory=TOTAL, uuid=f"0000000{index}-0000-0000-0000-000000000000")


def set_per_process_memory_fraction(fraction: float, index: int) -> None:
    _C.note("fraction", fraction, index)
    # The device stays selected, as in PyTorch.
    _C._cuda_setDevice(index)


def memory_stats(index: int) -> dict[str, int]:
    if index != _C._cuda_getDevice():
        return {}
    return {
        "reserved_bytes.all.peak": 300 << 20,
        "active_bytes.all.peak": 200 << 20,
        "requested_bytes.all.peak": 190 << 20,
        "num_device_alloc": 12,
        "num_device_free": 2,
        "num_alloc_retries": 0,
        "num_ooms": len([call for call in _C.calls if call[0] == "out of memory"]),
    }


def host_memory_stats() -> dict[str, int]:
    return {"allocated_bytes.current": 0, "allocated_bytes.peak": 64 << 20}


class OutOfMemoryError(RuntimeError):
    pass


def run_out_of_memory() -> None:
    """Simulates an out-of-memory error."""
    _C.note("out of memory")
    for observer in _C.observers:
        observer(0, 1 << 30, 2 << 30, 3 << 20)
    raise OutOfMemoryError("CUDA out of memory")
