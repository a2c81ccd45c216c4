"""Buckets of gradients on several GPUs: lifetimes, streams, sources and registration, from the spec `ranks-buffers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from statistics import median
from typing import Any

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import Entry, results
from vramlab_analysis.pages.cells import origin, span
from vramlab_analysis.pages.registry import group, markdown, table

MICRO = 1e6
MIB = 2**20
# Options that tell the cells of an arm apart, in the order of a cell's name.
NAMED_BY = {
    "streams": ("comm-streams", "buffers"),
    "registered": ("bucket-source", "register", "launch"),
    "shared": ("alloc",),
}
PEAKS = ("reserved", "active", "pending")


@cache
def _cells() -> dict[tuple[str, ...], list[Entry]]:
    """Finished runs by arm and options. Raises AnalysisError without one."""
    cells: dict[tuple[str, ...], list[Entry]] = {}
    for entry in results("ranks-buffers", "gpu").runs:
        if entry.done:
            name = (entry.arm, *(str(entry.options[option]) for option in NAMED_BY[entry.arm]))
            cells.setdefault(name, []).append(entry)
    if not cells:
        raise AnalysisError("experiments/results: the newest experiment `ranks-buffers` has no finished run.")
    return cells


def _words(name: tuple[str, ...]) -> str:
    """The options of a cell in words."""
    arm, *values = name
    if arm == "shared":
        return f"`{values[0]}`, open to peers, registered"
    return f"`{' '.join(f'--{option} {value}' for option, value in zip(NAMED_BY[arm], values, strict=True))}`"


def _of_ranks(entries: Iterable[Entry], name: str) -> list[float]:
    """The largest value of the ranks, for each run."""
    return [max(rank[name] for rank in entry.record.summary["ranks"]) for entry in entries]


def _steps(entries: Iterable[Entry]) -> list[float]:
    """The step of the slower rank in microseconds, for each run."""
    return [MICRO * step for step in _of_ranks(entries, "step_s")]


def _peaks(entries: list[Entry]) -> dict[str, float]:
    """Peaks of the ranks of all runs in MiB."""
    return {name: max(_of_ranks(entries, f"peak_{name}_bytes")) / MIB for name in PEAKS}


@group("ranks-buffers")
def values() -> Mapping[str, Any]:
    """By arm and options: the slower rank's median step in microseconds and peaks in MiB; counts of runs."""
    found: dict[str, Any] = {}
    for name, entries in _cells().items():
        cell = found
        for part in name:
            cell = cell.setdefault(part, {})
        cell |= {"step": median(_steps(entries))} | _peaks(entries)
    counts = [len(entries) for entries in _cells().values()]
    return found | {
        "runs": span(counts),
        "origin": origin("ranks-buffers"),
    }


@table("ranks-buffers")
def buffers() -> str:
    """By streams, lifetime, source and registration: the slower rank's step, peaks of active and pending memory."""
    body = []
    for name, entries in _cells().items():
        steps = _steps(entries)
        shown = f"{median(steps):,.0f} ({span(round(step) for step in steps)})"
        body.append([_words(name), shown, *(f"{peak:,.1f}" for peak in _peaks(entries).values())])
    head = ["", "µs a step, the slower rank", "reserved, MiB", "active, MiB", "pending, MiB"]
    return markdown(head, body)
