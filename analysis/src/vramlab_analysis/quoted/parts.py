"""What the computed sentences share: cells of recorded specs, and how figures are worded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl

from vramlab_analysis import steps
from vramlab_analysis.experiments import results
from vramlab_analysis.measures import middle

Cell = dict[str, Any]


def cells(spec: str, by: list[str], value: str = "step_us", **where: Any) -> dict[tuple[Any, ...], Cell]:
    """Median, spread and number of the repeats of each cell on the GPU, by its values of `by`."""
    rows = middle(results(spec, "gpu").frame(**where), by, value).iter_rows(named=True)
    return {tuple(row[name] for name in by): row for row in rows}


def span(cell: Cell) -> str:
    """The spread of a cell."""
    low, high = f"{cell['low']:.0f}", f"{cell['high']:.0f}"
    return low if low == high else f"{low} to {high}"


def runs(told: Iterable[Cell]) -> str:
    """Of how many runs each of some cells is."""
    return each(cell["repeats"] for cell in told)


def each(counts: Iterable[int]) -> str:
    """So many runs each, in words."""
    words = {1: "one run each", 2: "two runs each", 3: "three runs each"}
    least, *more = sorted(set(counts))
    return f"{least} to {more[-1]} runs each" if more else words.get(least, f"{least} runs each")


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def table(spec: str) -> pl.DataFrame:
    """The table of step times of a spec on the GPU."""
    entries = [one for one in results(spec, "gpu").runs if one.done and one.meta["program"] in ("trainer", "pytorch")]
    return steps.frame([entry.record for entry in entries])


def dates(texts: Iterable[str]) -> str:
    """The first and the last day of some dates and times."""
    days = sorted({text[:10] for text in texts})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
