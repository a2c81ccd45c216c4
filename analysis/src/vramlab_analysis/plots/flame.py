"""Flame graphs from collapsed stacks (`frame;frame;… count`), drawn with the root at the top."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vramlab_analysis import style
from vramlab_analysis.errors import AnalysisError, read_bytes

TINTS = ("#F4C36B", "#E69F00", "#F0B040", "#E08A1E", "#F2D08B")


@dataclass
class Frame:
    """A function at its position in the stack; `samples` include those of its callees."""

    name: str
    samples: int = 0
    callees: dict[str, Frame] = field(default_factory=dict)


def load(path: str | Path) -> Frame:
    """The tree of a file of collapsed stacks, plain or gzipped.

    Raises AnalysisError when a line is not a stack or there is none.
    """
    path = Path(path)
    if not path.is_file():
        raise AnalysisError(f"{path}: no such file; `experiments/flame` records it.")
    root = Frame("all")
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        stack, _, count = line.rpartition(" ")
        if not stack or not count.isdigit():
            raise AnalysisError(f"{path}: line {number}: not a collapsed stack, `frame;frame;… count`.")
        at = root
        at.samples += int(count)
        for name in stack.split(";"):
            at = at.callees.setdefault(name, Frame(name))
            at.samples += int(count)
    if not root.samples:
        raise AnalysisError(f"{path}: no stack.")
    return root


def share(root: Frame, *words: str) -> float:
    """Share of all samples in stacks with a function whose name contains one of `words`."""

    def under(frame: Frame) -> int:
        if any(word in frame.name for word in words):
            return frame.samples
        return sum(under(callee) for callee in frame.callees.values())

    return under(root) / root.samples


def icicle(root: Frame, *, title: str = "", depth: int = 18, least: float = 0.004) -> Figure:
    """The tree as an icicle: width is the share of samples, callees below callers, widest first.

    Frames narrower than `least` and deeper than `depth` are left out.
    """
    deepest = min(_depth(root, least * root.samples), depth)
    figure, axes = style.new(width=9.0, height=0.7 + 0.2 * deepest)
    _draw(axes, root, 0.0, 0, root.samples, depth, least)
    axes.set(xlim=(0, 1), ylim=(deepest, 0))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set(xlabel=f"share of the host's time ({root.samples:,} samples)", title=title)
    return figure


def _depth(frame: Frame, least: float) -> int:
    return 1 + max((_depth(callee, least) for callee in frame.callees.values() if callee.samples >= least), default=0)


def _draw(axes: Axes, frame: Frame, left: float, level: int, total: int, depth: int, least: float) -> None:
    wide = frame.samples / total
    if level >= depth or wide < least:
        return
    tint = TINTS[sum(frame.name.encode()) % len(TINTS)] if level else style.RULE
    axes.barh(level + 0.5, wide, left=left, height=0.96, color=tint, edgecolor="white", linewidth=0.4)
    room = int(wide * 150)
    if room >= 4:
        name = frame.name if len(frame.name) <= room else frame.name[: room - 1] + "…"
        axes.text(left + 0.002, level + 0.5, name, va="center", fontsize=6.5, clip_on=True, color="#222222")
    for callee in sorted(frame.callees.values(), key=lambda one: (-one.samples, one.name)):
        _draw(axes, callee, left, level + 1, total, depth, least)
        left += callee.samples / total
