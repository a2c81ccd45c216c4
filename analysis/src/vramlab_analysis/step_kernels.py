"""The kernels of a training step, recorded by `experiments/nsight/step_kernels.py`."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, read_json_lines
from vramlab_analysis.pages.registry import markdown

# Features and classes of MNIST, and linear layers.
INPUTS, CLASSES, LAYERS = 784, 10, 4
BYTES = {"f32": 4, "tf32": 4, "f16": 2, "bf16": 2}
# Beginnings of the names of launches, by the columns of the table.
FORWARD = ("linear_forward",)
BACK = ("linear_input", "linear_gradient", "linear_update")
# Parts of names of removed kernels: recorded steps that launched one are left out.
REMOVED = ("linear_backward", "f32x3")


def _file() -> Path:
    """The newest record.

    Raises AnalysisError where there is none.
    """
    paths = repository.listing().files("step-kernels.jsonl")
    if not paths:
        raise AnalysisError("experiments/results: no step-kernels.jsonl.")
    return paths[-1]


@cache
def _steps() -> list[dict[str, Any]]:
    """The newest record's steps without removed kernels, by type and width."""
    steps: list[dict[str, Any]] = [
        step
        for step in read_json_lines(_file())
        if not any(part in kernel["name"] for kernel in step["kernels"] for part in REMOVED)
    ]
    return sorted(steps, key=lambda step: (step["dtype"], step["width"]))


def least_bytes(width: int, dtype: str) -> int:
    """Bytes of three passes over the weights."""
    widths = [INPUTS, *[width] * (LAYERS - 1), CLASSES]
    return 3 * BYTES[dtype] * sum(one * other for one, other in pairwise(widths))


def _moved(kernel: dict[str, Any]) -> int:
    """Bytes from and to memory."""
    return int(kernel["read_bytes"] + kernel["written_bytes"])


def table() -> str:
    """Times and bytes of each step."""
    head = ["launches", "us a step", "forward", "backward", "other launches"]
    head += ["MB from and to memory", "MB of three passes over the weights", "TB/s"]
    body = []
    for step in _steps():
        kernels = step["kernels"]
        forward, back = (
            sum(kernel["us"] for kernel in kernels if kernel["name"].startswith(names)) for names in (FORWARD, BACK)
        )
        times = [step["step_us"], forward, back, sum(kernel["us"] for kernel in kernels) - forward - back]
        moved, least = sum(map(_moved, kernels)), least_bytes(step["width"], step["dtype"])
        body.append([
            f"{step['dtype']}, {step['width']}", str(len(kernels)), *(f"{us:,.1f}" for us in times),
            f"{moved / 1e6:,.0f}", f"{least / 1e6:,.0f}", f"{moved / step['step_us'] / 1e6:.2f}",
        ])  # fmt: skip
    return markdown(["type and width", *head], body)


def values() -> dict[str, Any]:
    """Of the narrowest step the shortest and the mean launch by type in us, of the widest the highest rate in TB/s; the
    GPU, builds and day of the record."""
    narrow, wide = (edge(step["width"] for step in _steps()) for edge in (min, max))
    found: dict[str, Any] = {"narrow": {"width": narrow}, "wide": {"width": wide}, "day": _file().name[:10]}
    found |= {key: " and ".join(dict.fromkeys(str(step[key]) for step in _steps())) for key in ("gpu", "build")}
    for step in _steps():
        times = [kernel["us"] for kernel in step["kernels"]]
        if step["width"] == narrow:
            found["narrow"][step["dtype"]] = {"min": min(times), "mean": sum(times) / len(times)}
        if step["width"] == wide:
            found["wide"][step["dtype"]] = max(_moved(kernel) / kernel["us"] for kernel in step["kernels"]) / 1e6
    return found
