"""Functions that all notebooks use: reading results, and showing figures, sentences and verdicts.

A sentence in a notebook takes its numbers from the data of the cell, so new records change the sentence as well as the
figure above it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import polars as pl
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from vramlab_analysis import measures, style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import Experiment, results
from vramlab_analysis.measures import Interval
from vramlab_analysis.pages.registry import markdown
from vramlab_analysis.plots import bars
from vramlab_analysis.plots.cells import matrix as cells_of

# The recorded results that are drawn, the GPU's first. DEVICES=sim reads only simulated results.
DEVICES = os.environ.get("DEVICES", "gpu,sim").split(",")
# Colours and signs of verdicts.
MARKS = {"Refuted": ("#c81e1e", "🔴"), "Not decided": ("#9a6700", "🟡"), "Confirmed": ("#1a7f37", "🟢")}


def complete(spec: str, device: str) -> Experiment:
    """The results of a spec on `gpu` or `sim`.

    Raises AnalysisError when some are missing, so that no figure lacks a part unnoticed.
    """
    experiment = results(spec, device)
    if missing := experiment.missing():
        reasons = [entry.meta.get("error") for entry in experiment.runs if entry.id == missing[0]]
        reason = f" ({reasons[0]})" if any(reasons) else ""
        raise AnalysisError(
            f"{experiment.directories[0]}: {len(missing)} of the planned runs are missing or failed, such as "
            f"{missing[0]}{reason}; `experiments run {spec}` continues it."
        )
    return experiment


def each(spec: str) -> list[tuple[str, Experiment]]:
    """The results of a spec on every device, as (device in words, experiment); see `complete`."""
    return [(experiment.machine, experiment) for experiment in (complete(spec, device) for device in DEVICES)]


def show(figure: Figure) -> None:
    """Shows a figure, as PNG of the same bytes each time."""
    display(Image(data=style.png(figure, dpi=100)))  # type: ignore[no-untyped-call]


def say(*sentences: str) -> None:
    """Shows a paragraph of Markdown."""
    display(Markdown(" ".join(sentence.strip() for sentence in sentences)))  # type: ignore[no-untyped-call]


def rows(head: Sequence[str], body: Iterable[Sequence[Any]]) -> None:
    """Shows a table. Numbers are texts with their units."""
    display(Markdown(markdown(head, (map(str, row) for row in body))))  # type: ignore[no-untyped-call]


def verdict(
    statement: str,
    figures: Mapping[str, float | Interval],
    *,
    least: float = -math.inf,
    most: float = math.inf,
    number: Callable[[float], str] = lambda value: f"{value:g}",
) -> None:
    """Shows whether values confirm a statement: each is at least `least` and at most `most`.

    `figures` has the values by the names of their cells. A refuted statement is red, with the value farthest outside.
    Measured values have intervals: a statement is refuted if a whole interval is outside, confirmed if all are inside,
    and otherwise not decided, which is yellow.

    Raises AnalysisError without values, because then nothing was tested.
    """
    known = {name: _interval(value) for name, value in figures.items() if value is not None}
    known = {name: one for name, one in known.items() if not math.isnan(one.value)}
    if not known or len(known) < len(figures):
        raise AnalysisError(f"'{statement}': {len(figures) - len(known)} of its {len(figures)} values are missing.")
    bounds = [f"at least {number(least)}"] if least > -math.inf else []
    bounds += [f"at most {number(most)}"] if most < math.inf else []
    refuted = {name: max(one.low - most, least - one.high) for name, one in known.items()}
    refuted = {name: by for name, by in refuted.items() if by > 0}
    across = {name: one.high - one.low for name, one in known.items() if not least <= one.low <= one.high <= most}
    inside = {name: max(one.value - most, least - one.value) for name, one in known.items()}
    if refuted:
        word, among, count = "Refuted", refuted, f"{len(refuted)} of {len(known)} outside; farthest"
    elif across:
        word, among, count = (
            "Not decided",
            across,
            f"{len(across)} of {len(known)} have intervals across a bound; widest",
        )
    else:
        word, among, count = "Confirmed", inside, f"{len(known)} values; nearest to the bound"
    colour, mark = MARKS[word]
    name = max(among, key=among.__getitem__)
    one = known[name]
    shown, low, high = map(number, (one.value, one.low, one.high))
    shown += f" ({low} to {high})" if low != high else ""
    shown = f"{count} {shown}, {name}" if len(known) > 1 else f"{shown}, {name}"
    text = f"{mark} **{word}:** {statement} ({' and '.join(bounds)}). {shown}."
    display(Markdown(f'<span style="color:{colour}">{text}</span>'))  # type: ignore[no-untyped-call]


def _interval(value: float | Interval) -> Interval:
    """A value with its interval, which is the value itself where it has none."""
    return value if isinstance(value, Interval) else Interval(value, value, value)


def matrices(frames: Mapping[str, pl.DataFrame], *, title: str, **drawing: Any) -> None:
    """Draws a `cells.matrix` for each device, except those that equal the first in every cell."""
    keys, number = [drawing["row"], drawing["column"]], drawing["number"]
    shown: list[list[tuple[Any, ...]]] = []
    for device, frame in frames.items():
        cells = frame.select(*keys, pl.col(drawing["value"]).map_elements(number, pl.String)).sort(keys).rows()
        shown.append(cells)
        if cells == shown[0] and len(shown) > 1:
            say(f"**{device}: {title}.** All cells equal those above.")
        else:
            show(cells_of(frame, title=f"{device}: {title}", **drawing))


def tables(head: Sequence[str], bodies: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    """Shows a table for each device; after the first only the rows that differ from it."""
    first = next(iter(bodies.values()))
    for device, body in bodies.items():
        unlike = body if body is first else [row for row in body if row not in first]
        note = "." if body is first else ", rows that differ." if unlike else ": all rows are equal."
        say(f"**{device}**{note}")
        if unlike:
            rows(head, unlike)


def us(microseconds: float) -> str:
    """A time in microseconds, shown in the unit that fits."""
    return style.si_time(1e3 * microseconds)


def spread(frame: pl.DataFrame, value: str, **where: Any) -> str:
    """Median of times in microseconds over the rows where columns have these values, with `measures.spread`."""
    middle = us(bars.value_of(frame, value, **where))
    chosen = frame.filter([pl.col(column) == expected for column, expected in where.items()])[value]
    low, high = map(us, measures.spread(chosen))
    return middle if low == high else f"{middle} ({low} to {high})"


def percent(share: float, digits: int = 0) -> str:
    """A share as a percentage."""
    return f"{100 * share:.{digits}f} %"


def change(now: float, before: float) -> str:
    """The change from `before` to `now` in words: `12 % more`."""
    share = now / before - 1
    return "as much" if abs(share) < 0.005 else f"{abs(share) * 100:.0f} % {'more' if share > 0 else 'less'}"
