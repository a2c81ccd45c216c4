"""Draws the figures of the documents from the recorded results.

From the repository's root: `vramlab-analysis readme-figures`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import captures, driver_trace, histograms, inside, output, repository, style, truth
from vramlab_analysis.calls import MEMORY_CALLS, account
from vramlab_analysis.captures import Capture
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import machine, newest, results
from vramlab_analysis.measures import train_pace
from vramlab_analysis.pages.cells import dates
from vramlab_analysis.plots import headlines, latency, lines, timeline


def captured(allocator: str) -> Capture:
    """The newest capture of training steps under an allocator."""
    return captures.load(newest("nsight", f"{allocator}-sync-never"))


def step(allocator: str) -> Figure:
    """One training step on the GPU, as captured: ranges, driver calls with their waiting, kernels."""
    capture = captured(allocator)
    return timeline.draw(capture, title=f"{gpu(capture)}, one training step under {allocator}", width=9.0)


def gpu(capture: Capture) -> str:
    """The GPU of a capture in words."""
    return machine(capture.document["devices"][0])


def under_the_profiler(allocator: str, capture: Capture, length_ns: int) -> tuple[float, float]:
    """Microseconds of a captured step, and of the same step without the profiler: the median of the runs of `latency`.

    Raises AnalysisError when those runs did different work.
    """
    paces = []
    about = driver_trace.read(Path(capture.path)).about["settings"]
    for entry in results("latency", "gpu").select(alloc=allocator):
        other = [key for key in SAME_WORK if key in about and about[key] != entry.record.settings.get(key)]
        pace = train_pace(entry.record)
        if other or pace is None:
            raise AnalysisError(f"{entry.path}: different work than {capture.path} ({', '.join(other)}).")
        paces.append(pace)
    return length_ns / 1e3, statistics.median(paces)


def three_timelines() -> Figure:
    """One training step under each allocator on one scale of time, and the profiler's share of each."""
    windows, titles = [], []
    for allocator in ("naive", "caching", "stream-ordered"):
        capture = captured(allocator)
        shown = timeline.window(capture)
        # Single operations have their marks below; the outer ranges show their part of the step.
        shown.ranges = shown.ranges[1:OUTER]
        profiled, plain = under_the_profiler(allocator, capture, shown.length)
        windows.append(shown)
        titles.append(
            f"{allocator}: {profiled:.0f} µs as captured, of which {profiled - plain:.0f} µs "
            f"({100 * (1 - plain / profiled):.0f} %) are the profiler's own; without it a step takes {plain:.0f} µs"
        )
    figure = timeline.draw_windows(windows, titles, width=9.0)
    figure.axes[-1].set_xlabel(
        f"µs. {gpu(capture)}: one training step, 4 layers of width 784, batch 64, MNIST, captured by Nsight Systems.\n"
        "Without it: medians of the runs of the spec `latency`, the same work on another such machine. What a\n"
        "captured step takes longer is the profiler's, with the ranges and the trace that a captured run writes.",
        fontsize=8,
    )
    return figure


def time_graph() -> Figure:
    """Step time against width, the trainer's and PyTorch's, with the ratio below."""
    experiment = results("width", "gpu")
    title = f"{experiment.machine}: batch 32, 4 layers, f32; below: ratio to caching"
    return lines.width(experiment.frame(), title=title)


def latency_spectrum() -> Figure:
    """Percentiles of allocate and free under each allocator."""
    experiment = results("latency", "gpu")
    parts = [
        histograms.spectrum([log for entry in experiment.select(alloc=name) for log in entry.record.histograms], "all")
        .with_columns(group=pl.lit(name))
        for name in ("naive", "caching", "stream-ordered")
    ]  # fmt: skip
    return latency.spectrum(pl.concat(parts), title=f"{experiment.machine}: one call of the allocator")


def memory_calls() -> Figure:
    """Host time of a training step in memory calls, waiting and working, and in all else, under each allocator."""
    experiment = results("synchronise", "gpu")
    rows: dict[str, tuple[float, ...]] = {}
    labels = {}
    for name in ("naive", "stream-ordered", "caching"):
        runs = [entry.record for entry in experiment.select(alloc=name, sync="never")]
        accounts = [account(run, per="step").filter(pl.col("call").is_in(MEMORY_CALLS)) for run in runs]
        total, blocked = (
            statistics.median(float(one[key].sum()) for one in accounts) for key in ("total_us", "blocked_us")
        )
        step = statistics.median(pace for run in runs if (pace := train_pace(run)) is not None)
        rows[name] = (blocked, total - blocked, step - total)
        labels[name] = f"{step:.0f} µs, {100 * total / step:.0f} % in memory calls"
    parts = {"waiting": style.VERMILION, "working": style.ORANGE, "all other work": headlines.LIGHT}
    share = 100 * sum(rows["naive"][:2]) / sum(rows["naive"])
    title = f"Without a pool, {share:.0f} % of a training step is spent in memory calls"
    day = dates(entry.meta["started_at"] for entry in experiment.runs)
    where = f"{experiment.machine}, {day}, width 784, batch 64"
    unit = f"host time of a step, µs: waiting and working in memory calls ({where})"
    return headlines.stacked(title, rows, parts, labels, unit=unit)


def limits() -> Figure:
    """The smallest memory limit in which each of two programs runs, above active memory."""
    runs = inside.load()
    arms = {"native": "PyTorch, defaults", "expandable": "PyTorch, expandable segments", "remap": "VramLab, remap"}
    panels: dict[str, dict[str, tuple[float, str]]] = {}
    for program in ("gpt2", "resnet50"):
        panel = panels[inside.PROGRAMS[program]] = {}
        for arm, words in arms.items():
            least = inside.smallest(inside.curve(runs, program, arm))
            if least is None:
                raise AnalysisError(f"{program} under {arm}: no limit in which it ran.")
            step = inside.over_unlimited(runs, program, arm)[least]
            slower = f", steps {100 * (step - 1):.0f} % longer" if step > 1.005 else ""
            panel[words] = (least - 1, f"+{100 * (least - 1):.3g} %{slower}")
    colours = dict(zip(arms.values(), (headlines.LIGHT, style.SKY, style.VERMILION), strict=True))
    most = {words: max(100 * panel[words][0] for panel in panels.values()) for words in arms.values()}
    ours, theirs = most[arms["remap"]], most[arms["native"]]
    title = f"Least memory above active: {ours:.3g} % with remap, {theirs:.3g} % with PyTorch's defaults"
    return headlines.bars(panels, colours, title)


def predictions() -> Figure:
    """The share of `advise`'s predictions that are exact, within 1 % and further off, by the kind of recording."""
    values = truth.values()
    kinds = {
        "held-out programs": "heldout",
        "known programs": "easy",
        "private pools": "pools",
        "under a limit": "limit",
        "deferred frees": "deferred",
    }
    rows: dict[str, tuple[float, ...]] = {}
    labels = {}
    for words, key in kinds.items():
        one = values[key]
        counts = (one["exact"], one["near"] - one["exact"], one["count"] - one["near"])
        rows[words] = tuple(100 * count / one["count"] for count in counts)
        labels[words] = f"{one['near']} of {one['count']} within 1 %"
    parts = {"exact to the byte": style.BLUE, "within 1 %": style.SKY, "further off": headlines.LIGHT}
    near, count = (sum(values[key][what] for key in kinds.values()) for what in ("near", "count"))
    title = f"advise predicts {near} of {count} peaks of PyTorch within 1 %"
    return headlines.stacked(title, rows, parts, labels, unit="share of predictions, %; PyTorch 2.11 on an H200")


# Settings that distinguish the work of two runs.
SAME_WORK = ("allocator", "dataset", "hidden", "layers", "batch", "sync", "loader", "dtype", "gemm", "launch", "fuse")
# Levels of ranges in a picture of whole steps: the step, its parts, the layers.
OUTER = 4
DRAWN: dict[str, Callable[[], Figure]] = {
    "memory_calls.svg": memory_calls,
    "timeline.svg": three_timelines,
    "step_naive.png": partial(step, "naive"),
    "step_caching.png": partial(step, "caching"),
    "time_graph.png": time_graph,
    "latency_spectrum.png": latency_spectrum,
    "advise.png": predictions,
    "limits.png": limits,
}


def draw(out: Path | None = None) -> list[Path]:
    """Draws every figure into `out` (`analysis/figures`) and returns the files.

    Raises AnalysisError when results are missing or a file cannot be written.
    """
    folder = out or repository.root() / "analysis" / "figures"
    written = []
    for name, figure in DRAWN.items():
        path = folder / name
        data = style.png(figure(), dpi=130) if path.suffix == ".png" else style.svg(figure()).encode()
        output.folder(folder)
        output.write(path, data)
        written.append(path)
    return written
