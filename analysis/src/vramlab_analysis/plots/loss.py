"""Losses: curves, and the difference of two runs step by step."""

from __future__ import annotations

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.plots.bars import nonempty
from vramlab_analysis.records import losses_of

CYCLE = (style.BLUE, style.VERMILION, style.GREEN, style.PURPLE, style.ORANGE, style.SKY)


def smooth(values: np.ndarray, over: int) -> np.ndarray:
    """Mean of the last `over` values at each position (fewer at the beginning)."""
    sums = np.cumsum(np.insert(values.astype(float), 0, 0.0))
    at = np.arange(1, len(values) + 1)
    return np.asarray((sums[at] - sums[np.maximum(at - over, 0)]) / np.minimum(at, over))


def curves(
    runs: list[tuple[str, pl.DataFrame]], *, title: str = "", over: int = 1, colours: dict[str, str] | None = None
) -> Figure:
    """Loss of each step, one line for each `(name, steps)`; each point is the mean of `over` steps.

    Runs of the same name (other seeds) share a colour.
    """
    if not runs:
        raise AnalysisError("no data for the figure of losses.")
    names = list(dict.fromkeys(name for name, _ in runs))
    plain = {name: CYCLE[place % len(CYCLE)] for place, name in enumerate(names)}
    tints = {name: (colours or {}).get(name) or style.ALLOCATORS.get(name) or plain[name] for name in names}
    figure, axes = style.new()
    labelled: set[str] = set()
    for name, steps in runs:
        nonempty(steps, "losses")
        values = smooth(losses_of(steps, name).to_numpy(), over)
        label = None if name in labelled else name
        axes.plot(steps["index"] + 1, values, color=tints[name], label=label, linewidth=1.2)
        labelled.add(name)
    style.log_axis(axes)
    axes.set_xlabel("training step")
    axes.set(ylabel="cross-entropy, nats" + (f" (mean of {over} steps)" if over > 1 else ""), title=title)
    style.grid(axes)
    style.legend(figure, *axes.get_legend_handles_labels())
    return figure


def against(
    base: pl.DataFrame, runs: list[tuple[str, pl.DataFrame]], *, title: str = "", over: int = 100, name: str = "f32"
) -> Figure:
    """The losses of each `(name, steps)` above those of `base`, in percent; means of the last `over` steps.

    Raises AnalysisError when a run has other steps than `base`.
    """
    if not runs:
        raise AnalysisError("no data for the figure of losses against others.")
    figure, axes = style.new()
    plain = smooth(losses_of(base, name).to_numpy(), over)
    for place, (who, steps) in enumerate(runs):
        if steps.height != base.height:
            raise AnalysisError(f"{who} has {steps.height} steps and {name} {base.height}, so they cannot be compared.")
        # The first mean of `over` steps belongs to the step of this number.
        ratio = (smooth(losses_of(steps, who).to_numpy(), over) / plain)[over - 1 :]
        axes.plot(steps["index"][over - 1 :] + 1, 100 * (ratio - 1), color=CYCLE[place % len(CYCLE)], label=who)
    axes.axhline(0, color=style.INK, linewidth=0.9)
    axes.set(xlabel="training step", ylabel=f"loss above that of {name}, %\n(means of {over} steps)", title=title)
    style.grid(axes)
    figure.legend(loc="outside upper right", ncols=3)
    return figure


def difference(ours: pl.DataFrame, theirs: pl.DataFrame) -> pl.DataFrame:
    """Relative difference of the losses of the same steps: `index`, `ours`, `theirs`, `relative` (absolute value).

    Raises AnalysisError when the runs have no common step.
    """
    both = ours.select("epoch", "step", "index", ours="loss").join(
        theirs.select("epoch", "step", theirs="loss"), on=["epoch", "step"], how="inner"
    )
    if both.is_empty():
        raise AnalysisError("the two runs have no common step, so their losses cannot be compared.")
    return both.sort("index").with_columns(relative=((pl.col("ours") - pl.col("theirs")) / pl.col("theirs")).abs())


def differences(pairs: list[tuple[str, pl.DataFrame]], *, bound: float | None = None, title: str = "") -> Figure:
    """Relative difference per step on a log axis, a line for each `(name, difference)`; agreement is at the bottom."""
    if not pairs:
        raise AnalysisError("no data for the figure of differences.")
    figure, axes = style.new()
    floor = 1e-9
    for place, (name, frame) in enumerate(pairs):
        nonempty(frame, "differences")
        values = np.maximum(frame["relative"].to_numpy(), floor)
        axes.plot(frame["index"] + 1, values, color=CYCLE[place % len(CYCLE)], linewidth=1.1, label=name)
    if bound is not None:
        axes.axhline(bound, color=style.INK, linestyle="--", linewidth=0.9)
        axes.annotate(f"{bound:g}", (1, bound), xytext=(2, 3), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(ylim=(floor, None), xlabel="training step", ylabel="|ours − PyTorch| / PyTorch, loss", title=title)
    style.grid(axes)
    figure.legend(loc="outside upper right", ncols=len(pairs))
    return figure
