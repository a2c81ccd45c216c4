"""Stand-ins for PyTorch's C++ functions."""

from __future__ import annotations

import json
import lzma
import os
import pickle
from collections.abc import Callable
from typing import Any

# Every call that changes state, in order.
calls: list[list[Any]] = []
history = False
observers: list[Callable[..., None]] = []
device = 0


def note(*call: Any) -> None:
    calls.append(list(call))
    if path := os.environ.get("FAKE_CALLS"):
        with open(path, "a") as file:
            file.write(json.dumps([os.getpid(), *call]) + "\n")


def _cuda_isHistoryEnabled() -> bool:
    return history


def _cuda_attach_out_of_memory_observer(observer: Callable[..., None]) -> None:
    observers.append(observer)


def _cuda_getDevice() -> int:
    return device


def _cuda_setDevice(index: int) -> None:
    global device
    device = index


def snapshot() -> Any:
    """The snapshot of a file, or an empty one."""
    if os.environ.get("FAKE_SNAPSHOT_FAILS"):
        raise RuntimeError("no snapshot today")
    path = os.environ.get("FAKE_SNAPSHOT")
    if not path:
        return {"segments": [], "device_traces": [[]]}
    with (lzma.open if path.endswith(".xz") else open)(path, "rb") as file:
        return pickle.load(file)
