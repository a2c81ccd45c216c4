"""Host time in driver calls, and the part of it that was waiting."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.plots.bars import nonempty


def account(
    runs: list[tuple[str, pl.DataFrame]], *, most: int = 6, title: str = "", period: str = "training step"
) -> Figure:
    """Time in the longest calls, a panel for each `(name, calls.account)`; waiting is hatched.

    `period` is the period of the counts, in words.
    """
    if not runs:
        raise AnalysisError("no data for the figure of driver calls.")
    for _, frame in runs:
        nonempty(frame, "driver calls")
    longest = max(float(frame["total_us"].max() or 0) for _, frame in runs)  # type: ignore[arg-type]
    chosen = [(name, _most(frame, 0.005 * longest, most)) for name, frame in runs]
    figure, panels = style.new(
        len(runs), 1, height=0.7 + sum(0.55 + 0.2 * frame.height for _, frame in chosen), sharex=True, squeeze=False,
        height_ratios=[frame.height + 1.0 for _, frame in chosen],
    )  # fmt: skip
    labels = []
    for axes, (name, frame) in zip(panels[:, 0], chosen, strict=True):
        colour = style.colour(name)
        for row, one in enumerate(frame.iter_rows(named=True)):
            blocked, total = one["blocked_us"], one["total_us"]
            axes.barh(row, total - blocked, color=colour, alpha=0.45, height=0.7)
            axes.barh(row, blocked, left=total - blocked, color=colour, hatch="////", edgecolor="white", height=0.7)
            text = f"{one['calls']:.3g} calls" if one["calls"] < 1000 else f"{one['calls']:,.0f} calls"
            if blocked > 0:
                text += f", {style.si_time(blocked * 1e3)} waiting"
            label = axes.annotate(
                text, (total, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5
            )
            labels.append((label, total))
        names = [style.wrapped(call, 1.8, size=8, lines=1) for call in frame["call"]]
        axes.set_yticks(range(frame.height), names, fontsize=8)
        axes.set_ylim(max(frame.height, 1) - 0.5, -0.5)
        axes.set_title(style.wrapped(name, 6.0, lines=1), color=colour, fontsize=9)
    panels[-1, 0].set_xlabel(f"host time of one {period} (hatched: waiting for the device)")
    panels[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda us, _: style.si_time(1e3 * us)))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    style.room_for_labels(list(panels[:, 0]), labels)
    return figure


def _most(frame: pl.DataFrame, least: float, most: int) -> pl.DataFrame:
    """The longest calls, the first of them even if it is short."""
    return pl.concat([frame.head(1), frame.slice(1).filter(pl.col("total_us") >= least)]).head(most)


def timeline(calls: pl.DataFrame, start_ns: int, end_ns: int, *, title: str = "") -> Figure:
    """Driver calls of the host between two times, a lane for each kind; waiting is darker."""
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
    axes.set(xlim=(0, (end_ns - start_ns) / 1e3), xlabel="host time, µs (red: waiting for the device)", title=title)
    return figure
