"""Cells of recorded specs on the GPU, and dates in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl

from vramlab_analysis import steps
from vramlab_analysis.experiments import results
from vramlab_analysis.measures import middle

Cell = dict[str, Any]


def cells(spec: str, by: list[str], value: str = "step_us", **where: Any) -> dict[tuple[Any, ...], Cell]:
    """Median, spread and number of the repeats of each cell, by its values of `by`."""
    rows = middle(results(spec, "gpu").frame(**where), by, value).iter_rows(named=True)
    return {tuple(row[name] for name in by): row for row in rows}


def build(provenance: dict[str, Any] | None) -> str:
    """The build of a record: a short commit, with `-dirty` if the sources differed from it."""
    known = provenance or {}
    commit = str(known.get("git_commit") or "unknown")[:8]
    return f"{commit}-dirty" if known.get("git_dirty") else commit


def origin(spec: str) -> str:
    """Where a spec's runs on a GPU are from, in words: the GPU, the builds and the days."""
    experiment = results(spec, "gpu")
    done = [entry.meta for entry in experiment.runs if entry.done]
    builds = listed(sorted({build(meta.get("provenance")) for meta in done}))
    days = dates(str(meta.get("started_at") or experiment.document["started_at"]) for meta in done)
    return f"{experiment.machine}, build {builds}, {days}"


def span(numbers: Iterable[float]) -> str:
    """The least and the greatest of some numbers: `3 to 5`."""
    least, *more = sorted(set(numbers))
    return f"{least:,g} to {more[-1]:,g}" if more else f"{least:,g}"


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def step_table(spec: str) -> pl.DataFrame:
    """The table of step times of a spec."""
    entries = [run for run in results(spec, "gpu").runs if run.done and run.meta["program"] in ("trainer", "pytorch")]
    return steps.frame([entry.record for entry in entries])


def dates(texts: Iterable[str]) -> str:
    """The first and the last day of some dates and times."""
    days = sorted({text[:10] for text in texts})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def us(value: float) -> str:
    """Microseconds without their unit, in three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
