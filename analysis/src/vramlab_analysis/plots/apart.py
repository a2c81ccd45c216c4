"""Differences of runs that should be equal: ratios to the fastest of a group, and losses relative to f32."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import middle
from vramlab_analysis.plots.bars import nonempty


def ratios(frame: pl.DataFrame, by: list[str], *, value: str = "step_us", name: str = "name") -> pl.DataFrame:
    """Each name's median of `value` over the least median of its group: `by`, `name`, `ratio`, `low`, `high`, `value`.

    `low` and `high` are the spread of the repeats (`measures.middle`) over the same least median. Groups keep their
    order.
    """
    lines = middle(frame, [*by, name], value)
    least = pl.col("value").min().over(by)
    return lines.select(
        *by, name, "value", ratio=pl.col("value") / least, low=pl.col("low") / least, high=pl.col("high") / least
    )


def changes(frame: pl.DataFrame, by: list[str], setting: str, base: object, *, value: str = "step_us") -> pl.DataFrame:
    """The effect of each other value of `setting` relative to `base`: `by`, `setting`, `value`, `change`, `clear`.

    `change` is the share that is added to the median; `clear` whether the spread of the repeats does not meet that of
    the base's. Groups without a run of `base` are left out.
    """
    lines = middle(frame, [*by, setting], value)
    plain = lines.filter(pl.col(setting) == base).drop(setting, "repeats")
    both = lines.filter(pl.col(setting) != base).join(plain, on=by, suffix="_base", maintain_order="left")
    disjoint = (pl.col("high") < pl.col("low_base")) | (pl.col("low") > pl.col("high_base"))
    return both.select(*by, setting, "value", change=pl.col("value") / pl.col("value_base") - 1, clear=disjoint)


def fastest(panels: list[tuple[str, pl.DataFrame]], *, bound: float, group: str = "group", title: str = "") -> Figure:
    """`ratios` by `group`, in percent above the fastest, a panel with a scale of its own for each `(title, ratios)`.

    The line is at `bound`, a share; whiskers are the spread of the repeats.
    """
    if not panels:
        raise AnalysisError("no data for the figure of ratios.")
    groups = [part[group].unique(maintain_order=True).to_list() for _, part in panels]
    for _, part in panels:
        nonempty(part, "ratios")
    figure, axes_of = style.new(
        1, len(panels), height=3.2, squeeze=False, width_ratios=[max(1, len(group)) for group in groups]
    )
    names = style.order([name for _, part in panels for name in part["name"]])
    labels: dict[str, Any] = {}
    for axes, (words, part), places in zip(axes_of[0], panels, groups, strict=True):
        for index, who in enumerate(names):
            one = part.filter(pl.col("name") == who)
            at = np.array([places.index(place) for place in one[group]]) + 0.2 * (index - (len(names) - 1) / 2)
            centre, low, high = (100 * (one[key].to_numpy() - 1) for key in ("ratio", "low", "high"))
            mark = axes.errorbar(
                at,
                centre,
                yerr=[centre - low, high - centre],
                color=style.colour(who),
                marker=style.marker(who),
                linestyle="none",
                capsize=2.5,
            )
            labels.setdefault(who, mark)
        axes.axhline(100 * bound, color=style.INK, linestyle="--", linewidth=0.9)
        axes.axhline(0, color=style.RULE, linewidth=0.9, zorder=0)
        axes.set_xticks(range(len(places)), places)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_title(words, fontsize=9)
        axes.set_xlabel(group)
        style.grid(axes)
    axes_of[0][0].set_ylabel("slower than the fastest, %")
    figure.suptitle(f"{title} (dashed: {100 * bound:g} %)".strip(), x=0.01, ha="left", fontsize=10)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels))
    return figure


def noise_of(table: pl.DataFrame) -> float | None:
    """The largest difference of trainer and PyTorch in the same type, as a share; None without such a pair."""
    largest = table["to_other"].abs().max()
    return None if largest is None else float(largest)  # type: ignore[arg-type]


def from_f32(table: pl.DataFrame, *, title: str = "") -> Figure:
    """The table of losses (`vramlab_analysis.losses.frame`) as points: `to_f32` in percent, a line for each `kind`.

    A colour for each program. The band is the largest difference of the two programs in any type.
    """
    known = table.filter(pl.col("to_f32").is_not_null())
    nonempty(known, "losses against f32")
    kinds = known["kind"].unique(maintain_order=True).to_list()
    figure, axes = style.new(height=1.0 + 0.3 * len(kinds))
    noise = noise_of(table)
    if noise is not None:
        axes.axvspan(
            -100 * noise,
            100 * noise,
            color=style.RULE,
            linewidth=0,
            zorder=0,
            label="largest difference of the programs",
        )
    for program, colour, mark in (("trainer", style.BLUE, "s"), ("pytorch", style.PURPLE, "D")):
        one = known.filter(pl.col("program") == program)
        at = [kinds.index(kind) for kind in one["kind"]]
        axes.plot(100 * one["to_f32"].to_numpy(), at, color=colour, marker=mark, linestyle="none", label=program)
    axes.axvline(0, color=style.INK, linewidth=0.9, zorder=1)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set(xlabel="final loss above f32, %", title=title)
    style.grid(axes)
    figure.legend(loc="outside lower center", ncols=3)
    return figure
