"""A table in colours: one value for each row and column."""

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
    """A cell with `value` for each `row` and `column`, in the order in which they come.

    White is `best` or less, the darkest orange `worst` or more. A cell without a value stays empty and says so.
    """
    frame = frame.filter(pl.col(value).is_not_null())
    nonempty(frame, title or value)
    rows, columns = (frame[key].unique(maintain_order=True).to_list() for key in (row, column))
    found = {(one[row], one[column]): float(one[value]) for one in frame.iter_rows(named=True)}
    cells = np.array([[found.get((r, c), np.nan) for c in columns] for r in rows])
    figure, axes = style.new(width=8.0, height=0.9 + 0.27 * len(rows))
    map_ = LinearSegmentedColormap.from_list("worse", ["#FFFFFF", style.ORANGE])
    map_.set_bad("#F4F4F4")
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
