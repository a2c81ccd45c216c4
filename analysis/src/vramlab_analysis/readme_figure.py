"""Draws the figures of the documents from the recorded results, for readers who have no Python.

From the repository's root: `vramlab-analysis readme-figures`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import histograms, inside, output, repository, style, truth
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import machine, newest, results
from vramlab_analysis.measures import train_pace
from vramlab_analysis.nsight import attribute, load, own_trace, timeline
from vramlab_analysis.nsight.attribution import Attribution
from vramlab_analysis.plots import latency, lines


def captured(allocator: str) -> Attribution:
    """The newest capture of training steps under an allocator."""
    return attribute(load(newest("nsight", f"{allocator}-sync-never")))


def step(allocator: str) -> Figure:
    """One training step on the GPU, as captured: ranges, driver calls with their waiting, kernels."""
    result = captured(allocator)
    return timeline.draw(result, title=f"{gpu(result)}, one training step under {allocator}", width=9.0)


def gpu(result: Attribution) -> str:
    """The GPU of a capture in words."""
    return machine(result.capture.source["devices"][0])


def under_the_profiler(allocator: str, result: Attribution, length_ns: int) -> tuple[float, float]:
    """Microseconds of a captured step, and of the same step without the profiler: the median of the runs of `latency`.

    Raises AnalysisError when those runs did other work than the captured one.
    """
    paces = []
    about = own_trace.read(Path(result.capture.path)).about["settings"]
    for entry in results("latency", "gpu").select(alloc=allocator):
        other = [key for key in SAME_WORK if key in about and about[key] != entry.record.settings.get(key)]
        pace = train_pace(entry.record)
        if other or pace is None:
            raise AnalysisError(f"{entry.path}: not the work of {result.capture.path} ({', '.join(other)}).")
        paces.append(pace)
    return length_ns / 1e3, statistics.median(paces)


def three_timelines() -> Figure:
    """One training step under each allocator on one scale of time, and how much of each is the profiler's own time."""
    windows, titles = [], []
    for allocator in ("naive", "caching", "stream-ordered"):
        result = captured(allocator)
        shown = timeline.window(result)
        # Single operations have their marks below; the outer ranges say where in the step they are.
        shown.ranges = shown.ranges[1:OUTER]
        profiled, plain = under_the_profiler(allocator, result, shown.length)
        windows.append(shown)
        titles.append(
            f"{allocator}: {profiled:.0f} µs as captured, of which {profiled - plain:.0f} µs "
            f"({100 * (1 - plain / profiled):.0f} %) are the profiler's own; without it a step takes {plain:.0f} µs"
        )
    figure = timeline.draw_windows(windows, titles, width=9.0)
    figure.axes[-1].set_xlabel(
        f"µs. {gpu(result)}: one training step, 4 layers of width 784, batch 64, MNIST, captured by Nsight Systems.\n"
        "Without it: medians of the runs of the spec `latency`, the same work on another such machine. What a\n"
        "captured step takes longer is the profiler's, with the ranges and the trace that a captured run writes.",
        fontsize=8,
    )
    return figure


def time_graph() -> Figure:
    """Step time against width, ours and PyTorch's, with the ratio below."""
    experiment = results("width", "gpu")
    title = f"{experiment.machine}: batch 32, 4 layers, f32; below: ratio to caching"
    return lines.width(experiment.frame(), title=title)


def latency_spectrum() -> Figure:
    """Percentiles of allocate and free under each allocator."""
    experiment = results("latency", "gpu")
    parts = [
        histograms.spectrum([one for entry in experiment.select(alloc=name) for one in entry.record.histograms], "all")
        .with_columns(group=pl.lit(name))
        for name in ("naive", "caching", "stream-ordered")
    ]  # fmt: skip
    return latency.spectrum(pl.concat(parts), title=f"{experiment.machine}: one call of the allocator")


# What tells the work of two runs apart.
SAME_WORK = ("allocator", "dataset", "hidden", "layers", "batch", "sync", "loader", "dtype", "gemm", "launch", "fuse")
# Levels of ranges that a picture of whole steps has: the step, its parts, the layers.
OUTER = 4
DRAWN: dict[str, Callable[[], Figure]] = {
    "timeline.svg": three_timelines,
    "step_naive.png": partial(step, "naive"),
    "step_caching.png": partial(step, "caching"),
    "time_graph.png": time_graph,
    "latency_spectrum.png": latency_spectrum,
    "advise.png": truth.draw,
    "limits.png": inside.quoted_curves,
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
