"""One mark for each cell of an experiment: a coloured table, and simulated against measured times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from vramlab_analysis import style
from vramlab_analysis.plots.bars import nonempty


def matrix(
    frame: pl.DataFrame,
    *,
    row: str,
    column: str,
    value: str,
    number: Callable[[float], str],
    best: float,
    worst: float,
    title: str = "",
    note: str = "",
) -> Figure:
    """A cell with `value` for each `row` and `column`, in order of appearance.

    White is `best` or less, the darkest orange `worst` or more. A cell without a value contains `none`.
    """
    frame = frame.filter(pl.col(value).is_not_null())
    nonempty(frame, title or value)
    rows, columns = (frame[key].unique(maintain_order=True).to_list() for key in (row, column))
    found = {(one[row], one[column]): float(one[value]) for one in frame.iter_rows(named=True)}
    cells = np.array([[found.get((r, c), np.nan) for c in columns] for r in rows])
    figure, axes = style.new(width=8.0, height=0.9 + 0.27 * len(rows))
    map_ = LinearSegmentedColormap.from_list("worse", ["#FFFFFF", style.ORANGE]).with_extremes(bad="#F4F4F4")
    axes.imshow(cells, aspect="auto", cmap=map_, norm=Normalize(best, worst, clip=True))
    for y, line in enumerate(cells):
        for x, one in enumerate(line):
            text = "none" if np.isnan(one) else number(float(one))
            axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=style.INK)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title)
    if note:
        axes.set_xlabel(note)
    return figure


def fidelity(cells: pl.DataFrame, *, machine: str, tolerance: float = 0.15, title: str = "") -> Figure:
    """Simulated over measured step time, on log axes with the diagonal and ± `tolerance`, and the error of each cell.

    `machine` is the GPU in words; `cells` has `name` (allocator), `cell` (settings in words), `gpu` and `sim` in µs.
    """
    nonempty(cells, "fidelity")
    cells = cells.with_columns(error=pl.col("sim") / pl.col("gpu") - 1)
    known = style.order(cells["name"].to_list())
    cells = cells.sort(pl.col("name").cast(pl.Enum(known)), maintain_order=True)
    figure, (left, right) = style.new(
        1, 2, width=9.0, height=max(3.4, 0.9 + 0.17 * cells.height), width_ratios=[1, 1.2]
    )
    low = 0.7 * float(min(cells["gpu"].min(), cells["sim"].min()))  # type: ignore[type-var,arg-type]
    high = 1.4 * float(max(cells["gpu"].max(), cells["sim"].max()))  # type: ignore[type-var,arg-type]
    line = [low, high]
    left.fill_between(
        line, [v * (1 - tolerance) for v in line], [v * (1 + tolerance) for v in line], color=style.RULE, linewidth=0
    )
    left.plot(line, line, color=style.GREY, linewidth=0.8)
    for name in style.order(cells["name"].to_list()):
        one = cells.filter(pl.col("name") == name)
        left.plot(one["gpu"], one["sim"], style.marker(name), color=style.colour(name), label=name, alpha=0.85)
    left.set(xlim=line, ylim=line)
    for which in ("x", "y"):
        style.log_axis(left, which)
    left.set(xlabel=f"{machine}, µs per step", ylabel="simulated, µs per step")
    rows = list(cells.iter_rows(named=True))
    right.axvspan(-100 * tolerance, 100 * tolerance, color=style.RULE, linewidth=0)
    right.axvline(0, color=style.GREY, linewidth=0.8)
    for row, cell in enumerate(rows):
        right.plot(100 * cell["error"], row, style.marker(cell["name"]), color=style.colour(cell["name"]))
    right.set_yticks(range(len(rows)), [f"{cell['name']}, {cell['cell']}" for cell in rows], fontsize=7)
    right.invert_yaxis()
    right.set_xlabel(f"simulated over measured, % (band: ±{100 * tolerance:.0f} %)")
    figure.legend(loc="outside upper right", ncols=4)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure
