"""History and snapshots."""

from __future__ import annotations

from typing import Any

from torch import _C


def _record_memory_history(enabled: str | None = "all", **options: Any) -> None:
    _C.history = enabled is not None
    _C.note("history", enabled, options)


def _snapshot() -> Any:
    return _C.snapshot()
