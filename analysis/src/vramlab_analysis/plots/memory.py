"""Memory: levels over a run, the reserved-memory breakdown, and the block map (addresses over time)."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from vramlab_analysis import histories, style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.plots.bars import nonempty, stacked

# Large blocks dark, small ones light, without the ends of the scale.
SIZES = LinearSegmentedColormap.from_list("sizes", colormaps["cividis_r"](np.linspace(0.1, 0.85, 64)))


def over_steps(runs: list[tuple[str, pl.DataFrame]], *, title: str = "") -> Figure:
    """Reserved, active (or allocated) and requested bytes after each step, one panel for each `(name, steps)`."""
    runs = [(name, steps) for name, steps in runs if _holds(steps, "reserved_bytes")]
    if not runs:
        raise AnalysisError("no data for the figure of memory over steps: no run has reserved memory.")
    columns = min(len(runs), 4)
    rows = -(-len(runs) // columns)
    width = max(4.0, min(2.7 * columns + 1, 10))
    figure, panels = style.new(rows, columns, width=width, height=0.6 + 2.3 * rows, sharey=True, squeeze=False)
    drawn = list(panels.flat)[: len(runs)]
    for axes in panels.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, (name, steps) in zip(drawn, runs, strict=True):
        nonempty(steps, "memory over steps")
        at = steps["index"] + 1
        levels = [("reserved_bytes", "reserved", style.GREY)]
        within = "active" if _holds(steps, "active_bytes") else "allocated"
        if _holds(steps, f"{within}_bytes"):
            levels.append((f"{within}_bytes", within, style.SKY))
        if _holds(steps, "requested_bytes"):
            levels.append(("requested_bytes", "requested", style.BLUE))
        for column, label, colour in levels:
            axes.plot(at, steps[column], color=colour, label=label, linewidth=2.2 if label != "requested" else 1.0)
        axes.set_title(
            style.wrapped(name, (width - 1.2) / columns - 0.2, lines=3), color=style.colour(name), fontsize=9
        )
        axes.set_xlabel("training step")
        style.bytes_axis(axes)
        style.grid(axes)
    panels[0, 0].set_ylim(bottom=0)  # shared; set earlier, it would fix the top as well
    for axes in panels[:, 0]:
        axes.set_ylabel("bytes after the step")
    handles, labels = max((axes.get_legend_handles_labels() for axes in drawn), key=lambda both: len(both[1]))
    style.legend(figure, handles, labels, most=3)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _holds(frame: pl.DataFrame, column: str) -> bool:
    return column in frame.columns and frame[column].count() > 0


def within_steps(
    trace: pl.DataFrame, held: pl.DataFrame | None, start_ns: int, end_ns: int, *, title: str = ""
) -> Figure:
    """Requested, allocated and (from `histories.reserved`) reserved bytes at each operation between two times."""
    levels = histories.levels(trace).filter(pl.col("time_ns").is_between(start_ns, end_ns))
    nonempty(levels, "memory within steps")
    figure, axes = style.new(height=2.8)
    at = (levels["time_ns"] - start_ns) / 1e3
    ends = []
    if held is not None and not held.is_empty():
        before = held.filter(pl.col("time_ns") <= start_ns)["reserved"]
        inside = held.filter(pl.col("time_ns").is_between(start_ns, end_ns))
        first = int(before[-1]) if len(before) else int(inside["reserved"][0])
        times = [0.0, *((inside["time_ns"] - start_ns) / 1e3), (end_ns - start_ns) / 1e3]
        values = [first, *inside["reserved"]]
        values.append(values[-1])
        axes.step(times, values, where="post", color=style.GREY)
        ends.append((float(values[-1]), "reserved", style.GREY))
    for column, colour in (("allocated", style.SKY), ("requested", style.BLUE)):
        axes.step(at, levels[column], where="post", color=colour, linewidth=1.2)
        ends.append((float(levels[column][-1]), column, colour))
    axes.set(xlim=(0, (end_ns - start_ns) / 1e3), ylim=(0, None), xlabel="time, µs", ylabel="bytes")
    style.bytes_axis(axes)
    axes.set_title(style.wrapped(title, 6.5, size=10))
    style.grid(axes)
    style.label_right(axes, (end_ns - start_ns) / 1e3, ends, gap=0.08)
    return figure


def ledger(rows: list[tuple[str, dict[str, Any]]], *, title: str = "") -> Figure:
    """Parts of reserved − requested at peak reserved, one bar for each `(name, fragmentation)`."""
    parts = {"requested": style.BLUE, **style.LEDGER_PARTS}
    words = {"requested": "requested", **{part: f"{part}: {text}" for part, text in style.LEDGER_WORDS.items()}}
    rows = [(name, {part: float(one.get(part, 0)) for part in parts}) for name, one in rows if one]
    figure = stacked(rows, parts, unit="bytes at peak reserved", title=title, total=style.si_bytes, words=words)
    style.bytes_axis(figure.axes[0], "x")
    return figure


def block_map(
    blocks: pl.DataFrame,
    segments: pl.DataFrame | None,
    start_ns: int,
    end_ns: int,
    *,
    title: str = "",
    most: int = 20_000,
) -> Figure:
    """Addresses over time: one rectangle for the lifetime of each block, on its segment.

    Address space that nothing uses is left out. `blocks` and `segments` are `histories.lives` and `histories.segments`;
    of lives only those that overlap the time from `start_ns` to `end_ns` are drawn. More than `most` are refused: no
    one could see them.
    """
    end = pl.col("end_ns").fill_null(end_ns)
    overlaps = (pl.col("start_ns") < end_ns) & (end > start_ns)
    shown = blocks.filter(overlaps)
    nonempty(shown, "the block map")
    if shown.height > most:
        raise AnalysisError(f"{shown.height:,} blocks are too many for one block map; choose fewer steps.")
    under = segments.filter(overlaps) if segments is not None else pl.DataFrame()
    count = under.height
    columns = [
        (np.concatenate([_column(under, a), _column(shown, b)]) if count else _column(shown, b))
        for a, b in (("addr", "addr"), ("bytes", "block"), ("start_ns", "start_ns"))
    ]
    addr, size, begin = columns
    stop = np.concatenate(
        [frame["end_ns"].fill_null(end_ns).to_numpy() for frame in ((under, shown) if count else (shown,))]
    )
    place, regions = histories.compacted(addr, size)
    left = (np.clip(begin, start_ns, end_ns) - start_ns) / 1e3
    right = (np.clip(stop, start_ns, end_ns) - start_ns) / 1e3
    low, high = place.astype(float), place.astype(float) + size
    corners = np.stack(
        [np.stack([left, low], 1), np.stack([right, low], 1), np.stack([right, high], 1), np.stack([left, high], 1)], 1
    )
    figure, axes = style.new(height=4.2)
    axes.add_collection(
        PolyCollection(
            list(corners[:count]), facecolors="#e9e9e9", edgecolors="#b5b5b5", linewidths=0.4, rasterized=True
        )
    )
    sizes = shown["size"].to_numpy()
    low_size, high_size = max(float(sizes.min()), 1.0), max(float(sizes.max()), 2.0)
    norm = LogNorm(low_size, high_size)
    tints = SIZES(norm(np.maximum(sizes, 1)))
    axes.add_collection(
        PolyCollection(list(corners[count:]), facecolors=tints, edgecolors="white", linewidths=0.25, rasterized=True)
    )
    for _, length, at in regions[1:]:
        if length:
            axes.axhline(at, color=style.RULE, linewidth=0.3, zorder=0)
    axes.set_xlim(0, (end_ns - start_ns) / 1e3)
    axes.set(ylim=(0, float(high.max())), xlabel="time, µs", ylabel="address, unused space left out")
    style.bytes_axis(axes)
    axes.set_title(title)
    bar = figure.colorbar(ScalarMappable(norm, SIZES), ax=axes, pad=0.01, aspect=30)
    bar.set_label("requested bytes")
    powers = range(0, 50, 4 if high_size > 2**14 * low_size else 2)
    bar.set_ticks([2.0**power for power in powers if low_size <= 2**power <= high_size])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(style.si_bytes))
    bar.ax.minorticks_off()
    return figure


def _column(frame: pl.DataFrame, name: str) -> Any:
    return frame[name].to_numpy()
