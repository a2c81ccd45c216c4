"""A picture of a capture: ranges, driver calls with their waiting, the device's work, on one axis of time.

`window` gives the data and needs Python alone; `draw` makes a figure and needs matplotlib.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramlab_analysis import output
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight.attribution import Attribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    waits: list[tuple[int, int, int]]  # end of a kernel, end of the wait for it, index in calls
    blocked_ns: int


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """`3..4` as a pair."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if not found or int(found[1]) < 1 or int(found[2] or found[1]) < int(found[1]):
        raise AnalysisError(f"--steps {text}: write one step or two as A..B, counted from 1 in the capture.")
    return int(found[1]), int(found[2] or found[1])


def window(
    result: Attribution, steps: tuple[int, int] | None = None, start: int | None = None, end: int | None = None
) -> Window:
    """The contents of an interval or of some steps: first and last, counted from 1 in the capture.

    Without either it is one step from the middle of the capture, the one with the median duration, or all of a capture
    without steps. Raises AnalysisError when the capture has no such steps.
    """
    capture = result.capture
    title = ""
    if start is None or end is None:
        start, end, title = _steps(result, steps)
    shown = [one for one in capture.ranges if one.start < end and one.end > start]
    depth = max((one.level for one in shown), default=-1) + 1
    lanes: list[list[Bar]] = [[] for _ in range(depth)]
    for one in shown:
        lanes[one.level].append(
            Bar(max(one.start, start) - start, min(one.end, end) - start, one.text, _phase(one.path))
        )
    waited = {one.call: one for one in result.blocked}
    calls: list[Bar] = []
    waits: list[tuple[int, int, int]] = []
    blocked = 0
    for index, call in enumerate(capture.calls):
        if call.start >= end or call.end <= start:
            continue
        bar = Bar(max(call.start, start) - start, min(call.end, end) - start, call.name, call.kind)
        if found := waited.get(index):
            bar.waited = min(found.blocked_ns, bar.end - bar.start)
            blocked += found.blocked_ns
            waits.append((capture.work[found.work].end - start, bar.start + bar.waited, len(calls)))
        calls.append(bar)
    work: dict[str, list[Bar]] = {}
    for one_work in capture.work:
        if one_work.start < end and one_work.end > start:
            name = capture.streams.get(one_work.stream) or f"stream {one_work.stream}"
            phase = _phase(capture.launch_path(one_work))
            bar = Bar(max(one_work.start, start) - start, min(one_work.end, end) - start, one_work.name, phase)
            work.setdefault(name, []).append(bar)
    return Window(title, end - start, [lane for lane in lanes if lane], calls, work, waits, blocked)


def _steps(result: Attribution, steps: tuple[int, int] | None) -> tuple[int, int, str]:
    found = result.capture.steps
    if not found:
        if steps is not None:
            raise AnalysisError(
                f"{result.capture.path}: there are no ranges `step N` in the capture; name times instead."
            )
        return *result.capture.span, ""
    if steps is None:
        middle = sorted(found[len(found) // 4 :] or found, key=lambda one: one.end - one.start)
        chosen = middle[len(middle) // 2]
        return chosen.start, chosen.end, chosen.text
    first, last = steps
    if last > len(found):
        raise AnalysisError(f"{result.capture.path}: has {len(found)} steps; {first}..{last} exceeds them.")
    text = found[first - 1].text + (f" to {found[last - 1].text}" if last > first else "")
    return found[first - 1].start, found[last - 1].end, text


def _phase(path: str) -> str:
    return next((part for part in path.split("/") if part in PHASES), "")


def draw(
    result: Attribution, steps: tuple[int, int] | None = None, *, title: str = "", width: float = 11.0, **times: Any
) -> Figure:
    """Draws a window: NVTX ranges by depth, driver calls by kind with waiting hatched, work by stream.

    Lines lead from the end of a kernel to the call that waited for it. `times` are `start` and `end`, see `window`.
    Needs matplotlib.
    """
    return draw_windows([window(result, steps, **times)], [title], width=width)


def caption(shown: Window) -> str:
    """A window in words: `step 187: 819 µs, 130 µs of them waiting inside driver calls`."""

    def time(ns: int) -> str:
        return f"{ns / _SCALE:.0f} µs" if ns >= 10 * _SCALE else f"{ns / _SCALE:.2g} µs"

    length = time(shown.length)
    waited = f"{time(shown.blocked_ns)} of them waiting inside driver calls" if shown.blocked_ns else "no waiting"
    return f"{shown.title}: {length}, {waited}" if shown.title else f"{length}, {waited}"


def draw_windows(windows: list[Window], titles: list[str], *, width: float = 11.0) -> Figure:
    """Draws windows below each other, all with the same scale of time. An empty title is the window's caption."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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
    for over, returned, _ in shown.waits:
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


def save(figure: Figure, path: Path) -> None:
    """Writes PNG or SVG, by the file's name; the same bytes each time."""
    if path.suffix not in (".png", ".svg"):
        raise AnalysisError(f"{path}: name a file that ends in .png or .svg.")
    import matplotlib

    data = io.BytesIO()
    if path.suffix == ".svg":
        # Without a salt, ids in the file are random.
        with matplotlib.rc_context({"svg.hashsalt": "timeline"}):
            figure.savefig(data, format="svg", metadata={"Date": None})
    else:
        figure.savefig(data, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    output.folder(path.parent)
    output.write(path, data.getvalue())
