"""Figures with one message each, for a front page or a talk: few bars, large text, a label on each bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vramlab_analysis import style

LIGHT = "#D9D9D9"
SIZE = 12


def stacked(
    title: str,
    rows: Mapping[str, Sequence[float]],
    parts: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    unit: str,
) -> Figure:
    """A horizontal bar for each row, stacked from parts with their colours; `labels` are behind the bars.

    The names of the parts are above those of the first bar, or in a row above it where one of these is short.
    """
    figure, axes = style.new(width=9.0, height=1.5 + 0.6 * len(rows))
    longest = max(sum(values) for values in rows.values())
    first = next(iter(rows.values()))
    direct = min(first) > 0.12 * longest
    for number, (part, colour) in enumerate(parts.items()):
        place = sum(first[:number]) if direct else 0.35 * number * longest
        words = part if direct else f"■ {part}"
        axes.text(place, -0.42, words, color=_dark(colour), fontsize=SIZE - 1, fontweight="bold")
    for row, (name, values) in enumerate(rows.items()):
        left = 0.0
        for colour, value in zip(parts.values(), values, strict=True):
            axes.barh(row, value, left=left, height=0.62, color=colour)
            left += value
        axes.text(left + 0.01 * longest, row, labels[name], va="center", fontsize=SIZE)
    finish(axes, title, list(rows), unit)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.01 * longest])
    axes.set_xlim(0, 1.28 * longest)
    return figure


def bars(panels: Mapping[str, Mapping[str, tuple[float, str]]], colours: Mapping[str, str], title: str) -> Figure:
    """A panel of horizontal bars for each group: by name a value and its label."""
    height = 1.3 + 0.55 * max(map(len, panels.values()))
    figure, axes = style.new(1, len(panels), width=9.0, height=height, sharey=True, sharex=True, squeeze=False)
    longest = max(value for rows in panels.values() for value, _ in rows.values())
    for one, (name, rows) in zip(axes[0], panels.items(), strict=True):
        for row, (key, (value, label)) in enumerate(rows.items()):
            one.barh(row, value, height=0.62, color=colours[key])
            one.text(value + 0.02 * longest, row, label, va="center", fontsize=SIZE)
        finish(one, name, list(rows), "")
        one.set_xlim(0, 1.6 * longest)
    figure.suptitle(title, x=0.01, ha="left", fontsize=SIZE + 2, fontweight="bold")
    return figure


def finish(axes: Axes, title: str, names: list[str], unit: str) -> None:
    """Names of the rows, the title and the unit, without other lines."""
    axes.set_yticks(range(len(names)), names, fontsize=SIZE)
    axes.set_ylim(len(names) - 0.5, -0.8)
    axes.tick_params(left=False, labelsize=SIZE)
    axes.spines["left"].set_visible(False)
    if unit:
        axes.set_xlabel(unit, fontsize=SIZE - 1)
    else:
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    axes.set_title(title, fontsize=SIZE + 1, fontweight="bold")


def _dark(colour: str) -> str:
    """A colour that can be read as text on white."""
    return "#777777" if colour == LIGHT else colour
