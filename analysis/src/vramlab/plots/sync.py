"""The sync account: which driver calls took the host's time, and how much of it was waiting."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from vramlab import style
from vramlab.errors import AnalysisError
from vramlab.plots.bars import nonempty


def account(runs: list[tuple[str, pl.DataFrame]], *, most: int = 6, title: str = "") -> Figure:
    """Time per step in the calls that took most, a panel for each `(name, calls.account)`; waiting is hatched."""
    if not runs:
        raise AnalysisError("there are no data for the sync account.")
    least = 0.005 * max((float(frame["total_us_per_step"].max() or 0) for _, frame in runs), default=0)  # type: ignore[arg-type]
    chosen = [(name, frame.filter(pl.col("total_us_per_step") >= least).head(most)) for name, frame in runs]
    figure, panels = style.new(
        len(runs), 1, height=0.7 + sum(0.5 + 0.2 * frame.height for _, frame in chosen), sharex=True, squeeze=False,
        height_ratios=[max(frame.height, 2) + 1.5 for _, frame in chosen],
    )  # fmt: skip
    for axes, (name, frame) in zip(panels[:, 0], chosen, strict=True):
        nonempty(frame, "the sync account")
        colour = style.colour(name)
        for row, one in enumerate(frame.iter_rows(named=True)):
            blocked, total = one["blocked_us_per_step"], one["total_us_per_step"]
            axes.barh(row, total - blocked, color=colour, alpha=0.45, height=0.7)
            axes.barh(row, blocked, left=total - blocked, color=colour, hatch="////", edgecolor="white", height=0.7)
            said = f"{one['calls_per_step']:.3g} calls"
            if blocked > 0:
                said += f", {style.si_time(blocked * 1e3)} waiting"
            axes.annotate(said, (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5)
        axes.set_yticks(range(frame.height), frame["call"].to_list(), fontsize=8)
        axes.invert_yaxis()
        axes.set_title(name, color=colour, fontsize=9)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
    panels[-1, 0].set_xlabel("host time per training step, µs (hatched: waiting for the device)")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def timeline(calls: pl.DataFrame, start_ns: int, end_ns: int, *, title: str = "") -> Figure:
    """Driver calls of the host between two times, a lane for each kind; the part that waited is darker."""
    shown = calls.filter((pl.col("start_ns") < end_ns) & (pl.col("start_ns") + pl.col("total_ns") > start_ns))
    nonempty(shown, "the timeline of driver calls")
    order = shown.group_by("call").agg(pl.col("total_ns").sum()).sort("total_ns", "call", descending=[True, False])
    lanes = order["call"].to_list()
    figure, axes = style.new(height=0.9 + 0.32 * len(lanes))
    for lane, call in enumerate(lanes):
        one = shown.filter(pl.col("call") == call)
        start, total = one["start_ns"].to_numpy() - start_ns, one["total_ns"].to_numpy()
        blocked = one["blocked_ns"].to_numpy()
        axes.broken_barh(list(zip(start / 1e3, total / 1e3, strict=True)), (lane - 0.36, 0.72), color=style.SKY)
        waits = [((a + t - b) / 1e3, b / 1e3) for a, t, b in zip(start, total, blocked, strict=True) if b > 0]
        axes.broken_barh(waits, (lane - 0.36, 0.72), color=style.VERMILION)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, (end_ns - start_ns) / 1e3)
    axes.set_xlabel("host time, µs (red: waiting for the device)")
    axes.set_title(title)
    return figure
