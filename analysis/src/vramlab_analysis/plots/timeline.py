"""A picture of a capture: ranges, driver calls with their waiting, the device's work, on one axis of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vramlab_analysis.captures import Capture, Row

# Okabe and Ito's colours, which people with any colour vision can distinguish (https://jfly.uni-koeln.de/color/).
PHASES = {"load": "#999999", "forward": "#56B4E9", "loss": "#F0E442", "backward": "#E69F00", "update": "#CC79A7"}
FREE, ALLOC, LAUNCH, WAIT, OTHER = "#D55E00", "#009E73", "#b0b0b0", "#0072B2", "#dddddd"
KINDS = {
    "mem_free": FREE, "mem_free_async": FREE, "host_free": FREE,
    "mem_alloc": ALLOC, "mem_alloc_async": ALLOC, "host_alloc": ALLOC,
    "kernel_launch": LAUNCH, "graph_launch": LAUNCH,
    "stream_synchronize": WAIT, "device_synchronize": WAIT, "event_synchronize": WAIT,
}  # fmt: skip
LEGEND = {"free": FREE, "allocate": ALLOC, "launch": LAUNCH, "synchronise": WAIT, "other call": OTHER}
INK = "#222222"
_SCALE = 1e3  # drawn in microseconds


@dataclass(slots=True)
class Bar:
    """An interval: a range, a call, a kernel. Nanoseconds from the window's start."""

    start: int
    end: int
    text: str
    group: str = ""  # selects its colour: phase of a range or of a kernel's launch, kind of a call
    waited: int = 0  # waiting at its start


@dataclass
class Window:
    """The lanes of a picture, from the top down."""

    title: str
    length: int
    ranges: list[list[Bar]]  # by depth
    calls: list[Bar]
    work: dict[str, list[Bar]]  # by stream
    waits: list[tuple[int, int]]  # end of a kernel, end of the wait for it
    blocked_ns: int


def window(capture: Capture) -> Window:
    """A step from the middle of the capture, the one with the median duration; all of a capture without steps."""
    start, end, title = 0, int(capture.document["span_ns"]), ""
    if steps := capture.steps:
        middle = sorted(steps[len(steps) // 4 :], key=lambda step: int(step["duration_ns"]))
        step = middle[len(middle) // 2]
        start, end, title = step["start_ns"], step["start_ns"] + step["duration_ns"], step["text"]

    def bar(row: Row, text: str, group: str) -> Bar:
        over = row["start_ns"] + row["duration_ns"]
        return Bar(max(row["start_ns"], start) - start, min(over, end) - start, text, group)

    def shown(row: Row) -> bool:
        return bool(row["start_ns"] < end and row["start_ns"] + row["duration_ns"] > start)

    ranges: dict[int, list[Bar]] = {}
    for row, path in zip(capture.ranges, capture.paths, strict=True):
        if shown(row):
            ranges.setdefault(row["level"], []).append(bar(row, row["text"], _phase(path)))
    calls: list[Bar] = []
    waits: list[tuple[int, int]] = []
    blocked = 0
    for row in filter(shown, capture.calls):
        call = bar(row, row["call"], row["kind"])
        if row["waited_for"] is not None:
            call.waited = min(row["blocked_ns"], call.end - call.start)
            blocked += row["blocked_ns"]
            work = capture.work[row["waited_for"]]
            waits.append((work["start_ns"] + work["duration_ns"] - start, call.start + call.waited))
        calls.append(call)
    lanes: dict[str, list[Bar]] = {}
    names = capture.document["rows"]["streams"]
    for row in filter(shown, capture.work):
        name = names.get(str(row["stream"])) or f"stream {row['stream']}"
        lanes.setdefault(name, []).append(bar(row, row["name"], _phase(capture.launch_path(row))))
    return Window(title, end - start, [ranges[level] for level in sorted(ranges)], calls, lanes, waits, blocked)


def _phase(path: str) -> str:
    return next((part for part in path.split("/") if part in PHASES), "")


def draw(capture: Capture, *, title: str = "", width: float = 11.0) -> Figure:
    """Draws one window: NVTX ranges by depth, driver calls by kind with waiting hatched, work by stream.

    Lines lead from the end of a kernel to the call that waited for it.
    """
    return draw_windows([window(capture)], [title], width=width)


def caption(shown: Window) -> str:
    """A window in words: `step 187: 819 µs, 130 µs of them waiting inside driver calls`."""

    def time(ns: int) -> str:
        return f"{ns / _SCALE:.0f} µs" if ns >= 10 * _SCALE else f"{ns / _SCALE:.2g} µs"

    length = time(shown.length)
    waited = f"{time(shown.blocked_ns)} of them waiting inside driver calls" if shown.blocked_ns else "no waiting"
    return f"{shown.title}: {length}, {waited}" if shown.title else f"{length}, {waited}"


def draw_windows(windows: list[Window], titles: list[str], *, width: float = 11.0) -> Figure:
    """Draws windows below each other, all with the same scale of time. An empty title is the window's caption."""
    heights = [len(shown.ranges) + 1.2 + 1.15 * max(len(shown.work), 1) for shown in windows]
    figure = Figure(figsize=(width, 0.6 + sum(0.32 * height + 0.45 for height in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(windows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    reach = max(shown.length for shown in windows) / _SCALE
    for axes, shown, title in zip(panels, windows, titles, strict=True):
        _panel(axes, shown, reach, width)
        axes.set_title(title or caption(shown), loc="left", fontsize=10)
    panels[-1].set_xlabel("µs", fontsize=8)
    panels[-1].set_xlim(0, reach)
    bars = [bar for shown in windows for bar in shown.calls]
    present = {KINDS.get(bar.group, OTHER) for bar in bars}
    patches = [Patch(color=colour, label=text) for text, colour in LEGEND.items() if colour in present]
    if any(bar.waited for bar in bars):
        patches.append(Patch(facecolor="white", edgecolor=INK, hatch="//////", linewidth=0.3, label="waited"))
    figure.legend(handles=patches, loc="outside lower center", ncols=max(1, len(patches)), frameon=False, fontsize=8)
    return figure


def _panel(axes: Any, shown: Window, reach: float, width: float) -> None:
    labels: list[tuple[float, str]] = []
    y = 0.0
    for depth, lane in enumerate(shown.ranges):
        _bars(axes, lane, y, 0.8, [PHASES.get(bar.group, "#dddddd") for bar in lane])
        _texts(axes, lane, y + 0.4, reach, width)
        if depth == 0:
            labels.append((y + 0.4, "ranges"))
        y += 1
    y += 0.25
    _bars(axes, shown.calls, y, 1.3, [KINDS.get(bar.group, OTHER) for bar in shown.calls])
    waiting = [(bar.start / _SCALE, bar.waited / _SCALE) for bar in shown.calls if bar.waited]
    if waiting:
        axes.broken_barh(waiting, (y, 1.3), facecolor="none", edgecolor=INK, hatch="//////", linewidth=0.3)
    labels.append((y + 0.65, "driver calls"))
    calls_bottom = y + 1.3
    y += 1.8
    work_top = y
    for name, bars in shown.work.items():
        _bars(axes, bars, y, 0.9, [PHASES.get(bar.group, "#bbbbbb") for bar in bars])
        labels.append((y + 0.45, name))
        y += 1.15
    for over, returned in shown.waits:
        if over >= 0:
            axes.plot([over / _SCALE, returned / _SCALE], [work_top, calls_bottom], color=INK, linewidth=0.4, alpha=0.6)
    axes.set_ylim(y, -0.2)
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels], fontsize=8)
    axes.tick_params(left=False, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, bars: list[Bar], y: float, height: float, colours: list[str]) -> None:
    spans = [(bar.start / _SCALE, (bar.end - bar.start) / _SCALE) for bar in bars]
    axes.broken_barh(spans, (y, height), facecolors=colours, edgecolor="white", linewidth=0.25)


def _texts(axes: Any, bars: list[Bar], y: float, reach: float, width: float) -> None:
    """Writes names into the bars that have room for them."""
    for bar in bars:
        room = (bar.end - bar.start) / _SCALE / reach * width * 72 * 0.85
        if room > 4.2 * len(bar.text):
            middle = (bar.start + bar.end) / 2 / _SCALE
            axes.text(middle, y, bar.text, ha="center", va="center", fontsize=6.5, color=INK, clip_on=True)
