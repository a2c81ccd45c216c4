"""Style of figures: one colour and one marker for each allocator, units, fonts.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), distinct for any colour vision.
"""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#999999"
# Colours of a PNG's palette: lines and backgrounds have few, and blends at their edges are merged.
COLOURS = 128
INK, RULE = "#222222", "#d5d5d5"

ALLOCATORS = {
    "naive": VERMILION,
    "caching": BLUE,
    "stream-ordered": GREEN,
    "pytorch": PURPLE,
    "pytorch-eager": PURPLE,
    "pytorch-graph": ORANGE,
    "pytorch-compile": SKY,
    # Launches of a step.
    "eager": VERMILION,
    "graph": BLUE,
    "graph, 2 streams": SKY,
}
MARKERS = {
    "naive": "o",
    "caching": "s",
    "stream-ordered": "^",
    "pytorch": "D",
    "pytorch-eager": "D",
    "pytorch-graph": "v",
    "pytorch-compile": "P",
    "eager": "o",
    "graph": "s",
    "graph, 2 streams": "P",
}
# The host's activities in stacking order.
HOST_PARTS = {
    "waiting inside alloc and free": VERMILION,
    "alloc and free themselves": ORANGE,
    "waiting elsewhere (the device is the limit)": BLUE,
    "launching kernels": SKY,
    "everything else": "#BBBBBB",
}
# The five parts of reserved − requested, in order.
LEDGER_PARTS = {"internal": YELLOW, "soft": SKY, "hard": VERMILION, "stream": PURPLE, "pending": ORANGE}
LEDGER_WORDS = {
    "internal": "rounding inside blocks",
    "soft": "free, whole segments",
    "hard": "free, partly used segments",
    "stream": "free, other streams' segments",
    "pending": "deferred frees",
}

RC: dict[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    # Names are text, not formulas.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "figure",
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
}
matplotlib.rcParams.update(RC)  # type: ignore[arg-type]

_OTHERS = (GREY, "#7F6000", "#44AA99", "#882255", "#332288", "#DDCC77")


def colour(name: str) -> str:
    """Colour of an allocator or program; the same name has the same colour in every figure."""
    if name in ALLOCATORS:
        return ALLOCATORS[name]
    for known, value in ALLOCATORS.items():
        if name.startswith((known + " ", known + ",")):
            return value
    return _OTHERS[sum(name.encode()) % len(_OTHERS)]


def marker(name: str) -> str:
    """The marker that belongs to `colour`, for readers without colour."""
    return MARKERS.get(name, next((m for known, m in MARKERS.items() if name.startswith(known + " ")), "X"))


def order(names: Any) -> list[str]:
    """Names in the order of figures: ours, the simplest first, then PyTorch's, then the others."""
    known = list(ALLOCATORS)
    return sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))


def new(
    rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.2, **kwargs: Any
) -> tuple[Figure, Any]:
    """A figure outside of matplotlib's global state, and its axes from `Figure.subplots`. Sizes are inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **kwargs)


def grid(axes: Axes, axis: str = "y") -> None:
    """Thin grid lines."""
    axes.grid(visible=True, axis=axis)  # type: ignore[arg-type]


def si_bytes(value: float, _: int | None = None) -> str:
    """Bytes in binary units, such as `1.5 GiB`."""
    magnitude = abs(value)
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if magnitude >= size:
            return f"{value / size:.3g} {unit}" if magnitude / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def si_time(ns: float, _: int | None = None) -> str:
    """Nanoseconds in the unit that fits, such as `1.5 µs`."""
    magnitude = abs(ns)
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if magnitude >= size:
            return f"{ns / size:.3g} {unit}" if magnitude / size < 1000 else f"{ns / size:.0f} {unit}"
    return f"{ns:.3g} ns"


class ByteLocator(MaxNLocator):
    """Ticks at round numbers of KiB, MiB or GiB."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Places of the ticks between two numbers of bytes."""
        unit = next((2.0**power for power in (40, 30, 20, 10) if max(abs(vmin), abs(vmax)) >= 1.5 * 2**power), 1.0)
        return np.asarray(super().tick_values(vmin / unit, vmax / unit)) * unit


def bytes_axis(axes: Axes, which: str = "y") -> None:
    """Ticks in binary units, at round numbers of them."""
    axis = getattr(axes, which + "axis")
    axis.set_major_formatter(FuncFormatter(si_bytes))
    axis.set_major_locator(ByteLocator(6))


def time_axis(axes: Axes, which: str = "x") -> None:
    """Ticks of an axis in nanoseconds, in the unit that fits."""
    getattr(axes, which + "axis").set_major_formatter(FuncFormatter(si_time))


class PlainLogLocator(LogLocator):
    """Ticks at 1, 2 and 5 of each decade; where there are more than three decades, at 1 of each."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Places of the ticks between two numbers."""
        self.set_params(subs=(1.0,) if vmin > 0 and vmax > 1000 * vmin else (1.0, 2.0, 5.0))
        return super().tick_values(vmin, vmax)


def log_axis(axes: Axes, which: str = "y", *, zero: bool = False) -> None:
    """A logarithmic axis with plain numbers; with `zero` it starts at 0 and is linear up to 1.

    The library's own labels of such axes are formulas, which are not set here.
    """
    axis = getattr(axes, which + "axis")
    if zero:
        getattr(axes, f"set_{which}scale")("symlog", linthresh=1)
    else:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(PlainLogLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_right(axes: Axes, x: float, entries: list[tuple[float, str, str]], *, gap: float = 0.055) -> None:
    """Writes names at the right end of lines instead of a legend, spread where they would overlap.

    `entries` are value, name, colour; `gap` is the least distance as a fraction of the axis.
    """
    to_axis = axes.transData + axes.transAxes.inverted()
    placed = sorted((to_axis.transform((x, value))[1], value, name, tint) for value, name, tint in entries)
    heights: list[float] = []
    for height, *_ in placed:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    overflow = max(0.0, heights[-1] - 1.0) if heights else 0.0
    for height, (_, _, name, tint) in zip(heights, placed, strict=True):
        axes.annotate(
            name,
            xy=(x, 0),
            xycoords=("data", "axes fraction"),
            xytext=(6, height - overflow),
            textcoords=("offset points", "axes fraction"),
            color=tint,
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


# Mean width of a character of the figures' font, as a share of its size.
_CHARACTER = 0.6


def wrapped(text: str, inches: float, *, size: float = 9.0, lines: int = 2) -> str:
    """A name in lines that fit a width, at most `lines` of them; `…` marks an omission."""
    room = max(int(inches * 72 / (size * _CHARACTER)), 8)
    parts = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    if len(parts) > lines:
        parts = [*parts[: lines - 1], parts[lines - 1][: room - 2].rstrip() + " …"]
    return "\n".join(parts)


def legend(
    figure: Figure,
    handles: Any,
    names: list[str],
    *,
    where: Any = "outside upper right",
    most: int = 5,
    title: str = "",
) -> None:
    """A legend of as many columns as fit; the figure grows with its rows beyond two.

    `title` is a note above it.
    """
    size = float(RC["legend.fontsize"])
    shown = [wrapped(name, figure.get_figwidth() - 0.8, size=size, lines=1) for name in names]
    entry = max((len(name) for name in shown), default=1) * size * _CHARACTER / 72 + 0.55
    columns = max(1, min(most, len(shown), int((figure.get_figwidth() - 0.2) / entry)))
    rows = -(-len(shown) // columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(rows + len(title.splitlines()) - 2, 0))
    figure.legend(handles, shown, loc=where, ncols=columns, title=title or None, title_fontsize=size)


def room_for_labels(panels: Any, labels: list[tuple[Any, float]]) -> None:
    """Sets one scale from 0 for horizontal bars in these axes, with room for the label behind each bar.

    `labels` are annotations right of a bar, each with the end of its bar.
    """
    figure = panels[0].figure
    most = max((end for _, end in labels), default=0.0) or 1.0
    for axes in panels:
        axes.set_xlim(0, 1.3 * most)
    figure.draw_without_rendering()  # places the axes
    renderer = figure.canvas.get_renderer()
    limit = most
    for label, end in labels:
        whole = label.axes.get_window_extent(renderer).width
        box = label.get_window_extent(renderer)
        start = label.axes.transData.transform((end, 0))[0]
        behind = box.x1 - start
        limit = max(limit, end * whole / max(whole - behind - 2, whole / 8))
    for axes in panels:
        axes.set_xlim(0, limit)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as PNG, the same bytes each time, with a palette, which is a third of the size."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    plain = Image.open(drawn).convert("RGB")
    few = plain.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    out = io.BytesIO()
    few.save(out, "PNG", optimize=True, dpi=(dpi, dpi))
    return out.getvalue()


def svg(figure: Figure) -> str:
    """The figure as SVG, the same text each time, in hundredths of a point and without indents: a sixth smaller."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    short = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), out.getvalue())
    return re.sub(r"^ +", "", short, flags=re.MULTILINE)
