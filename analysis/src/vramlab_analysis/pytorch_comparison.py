"""Training steps of the trainer and of PyTorch's modes (spec `training-beside`; older records are JSON lines)."""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from functools import cache
from typing import Any

from vramlab_analysis import experiments, repository
from vramlab_analysis.errors import AnalysisError, read_json_lines
from vramlab_analysis.measures import Interval, ratio
from vramlab_analysis.pages.cells import span
from vramlab_analysis.pages.registry import markdown

SPEC = "training-beside"
# Steps of the timed epoch of the spec.
STEPS = 300
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

    An arm of a cell has the median of its steps in microseconds, the middle half, and `us`, the step of each turn.
    Raises AnalysisError where there is no record.
    """
    if any(experiments.holds_experiment(label / SPEC) for label in experiments.labels()):
        return of_experiment(experiments.results(SPEC, "gpu"))
    return of_file()


@cache
def of_file() -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
    """The same of the newest file of JSON lines, which has arms of kernels that were removed since."""
    paths = repository.listing().files("training-beside.jsonl")
    if not paths:
        raise AnalysisError("experiments/results: no training-beside.jsonl.")
    machine: dict[str, Any] = {}
    found = {}
    for one in read_json_lines(paths[-1]):
        if one["kind"] == "machine":
            machine = one
        else:
            turns = {arm: times | {"us": dict(enumerate(times["us"]))} for arm, times in one["arms"].items()}
            found[one["width"], one["dtype"]] = one | {"arms": turns, "machine": machine}
    return machine, dict(sorted(found.items()))


def of_experiment(runs: experiments.Experiment) -> tuple[dict[str, Any], dict[tuple[int, str], dict[str, Any]]]:
    """The same of the runs of the spec: microseconds of a step by the GPU's events in the last epoch."""
    times: dict[tuple[int, str], dict[str, dict[Hashable, float]]] = {}
    failed: dict[tuple[int, str], dict[str, str]] = {}
    for entry in runs.runs:
        cell = int(entry.options["hidden"]), str(entry.options["dtype"])
        arm = entry.arm.removesuffix("-half")
        if entry.done:
            epoch = entry.record.summary["epochs"][-1]
            step_us = 1e6 * epoch["train_device_s"] / epoch["steps"]
            times.setdefault(cell, {}).setdefault(arm, {})[entry.turn] = step_us
        elif entry.meta.get("status") == "failed":
            failed.setdefault(cell, {})[arm] = str(entry.meta["error"])
    meta = runs.select()[0].meta
    machine = {"gpu": meta["machine"]["gpu"], "driver": meta["provenance"]["driver_release"], "at": meta["started_at"]}
    cells = {}
    for cell, arms in sorted(times.items()):
        spans = {arm: _middle(list(values.values())) for arm, values in arms.items()}
        ours = [one["median"] for arm, one in spans.items() if arm.startswith("ours")]
        theirs = [one["median"] for arm, one in spans.items() if not arm.startswith("ours")]
        if ours and theirs:
            rounds = min(map(len, arms.values()))
            cells[cell] = {
                "arms": {arm: spans[arm] | {"us": arms[arm]} for arm in spans},
                "failed": failed.get(cell, {}),
                "ratio": min(ours) / min(theirs),
                "rounds": rounds,
                "steps": STEPS,
                "machine": machine,
            }
    return machine, cells


def _middle(values: list[float]) -> dict[str, float]:
    """Median and middle half."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return dict(zip(("low", "median", "high"), quartiles, strict=True))


def over(cell: dict[str, Any], of: str, to: str) -> Interval:
    """The ratio of the steps of two arms of a cell, turn by turn."""
    return ratio(cell["arms"][of]["us"], cell["arms"][to]["us"])


def table() -> str:
    """The times of all arms by width and type."""
    cells = record()[1]
    heads = {arm: head for arm, head in ARMS.items() if any(arm in cell["arms"] for cell in cells.values())}
    body = []
    for (width, dtype), one in cells.items():
        row = [f"{width}, {dtype}"]
        for arm in heads:
            times = one["arms"].get(arm)
            missing = "failed" if arm in one.get("failed", {}) else "–"
            row.append(f"{times['median']:,.1f} ({times['low']:,.1f} – {times['high']:,.1f})" if times else missing)
        body.append([*row, f"{one['ratio']:.2f}"])
    return markdown(["width and type", *heads.values(), "ratio to PyTorch's best"], body)


def values() -> dict[str, Any]:
    """The least and greatest ratio of step times by type, `best.TYPE` and `captured.TYPE`, and facts of the record."""
    machine, cells = record()
    found: dict[str, list[float]] = {}
    for (_, dtype), one in cells.items():
        found.setdefault(f"best.{dtype}", []).append(one["ratio"])
        if "captured" in one["arms"]:
            ratio = one["arms"]["ours"]["median"] / one["arms"]["captured"]["median"]
            found.setdefault(f"captured.{dtype}", []).append(ratio)
    return {
        "widths": span(width for width, _ in cells),
        **{key: span(cell[key] for cell in cells.values()) for key in ("rounds", "steps")},
        **{key: machine[key] for key in ("gpu", "driver")},
        "day": machine["at"][:10],
        **{name: {"min": min(ratios), "max": max(ratios)} for name, ratios in found.items()},
    }
