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
    "ours-streams": "updates on a stream of their own",
    "compiled": "compiled and captured, tuned",
    "compiled-plain": "the same, not tuned",
    "captured": "eager, captured",
    "autotune": "`max-autotune`",
}


@cache
def record() -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
    """The last machine of the newest record, and its cells by width and type, each with its `machine`.

    Raises AnalysisError where there is no record.
    """
    paths = sorted(repository.results().glob("*-training-beside.jsonl"))
    if not paths:
        raise AnalysisError("experiments/results: no training-beside.jsonl.")
    lines = [parse_json(line, str(paths[-1])) for line in read_bytes(paths[-1]).splitlines()]
    machine: dict[str, Any] = {}
    found = {}
    for one in lines:
        if one["kind"] == "machine":
            machine = one
        else:
            found[one["width"], one["dtype"]] = one | {"machine": machine}
    return machine, dict(sorted(found.items()))


def table() -> str:
    """The times of all arms by width and type."""
    _, found = record()
    heads = {arm: head for arm, head in ARMS.items() if any(arm in one["arms"] for one in found.values())}
    lines = [
        f"| width and type | {' | '.join(heads.values())} | ratio to the fastest |",
        "|---|" + "--:|" * (len(heads) + 1),
    ]
    for (width, dtype), one in found.items():
        times = []
        for arm in heads:
            told = one["arms"].get(arm)
            missing = "failed" if arm in one.get("failed", {}) else "–"
            times.append(f"{told['median']:,.1f} ({told['low']:,.1f} – {told['high']:,.1f})" if told else missing)
        lines.append(f"| {width}, {dtype} | {' | '.join(times)} | {one['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def ratios() -> str:
    """What part of the time of PyTorch's fastest mode the trainer's step takes, by type and width."""
    _, found = record()
    told = {
        f"of its time in {dtype}": {width: one["ratio"] for (width, of), one in found.items() if of == dtype}
        for dtype in TYPES
    }
    return f"{_by_width(told)}; {_runs()}"


def captured() -> str:
    """What part of the time of PyTorch's captured eager step the trainer's step takes, by type and width."""
    _, found = record()
    told = {
        f"of its time in {dtype}": {
            width: one["arms"]["ours"]["median"] / one["arms"]["captured"]["median"]
            for (width, of), one in found.items()
            if of == dtype and "captured" in one["arms"]
        }
        for dtype in reversed(TYPES)
    }
    return f"{_by_width(told)}. Times of the GPU's events, graphs under `caching`; {_runs()}"


def _by_width(told: dict[str, dict[int, float]]) -> str:
    """Ratios of several kinds; widths are said once where the kinds behind each other have the same."""
    parts, kinds = [], [(words, ratios) for words, ratios in told.items() if ratios]
    for at, (words, ratios) in enumerate(kinds):
        same = at + 1 < len(kinds) and kinds[at + 1][1].keys() == ratios.keys()
        widths = "" if same else f" at widths {listed(map(str, ratios))}"
        parts.append(f"{listed(f'{ratio:.2f}' for ratio in ratios.values())} {words}{widths}")
    return "; ".join(parts)


def _runs() -> str:
    """What the medians are of."""
    machine, found = record()
    rounds = listed(map(str, sorted({one["rounds"] for one in found.values()})))
    return f"medians of {rounds} runs, one {machine['gpu']}"


def source() -> str:
    """Where the times are from."""
    machine, found = record()
    steps, rounds = (
        listed(str(value) for value in sorted({one[key] for one in found.values()})) for key in ("steps", "rounds")
    )
    others: dict[str, list[str]] = {}
    for (width, dtype), one in found.items():
        if one["machine"]["build"] != machine["build"]:
            others.setdefault(one["machine"]["build"][:8], []).append(f"{dtype} at {width}")
    apart = "".join(f" ({listed(cells)}: build {build}, another call)" for build, cells in others.items())
    return (
        "`experiments/baselines/train_beside.py`, us a step by the GPU's events over "
        f"{steps} steps, batch 32, four layers; medians of {rounds} runs in turn and their middle halves. "
        f"{machine['gpu']}, driver {machine['driver']}, {machine['at'][:10]}, build {machine['build'][:8]}{apart}. "
        "The trainer's step is one graph under `caching`, with updates in the epilogues. The ratio is that of the "
        "trainer's fastest."
    )
