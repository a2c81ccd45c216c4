"""What the computed sentences share: cells of recorded specs, and how figures are worded.

Figures of fewer than five runs come with all that these runs say: the least and the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from vramlab_analysis import steps
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import results
from vramlab_analysis.measures import middle
from vramlab_analysis.repository import results as folder

# Where most specs were recorded.
H200 = "2026-11-21-h200"
Cell = dict[str, Any]


def cells(spec: str, by: list[str], value: str = "step_us", **where: Any) -> dict[tuple[Any, ...], Cell]:
    """Median, least, most and number of the repeats of each cell on the H200, by its values of `by`."""
    rows = middle(results(spec, "h200").frame(**where), by, value).iter_rows(named=True)
    return {tuple(row[name] for name in by): row for row in rows}


def span(cell: Cell) -> str:
    """The least and the most of a cell."""
    low, high = f"{cell['low']:.0f}", f"{cell['high']:.0f}"
    return low if low == high else f"{low} to {high}"


def runs(told: Iterable[Cell]) -> str:
    """Of how many runs each of some cells is."""
    counts = {cell["repeats"] for cell in told}
    words = {1: "one run each", 2: "two runs each", 3: "three runs each"}
    if len(counts) > 1:
        return f"{min(counts)} to {max(counts)} runs each"
    only = counts.pop()
    return words.get(only, f"{only} runs each")


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def table(spec: str) -> pl.DataFrame:
    """The table of step times of a spec on the H200."""
    entries = [one for one in results(spec, "h200").runs if one.done and one.meta["program"] in ("trainer", "pytorch")]
    return steps.frame([entry.record for entry in entries])


def newest(name: str, device: str = "h200") -> Path:
    """The newest record of that name that is not of a spec.

    Raises AnalysisError when there is none.
    """
    there = sorted(folder().glob(f"*-{device}/{name}"))
    if not there:
        raise AnalysisError(f"{folder()}: no {name} in the results of {device}.")
    return there[-1]


def dates(texts: Iterable[str]) -> str:
    """The first and the last day of some dates and times."""
    days = sorted({text[:10] for text in texts})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
