"""Bars with the spread of repeats: step times, epoch times, sweeps of one setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import spread
from vramlab_analysis.records import Run


def nonempty(frame: pl.DataFrame, what: str) -> None:
    """Raises AnalysisError if there are no data to draw."""
    if frame.is_empty():
        raise AnalysisError(f"no data for the figure of {what}.")


def grouped(
    frame: pl.DataFrame,
    *,
    value: str,
    unit: str,
    group: str | None = None,
    name: str = "name",
    scale: float = 1.0,
    title: str = "",
    group_label: str = "",
    name_label: str = "allocator",
    number: Callable[[float], str] = lambda v: f"{v:.3g}",
    log: bool = False,
    width: float = 8.0,
    height: float = 3.2,
) -> Figure:
    """Bars of the median of `value` for each `name` (an allocator, which selects the colour), in groups along the axis.

    Whiskers are the spread of the repeats. `frame` has one row for each run; `group` is a column whose values stand
    side by side in the order in which they come.
    """
    frame = frame.filter(pl.col(value).is_not_null())
    nonempty(frame, unit)
    names = style.order(frame[name].to_list())
    groups = frame[group].unique(maintain_order=True).to_list() if group else [None]
    figure, axes = style.new(width=width, height=height)
    thick = 0.8 / len(names)
    # The width of a bar in points, for its number.
    room = 72 * (width - 0.8) * thick / len(groups) / 0.64
    labelled: set[str] = set()
    for place, one in enumerate(groups):
        for index, who in enumerate(names):
            chosen = frame.filter((pl.col(name) == who) & (pl.col(group) == one if group else pl.lit(value=True)))
            if chosen.is_empty():
                continue
            samples = chosen[value] * scale
            centre, (low, high) = float(samples.median()), spread(samples)  # type: ignore[arg-type]
            at = place + (index - (len(names) - 1) / 2) * thick
            axes.bar(
                at, centre, thick * 0.92, color=style.colour(who), label=who if who not in labelled and group else None
            )
            labelled.add(who)
            if len(samples) > 1:
                axes.errorbar(
                    at, centre, yerr=[[centre - low], [high - centre]], color=style.INK, linewidth=0.9, capsize=2.5
                )
            axes.annotate(
                number(centre),
                (at, high),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=min(7.0, max(5.0, room / max(len(number(centre)), 1))),
            )
    if group:
        axes.set_xticks(range(len(groups)), [str(group) for group in groups])
        axes.set_xlabel(group_label or group.replace("_", " "))
        if len(labelled) > 1:
            figure.legend(loc="outside upper right", ncols=len(labelled))
    else:
        offsets = [(index - (len(names) - 1) / 2) * thick for index in range(len(names))]
        axes.set_xticks(offsets, names)
        axes.set(xlim=(-0.5, 0.5), xlabel=name_label)
    if log:
        style.log_axis(axes)
    axes.margins(y=0.12)
    axes.set(ylabel=unit, title=title)
    style.grid(axes)
    return figure


def stacked(
    rows: list[tuple[str, dict[str, float]]],
    parts: dict[str, str],
    *,
    unit: str,
    title: str = "",
    total: Callable[[float], str] | None = None,
    words: dict[str, str] | None = None,
    scale: Callable[[float, int | None], str] | None = None,
) -> Figure:
    """Horizontal bars that are divided into `parts` (name to colour); `words` has other names for the legend."""
    if not rows:
        raise AnalysisError(f"no data for the figure of {unit}.")
    figure, axes = style.new(height=1.25 + 0.42 * len(rows))
    labels = []
    for row, (_, figures) in enumerate(rows):
        left = 0.0
        for part, colour in parts.items():
            value = figures.get(part, 0.0)
            name = (words or {}).get(part, part)
            axes.barh(row, value, left=left, color=colour, height=0.66, label=name if row == 0 else None)
            left += value
        text = total(left) if total else f"{left:.3g}"
        label = axes.annotate(text, (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        labels.append((label, left))
    axes.set_yticks(range(len(rows)), [style.wrapped(name, 2.4) for name, _ in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=unit)
    if scale is not None:
        axes.xaxis.set_major_formatter(scale)
    axes.set_title(title)
    style.legend(figure, *axes.get_legend_handles_labels(), where="outside lower center", most=3)
    style.room_for_labels([axes], labels)
    return figure


def allocations(runs: list[tuple[str, pl.DataFrame]], *, title: str = "") -> Figure:
    """Driver allocations in each step over the run, one panel for each `(name, steps)`; epochs are marked."""
    if not runs:
        raise AnalysisError("no data for the figure of allocations per step.")
    figure, panels = style.new(len(runs), 1, height=0.8 + 1.15 * len(runs), sharex=True, squeeze=False)
    for axes, (name, steps) in zip(panels[:, 0], runs, strict=True):
        nonempty(steps, "allocations per step")
        counts = steps["driver_allocations"].to_numpy()
        axes.plot(steps["index"] + 1, counts, color=style.colour(name), drawstyle="steps-mid", linewidth=1.2)
        starts = steps.filter(pl.col("step") == 1)["index"].to_list()
        for start in starts[1:]:
            axes.axvline(start + 0.5, color=style.RULE, linewidth=0.8, zorder=0)
        axes.set(ylim=(0, max(float(counts.max()) * 1.25, 1)), xlim=(0.5, steps.height + 0.5), ylabel="calls/step")
        last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
        label = f"{name}: {int(counts.sum()):,} in all, "
        label += f"the last in step {last:,} of {steps.height:,}" if last else "none in a step"
        axes.set_title(label, fontsize=9, color=style.colour(name))
        style.grid(axes)
    panels[-1, 0].set_xlabel("training step (lines: start of an epoch)")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def allocations_by_epoch(runs: list[tuple[str, Run]], *, title: str = "") -> Figure:
    """Calls that allocated device memory: before the first epoch, and in each epoch; one line for each run."""
    if not runs:
        raise AnalysisError("no data for the figure of allocations per epoch.")
    figure, axes = style.new()
    epochs = 0
    for below, (name, run) in zip(range(len(runs) - 1, -1, -1), runs, strict=True):
        counts = [taken(epoch.get("driver_calls", {})) for epoch in run.summary["epochs"]]
        counts.insert(0, taken(run.summary.get("driver_calls", {})) - sum(counts))
        # Where lines overlap, the lower ones are wider.
        axes.plot(
            range(len(counts)),
            counts,
            color=style.colour(name),
            marker=style.marker(name),
            linewidth=1.6 + 1.8 * below,
            markersize=5 + 2.5 * below,
            label=name,
        )
        epochs = max(epochs, len(counts))
    style.log_axis(axes, zero=True)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(epochs), ["before", *map(str, range(1, epochs))])
    axes.set_xlabel("epoch with its validation (before: weights, data, first buffers)")
    axes.set(ylabel="driver allocations", title=title)
    style.grid(axes)
    figure.legend(loc="outside upper right", ncols=len(runs))
    return figure


def taken(calls: dict[str, Any]) -> int:
    """Calls that allocated device memory, from totals as in the run record."""
    return sum(calls[name]["count"] for name in ("mem_alloc", "mem_alloc_async", "mem_create") if name in calls)


def joined(frame: pl.DataFrame, names: dict[str, str]) -> pl.Expr:
    """Which of several on/off columns are on, in words: `events + internal`, `none`; `names` are words by column."""
    missing = [column for column in names if column not in frame.columns]
    if missing:
        raise AnalysisError(f"the runs have no {', '.join(missing)}.")
    words = [pl.when(pl.col(column) == "on").then(pl.lit(word)) for column, word in names.items()]
    text = pl.concat_str(words, separator=" +\n", ignore_nulls=True)
    return pl.when(text == "").then(pl.lit("none")).otherwise(text)


def value_of(frame: pl.DataFrame, value: str, **where: Any) -> float:
    """Median of a column over the rows where columns have these values.

    Raises AnalysisError when there is no such row.
    """
    chosen = frame.filter([pl.col(column) == expected for column, expected in where.items()])[value].drop_nulls()
    if chosen.is_empty():
        described = ", ".join(f"{column} {value_}" for column, value_ in where.items())
        raise AnalysisError(f"no run with {described} has {value.replace('_', ' ')}.")
    return float(chosen.median())  # type: ignore[arg-type]


def loaders(frame: pl.DataFrame) -> pl.Expr:
    """The configuration of a loader in words, on up to three lines: program, loader or workers, pinning."""

    def column(name: str) -> pl.Expr:
        return pl.col(name) if name in frame.columns else pl.lit(None, pl.String).alias(name)

    workers = pl.when(column("workers").is_not_null()).then(
        pl.format(
            "\n{} workers{}",
            column("workers"),
            pl.when(column("pin") == "on").then(pl.lit(",\npinned")).otherwise(pl.lit("")),
        )
    )
    program = pl.when(pl.col("program") == "trainer").then(pl.lit("ours")).otherwise(pl.lit("PyTorch"))
    return pl.concat_str([program, pl.lit(":"), workers.fill_null(pl.concat_str([pl.lit("\n"), pl.col("loader")]))])
