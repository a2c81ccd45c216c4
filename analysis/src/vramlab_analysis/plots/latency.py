"""Latency spectra: time of an operation against the share of operations that took at most this time."""

from __future__ import annotations

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.plots.bars import nonempty

PATHS = {
    "hit": style.BLUE,
    "split": style.SKY,
    "coalesce": style.GREEN,
    "deferred": style.PURPLE,
    "wait_inserted": style.YELLOW,
    "pool": "#44AA99",
    "driver_alloc": style.VERMILION,
    "driver_free": style.ORANGE,
    "collect": "#882255",
    "steal": "#AA4499",
    "retry": "#332288",
    "failed": style.BLACK,
}

# Values of a simulated device's histogram for an operation without a driver call: 0, or 1, its least value.
SIMULATED_ZERO_NS = 1


def words(ns: float, simulated: bool) -> str:
    """A latency with its unit; `no driver call` if a simulated device timed nothing."""
    return "no driver call" if simulated and ns <= SIMULATED_ZERO_NS else style.si_time(ns)


def nines(axes: Axes, most: float) -> None:
    """An axis with equal space for each nine: 0, 90, 99, 99.9 % up to a share `most`."""
    axes.set_xscale("log")
    top = max(int(np.log10(max(most, 10.0))), 1)
    ticks = [1.0] + [10.0**power for power in range(1, top + 1)]
    names = ["0 %", "90 %", *[f"99{'.' if power > 2 else ''}{'9' * (power - 2)} %" for power in range(2, top + 1)]]
    axes.set_xticks(ticks, names[: len(ticks)])
    axes.minorticks_off()
    axes.set(xlim=(1.0, max(most, 10.0) * 1.3), xlabel="share of operations that took at most this time")


def spectrum(
    frame: pl.DataFrame,
    *,
    title: str = "",
    colours: dict[str, str] | None = None,
    panels: list[str] | None = None,
    simulated: bool = False,
) -> Figure:
    """Percentile spectra side by side: a panel for each operation, a line for each group.

    `frame` is from `histograms.spectrum`, or several of them with a column `group`. A group
    that is an allocator has its colour.

    On a simulated device (`simulated`) only driver calls take time, so what took none was not measured: those shares
    are left out, and groups that never reached the driver are named below the axes and not drawn.
    """
    nonempty(frame, "latency")
    idle: list[str] = []
    if simulated:
        timed = frame.filter(pl.col("value_ns") > SIMULATED_ZERO_NS)
        groups = set(timed["group"].unique())
        idle = [group for group in style.order(frame["group"].to_list()) if group not in groups]
        if timed.is_empty():
            raise AnalysisError(
                f"{', '.join(idle)}: no operation asked the driver, and on a simulated device nothing else takes time, "
                "so there is no latency to draw."
            )
        frame = timed
    operations = [
        name for name in panels or ("allocate", "deallocate") if name in frame["operation"].unique().to_list()
    ]
    if not operations:
        raise AnalysisError("no data for the figure of latency.")
    figure, all_axes = style.new(
        1, len(operations), width=4.6 * len(operations), height=3.2, sharey=True, squeeze=False
    )
    handles: dict[str, object] = {}
    for axes, operation in zip(all_axes[0], operations, strict=True):
        most = 10.0
        chosen = frame.filter(pl.col("operation") == operation)
        for group in style.order(chosen["group"].to_list()):
            one = chosen.filter(pl.col("group") == group)
            count = int(one["count"][0])
            # The greatest value is drawn at the last share that the number of operations resolves.
            share = np.minimum(one["percentile"].to_numpy(), 1 - 0.5 / count)
            colour = (colours or PATHS).get(group) or style.colour(group)
            dashes = "--" if group.endswith(" cold") else "-"
            line = axes.plot(
                1 / (1 - share), np.maximum(one["value_ns"].to_numpy(), 1.0), color=colour, linestyle=dashes
            )
            handles.setdefault(group, line[0])
            most = max(most, 2.0 * count)
        nines(axes, most)
        style.log_axis(axes)
        style.time_axis(axes, "y")
        axes.set_title(operation, fontsize=9)
        style.grid(axes, "both")
    all_axes[0, 0].set_ylabel("time of one operation")
    text = f"not drawn, as on the simulated device only driver calls take time: {', '.join(idle)}" if idle else ""
    room = 4.6 * len(operations) - 0.4
    note = style.wrapped(text, room, size=8)
    style.legend(figure, list(handles.values()), list(handles), where="outside lower center", title=note)
    if title:
        figure.suptitle(style.wrapped(title, room, size=10), x=0.01, ha="left", fontsize=10)
    return figure
