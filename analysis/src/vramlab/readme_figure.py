"""Draws the figures of the README from the recorded results, for readers who have no Python.

From the repository's root: `vramlab readme-figures`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from vramlab import histograms, output, repository, style
from vramlab.calls import host_parts
from vramlab.errors import AnalysisError, read_json
from vramlab.experiments import results
from vramlab.nsight import attribute, load, timeline
from vramlab.plots import bars, latency, lines


def recorded() -> Path:
    """The results that the README quotes."""
    return repository.root() / "experiments" / "results" / "2026-11-21-h200"


def epoch_host_time() -> Figure:
    """Where the host's time goes in one epoch, by allocator."""
    path = recorded() / "cuda.json"
    if not path.is_file():
        raise AnalysisError(f"{path}: not there; `experiments compare --json` writes it.")
    runs: list[dict[str, Any]] = read_json(path)
    rows = [
        (
            run["arm"]
            .replace(":release_threshold=0 --sync step", ",\nthreshold 0, sync each step")
            .replace(" --release-threshold 0 --sync step", ",\nthreshold 0, sync each step"),
            host_parts(run["driver_calls"], run["epoch_s"] * 1e3),
        )
        for run in runs
    ]
    return bars.stacked(
        rows,
        style.HOST_PARTS,
        unit="host time of one epoch (938 steps and validation), ms",
        title=f"{runs[0]['device']}: 4 layers of width 784, batch 64, MNIST",
        total=lambda value: f"{value:.0f} ms",
    )


def step(allocator: str) -> Figure:
    """One training step on the H200, as captured: ranges, driver calls with their waiting, kernels."""
    result = attribute(load(recorded() / "nsight" / f"{allocator}-sync-never"))
    return timeline.draw(result, title=f"NVIDIA H200, one training step under {allocator}", width=9.0)


def time_graph() -> Figure:
    """Step time against width, ours and PyTorch's, with the ratio below."""
    return lines.width(
        results("width", "h200").frame(), title="NVIDIA H200: batch 32, 4 layers, f32; below: ratio to caching"
    )


def latency_spectrum() -> Figure:
    """Percentiles of allocate and free under each allocator."""
    experiment = results("latency", "h200")
    parts = [
        histograms.spectrum([one for entry in experiment.select(alloc=name) for one in entry.record.histograms], "all")
        .with_columns(group=pl.lit(name))
        for name in ("naive", "caching", "stream-ordered")
    ]  # fmt: skip
    return latency.spectrum(pl.concat(parts), title="NVIDIA H200: one call of the allocator")


DRAWN: dict[str, Callable[[], Figure]] = {
    "epoch_host_time.svg": epoch_host_time,
    "step_naive.png": partial(step, "naive"),
    "step_caching.png": partial(step, "caching"),
    "time_graph.png": time_graph,
    "latency_spectrum.png": latency_spectrum,
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
