"""Lines over a setting: the time graph (step time against width, with the ratio below) and sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import middle
from vramlab_analysis.plots.bars import nonempty


def width(
    frame: pl.DataFrame,
    *,
    reference: str = "caching",
    value: str = "step_us",
    by: str = "hidden",
    by_label: str = "hidden width",
    title: str = "",
) -> Figure:
    """Step time against width on log axes, one line for each `name`, and below it the ratio to `reference`.

    The bands are the spread of the repeats (`measures.middle`).
    """
    frame = frame.with_columns(pl.col(by).cast(pl.Int64))
    nonempty(frame, "step time against width")
    lines = middle(frame, ["name", by], value).sort("name", by)
    base = lines.filter(pl.col("name") == reference).select(by, base="value")
    if base.is_empty():
        raise AnalysisError(f"no run of {reference} to compare with.")
    figure, (top, below) = style.new(2, 1, height=5.0, sharex=True, height_ratios=[2, 1])
    ends, ratio_ends = [], []
    for name in style.order(lines["name"].to_list()):
        one = lines.filter(pl.col("name") == name)
        colour, mark = style.colour(name), style.marker(name)
        top.plot(one[by], one["value"], color=colour, marker=mark, label=name)
        top.fill_between(one[by], one["low"], one["high"], color=colour, alpha=0.2, linewidth=0)
        until = "" if one[by][-1] == lines[by].max() else f" (to {one[by][-1]})"
        ends.append((float(one["value"][-1]), name + until, colour))
        ratio = one.join(base, on=by).sort(by)
        if name != reference and not ratio.is_empty():
            values = ratio["value"] / ratio["base"]
            below.plot(ratio[by], values, color=colour, marker=mark)
            ratio_ends.append((float(values[-1]), name + until, colour))
    below.axhline(1.0, color=style.colour(reference), linewidth=1.2)
    ratio_ends.append((1.0, reference, style.colour(reference)))
    top.set_xscale("log", base=2)
    style.log_axis(top)
    ticks = sorted(lines[by].unique())
    below.set_xticks(ticks, [f"{tick}" for tick in ticks])
    below.minorticks_off()
    top.set_ylabel("time of one step, µs")
    below.set(ylabel=f"ratio to {reference}", ylim=(0, None), xlabel=by_label)
    top.set_title(title)
    last = float(ticks[-1])
    style.label_right(top, last, ends)
    style.label_right(below, last, ratio_ends, gap=0.11)
    for axes in (top, below):
        style.grid(axes)
    return figure


def sweep(
    frame: pl.DataFrame,
    *,
    by: str,
    by_label: str,
    value: str,
    unit: str,
    series: str,
    scale: float = 1.0,
    title: str = "",
    names: Callable[[object], str] = str,
    colours: dict[str, str] | None = None,
) -> Figure:
    """One setting along the axis in order of appearance, one line for each value of `series`."""
    frame = frame.filter(pl.col(value).is_not_null())
    nonempty(frame, unit)
    figure, axes = style.new()
    _swept(axes, frame, by, value, series, scale=scale, names=names, colours=colours)
    axes.set(xlabel=by_label, ylabel=unit, title=title)
    figure.legend(loc="outside upper right", ncols=4)
    return figure


def sweeps(
    frame: pl.DataFrame,
    *,
    row: str,
    column: str,
    by: str,
    by_label: str,
    value: str,
    unit: str,
    series: str,
    title: str = "",
    colours: dict[str, str] | None = None,
) -> Figure:
    """A `sweep` in a panel for each value of `row` and `column`; the panels of a row share their scale.

    Values stand in the order in which they come; the panels' titles are those of both, such as `hidden 128, pinned`.
    """
    frame = frame.filter(pl.col(value).is_not_null())
    nonempty(frame, unit)
    across = frame[column].unique(maintain_order=True).to_list()
    down = frame[row].unique(maintain_order=True).to_list()
    figure, panels = style.new(len(down), len(across), height=0.8 + 2.1 * len(down), sharey="row", squeeze=False)
    handles_by_label: dict[str, Any] = {}
    for line, one in zip(panels, down, strict=True):
        for axes, other in zip(line, across, strict=True):
            part = frame.filter((pl.col(row) == one) & (pl.col(column) == other))
            nonempty(part, f"{unit} with {row} {one} and {column} {other}")
            _swept(axes, part, by, value, series, colours=colours)
            axes.set_title(f"{row.replace('_', ' ')} {one}, {other}", fontsize=9)
            handles_by_label |= {label: mark for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        line[0].set_ylabel(unit)
    for axes in panels[-1]:
        axes.set_xlabel(by_label)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.legend(handles_by_label.values(), handles_by_label.keys(), loc="outside lower center", ncols=5)
    return figure


def _swept(
    axes: Axes,
    frame: pl.DataFrame,
    by: str,
    value: str,
    series: str,
    *,
    scale: float = 1.0,
    names: Callable[[object], str] = str,
    colours: dict[str, str] | None = None,
) -> None:
    places = {one: place for place, one in enumerate(frame[by].unique(maintain_order=True).to_list())}
    lines = middle(frame, [series, by], value)
    tints = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.SKY)
    marks = "osD^vP"
    for number, who in enumerate(lines[series].unique(maintain_order=True).to_list()):
        one = lines.filter(pl.col(series) == who)
        at = np.array([places[place] for place in one[by]])
        order = np.argsort(at)
        centre = one["value"].to_numpy()[order] * scale
        low, high = one["low"].to_numpy()[order] * scale, one["high"].to_numpy()[order] * scale
        colour = (colours or {}).get(str(who)) or style.ALLOCATORS.get(str(who)) or tints[number % len(tints)]
        axes.errorbar(
            at[order],
            centre,
            yerr=[centre - low, high - centre],
            color=colour,
            marker=marks[number % len(marks)],
            capsize=2.5,
            label=str(who),
        )
    axes.set_xticks(list(places.values()), [names(place) for place in places])
    axes.set_ylim(0, max(1.06 * scale * float(lines["high"].max() or 0), axes.get_ylim()[1]))  # type: ignore[arg-type]
    style.grid(axes)
