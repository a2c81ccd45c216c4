"""The whole training step beside PyTorch's fastest, as `experiments/baselines/train_beside.py` records it."""

from __future__ import annotations

from functools import cache
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes
from vramlab_analysis.quoted.parts import listed

TYPES = ("f32", "f16")
# The arms in the order of the table's columns, with their heads.
ARMS = {
    "ours": "trainer",
    "compiled": "compiled and captured, tuned",
    "compiled-plain": "the same, not tuned",
    "captured": "eager, captured",
    "autotune": "`max-autotune`",
}


@cache
def _record() -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
    """The machine of the newest record, and its cells by width and type.

    Raises AnalysisError where there is no record.
    """
    paths = sorted(repository.results().glob("*-training-beside.jsonl"))
    if not paths:
        raise AnalysisError("experiments/results: no training-beside.jsonl.")
    lines = [parse_json(line, str(paths[-1])) for line in read_bytes(paths[-1]).splitlines()]
    machine = next(one for one in lines if one["kind"] == "machine")
    found = {(one["width"], one["dtype"]): one for one in lines if one["kind"] == "cell"}
    return machine, dict(sorted(found.items()))


def table() -> str:
    """The times of all arms by width and type."""
    _, found = _record()
    lines = [
        f"| width and type | {' | '.join(ARMS.values())} | ratio to the fastest |",
        "|---|" + "--:|" * (len(ARMS) + 1),
    ]
    for (width, dtype), one in found.items():
        times = []
        for arm in ARMS:
            told = one["arms"].get(arm)
            times.append(f"{told['median']:,.1f} ({told['low']:,.1f} – {told['high']:,.1f})" if told else "failed")
        lines.append(f"| {width}, {dtype} | {' | '.join(times)} | {one['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def ratios() -> str:
    """What part of the time of PyTorch's fastest mode the trainer's step takes, by type and width."""
    machine, found = _record()
    rounds = {one["rounds"] for one in found.values()}
    parts = []
    for dtype in TYPES:
        some = {width: one["ratio"] for (width, of), one in found.items() if of == dtype}
        words = listed(f"{ratio:.2f}" for ratio in some.values())
        parts.append(f"{words} of its time in {dtype} at widths {listed(map(str, some))}")
    return f"{'; '.join(parts)}; medians of {listed(map(str, sorted(rounds)))} runs, one {machine['gpu']}"


def source() -> str:
    """Where the times are from."""
    machine, found = _record()
    steps, rounds = (
        listed(str(value) for value in sorted({one[key] for one in found.values()})) for key in ("steps", "rounds")
    )
    return (
        "`experiments/baselines/train_beside.py`, us a step by the GPU's events over "
        f"{steps} steps, batch 32, four layers; medians of {rounds} runs in turn and their middle halves. One "
        f"{machine['gpu']}, driver {machine['driver']}, {machine['at'][:10]}, build {machine['build'][:8]}; its other "
        "GPU and cores had other work. The trainer's step is one graph under `caching`, with updates in the epilogues."
    )
