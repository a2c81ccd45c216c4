"""Where the time of a training step goes, as `experiments/nsight/step_kernels.py` records it."""

from __future__ import annotations

from functools import cache
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes
from vramlab_analysis.quoted.parts import listed

# Features and classes of MNIST, and linear layers.
INPUTS, CLASSES, LAYERS = 784, 10, 4
BYTES = {"f32": 4, "f32x3": 4, "tf32": 4, "f16": 2, "bf16": 2}
# What a launch's name begins with, by the columns of the table.
PARTS = {
    "forward": ("linear_forward",),
    "way back": ("linear_input", "linear_gradient", "linear_update", "linear_backward"),
}


@cache
def _steps() -> list[dict[str, Any]]:
    """The newest record's steps, by type and width.

    Raises AnalysisError where there is no record.
    """
    paths = sorted(repository.results().glob("*-step-kernels.jsonl"))
    if not paths:
        raise AnalysisError("experiments/results: no step-kernels.jsonl.")
    steps: list[dict[str, Any]] = [parse_json(line, str(paths[-1])) for line in read_bytes(paths[-1]).splitlines()]
    return sorted(steps, key=lambda step: (step["dtype"], step["width"]))


def least_bytes(width: int, dtype: str) -> int:
    """Bytes of the weights that a step must move where no cache holds them: read on the way forward, read and written back."""
    widths = [INPUTS, *[width] * (LAYERS - 1), CLASSES]
    return 3 * BYTES[dtype] * sum(one * other for one, other in zip(widths, widths[1:], strict=False))


def table() -> str:
    """Times and bytes of each step."""
    lines = [
        f"| type and width | launches | us a step | {' | '.join(PARTS)} | other launches | MB from and to memory | MB of three passes over the weights | TB/s |",
        "|---|" + "--:|" * (len(PARTS) + 6),
    ]
    for step in _steps():
        kernels = step["kernels"]
        parts = [sum(one["us"] for one in kernels if one["name"].startswith(names)) for names in PARTS.values()]
        rest = sum(one["us"] for one in kernels) - sum(parts)
        moved = sum(one["read_bytes"] + one["written_bytes"] for one in kernels)
        times = " | ".join(f"{us:,.1f}" for us in [step["step_us"], *parts, rest])
        lines.append(
            f"| {step['dtype']}, {step['width']} | {len(kernels)} | {times} | {moved / 1e6:,.0f} | "
            f"{least_bytes(step['width'], step['dtype']) / 1e6:,.0f} | {moved / step['step_us'] / 1e6:.2f} |"
        )
    return "\n".join(lines) + "\n"


def launches() -> str:
    """What bounds the narrowest step, and what the others."""
    narrowest = [step for step in _steps() if step["width"] == min(step["width"] for step in _steps())]
    widest = [step for step in _steps() if step["width"] == max(step["width"] for step in _steps())]
    smallest = min(one["us"] for step in narrowest for one in step["kernels"])
    shares = listed(
        f"{sum(one['us'] for one in step['kernels']) / len(step['kernels']):.1f} in {step['dtype']}"
        for step in narrowest
    )
    rates = listed(
        f"{step['dtype']} {max((one['read_bytes'] + one['written_bytes']) / one['us'] / 1e6 for one in step['kernels']):.1f}"
        for step in widest
    )
    return (
        f"At width {narrowest[0]['width']} launches are what a step is made of: the shortest takes {smallest:.1f} us, and "
        f"they take {shares} us on average, nearly all of it the way into and out of a kernel. At width "
        f"{widest[0]['width']} the weights are: the launch that moves them fastest reaches, in TB/s, {rates}."
    )
