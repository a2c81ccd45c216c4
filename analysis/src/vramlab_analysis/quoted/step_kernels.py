"""Where the time of a training step goes, as `experiments/nsight/step_kernels.py` records it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes
from vramlab_analysis.quoted.parts import listed

# Features and classes of MNIST, and linear layers.
INPUTS, CLASSES, LAYERS = 784, 10, 4
BYTES = {"f32": 4, "tf32": 4, "f16": 2, "bf16": 2}
# What names of launches begin with, by the columns of the table.
FORWARD = ("linear_forward",)
BACK = ("linear_input", "linear_gradient", "linear_update")
# Parts of names of kernels that are no longer there: steps of records that launched one are not told.
REMOVED = ("linear_backward", "f32x3")


@cache
def _steps() -> list[dict[str, Any]]:
    """The newest record's steps of kernels that are still there, by type and width.

    Raises AnalysisError where there is no record.
    """
    paths = sorted(repository.results().glob("*-step-kernels.jsonl"))
    if not paths:
        raise AnalysisError("experiments/results: no step-kernels.jsonl.")
    steps: list[dict[str, Any]] = [parse_json(line, str(paths[-1])) for line in read_bytes(paths[-1]).splitlines()]
    steps = [step for step in steps if not any(part in one["name"] for one in step["kernels"] for part in REMOVED)]
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
    heads = [
        *["launches", "us a step", "forward", "way back", "other launches"],
        *["MB from and to memory", "MB of three passes over the weights", "TB/s"],
    ]
    lines = [f"| type and width | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for step in _steps():
        kernels = step["kernels"]
        forward, back = (
            sum(one["us"] for one in kernels if one["name"].startswith(names)) for names in (FORWARD, BACK)
        )
        times = [step["step_us"], forward, back, sum(one["us"] for one in kernels) - forward - back]
        moved, least = sum(map(_moved, kernels)), least_bytes(step["width"], step["dtype"])
        lines.append(
            f"| {step['dtype']}, {step['width']} | {len(kernels)} | {' | '.join(f'{us:,.1f}' for us in times)} | "
            f"{moved / 1e6:,.0f} | {least / 1e6:,.0f} | {moved / step['step_us'] / 1e6:.2f} |"
        )
    return "\n".join(lines) + "\n"


def bounds() -> str:
    """What bounds the narrowest step, and what the widest."""
    narrow, wide = (edge(step["width"] for step in _steps()) for edge in (min, max))
    narrowest, widest = ([step for step in _steps() if step["width"] == width] for width in (narrow, wide))
    shortest = min(one["us"] for step in narrowest for one in step["kernels"])
    mean = {step["dtype"]: sum(one["us"] for one in step["kernels"]) / len(step["kernels"]) for step in narrowest}
    rates = {step["dtype"]: max(_moved(one) / one["us"] for one in step["kernels"]) / 1e6 for step in widest}
    return (
        f"At width {narrow} launches are what a step is made of: the shortest takes {shortest:.1f} us, and they take "
        f"{listed(f'{us:.1f} in {dtype}' for dtype, us in mean.items())} on average, nearly all of it the way into and "
        f"out of a kernel. At width {wide} the weights are: the launch that moves them fastest reaches, in TB/s, "
        f"{listed(f'{rate:.1f} in {dtype}' for dtype, rate in rates.items())}."
    )
