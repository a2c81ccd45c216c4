"""Four GPUs: measured steps beside those that the model of more ranks predicts from two."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import Entry, results
from vramlab_analysis.pages.cells import origin, span
from vramlab_analysis.pages.ranks import MICRO, largest_of_ranks
from vramlab_analysis.pages.registry import group, markdown, table

SPEC = "ranks-4"
# Rows by arm and allocator of the spec, with the allocator and the ranks that the model names.
ROWS = {
    ("allocators", "caching"): ("`caching`", "caching", "all"),
    ("mixed", "caching"): ("`naive` on one rank, `caching` on three", "naive", "one"),
    ("allocators", "naive"): ("`naive`", "naive", "all"),
}

Cell = tuple[list[float], float]


@cache
def _plans() -> list[dict[str, Any]]:
    """The model's steps of four ranks, from the newest record of two. Raises AnalysisError if the program fails."""
    program = repository.built("experiments") or shutil.which("experiments")
    two = results("ranks", "gpu").directories[0]
    if program is None:
        raise AnalysisError("experiments is not built: cargo build -p experiments")
    done = subprocess.run(
        [program, "simulate-ranks", two, "--ranks", "4", "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AnalysisError(f"{two}: no prediction: {done.stderr.strip()}")
    plans: list[dict[str, Any]] = json.loads(done.stdout)["plans"]
    return plans


def _predicted(entry: Entry, alloc: str, on: str) -> float:
    """The model's step of a measured run, in microseconds. Raises AnalysisError without one."""
    sizes, hidden = entry.record.summary["communication"]["bucket_bytes"], str(entry.options["hidden"])
    for plan in _plans():
        of = plan["configuration"]
        same = (of["hidden"], of["bucket_bytes"], of["buffers"], of["launch"]) == (hidden, sizes, "kept", "eager")
        if same and of["overlap"] and (plan["alloc"], plan["on"], plan["measured_ranks"]) == (alloc, on, 2):
            return float(MICRO * plan["step_s"])
    raise AnalysisError(f"the record of two ranks has no step of width {hidden} under {alloc} on {on}.")


@cache
def _cells() -> dict[str, dict[int, Cell]]:
    """By row and width: the steps of the runs and the predicted one, in microseconds."""
    runs = [entry for entry in results(SPEC, "gpu").runs if entry.done]
    out: dict[str, dict[int, Cell]] = {}
    for (arm, alloc), (title, other, on) in ROWS.items():
        for width in sorted({int(entry.options["hidden"]) for entry in runs}):
            found = [
                entry
                for entry in runs
                if (entry.arm, entry.options["alloc"], int(entry.options["hidden"])) == (arm, alloc, width)
            ]
            if found:
                times = largest_of_ranks(found, "step_s")
                out.setdefault(title, {})[width] = (times, _predicted(found[0], other, on))
    return out


def _ratios(titles: list[str]) -> dict[str, float]:
    found = [predicted / median(times) for title in titles for times, predicted in _cells()[title].values()]
    return {"least": min(found), "most": max(found)}


@group(SPEC)
def values() -> Mapping[str, Any]:
    """Predicted over measured steps: `pooled` where at most one rank has `naive`, `naive` where all have it; counts."""
    titles = [title for title, *_ in ROWS.values()]
    counts = [len(times) for widths in _cells().values() for times, _ in widths.values()]
    return {
        "pooled": _ratios(titles[:2]),
        "naive": _ratios(titles[2:]),
        "runs": span(counts),
        "origin": origin(SPEC),
    }


@table(SPEC)
def steps() -> str:
    """The step of the rank that takes longest with its range, and the predicted one, by allocators and width."""
    widths = sorted({width for found in _cells().values() for width in found})
    body = []
    for title, found in _cells().items():
        cells = []
        for width in widths:
            times, predicted = found[width]
            cells.append(f"{median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f}); {predicted:,.0f}")
        body.append([title, *cells])
    return markdown(["µs a step; predicted", *(f"width {width:,}" for width in widths)], body)
