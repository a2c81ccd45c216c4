"""The host's time in driver calls by purpose, for a run or call by call."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import polars as pl

from vramlab_analysis import histories
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.records import Run

# Calls that reserve or release device memory, and calls that only wait. The files are those of `vramlab report`.
MEMORY_CALLS, WAITS = (
    tuple(json.loads((files("vramlab_analysis") / f"{name}_calls.json").read_text())) for name in ("memory", "wait")
)


def host_parts(calls: dict[str, Any] | pl.DataFrame, wall_ms: float) -> dict[str, float]:
    """Milliseconds of `wall_ms` by the host's activity; they sum to it.

    `calls` are totals by call, as in the run record.
    """
    if isinstance(calls, pl.DataFrame):
        calls = {row["call"]: row for row in calls.iter_rows(named=True)}
    total = {name: call["total_ns"] / 1e6 for name, call in calls.items()}
    blocked = {name: call["blocked_ns"] / 1e6 for name, call in calls.items()}
    memory = [name for name in MEMORY_CALLS if name in calls]
    launch, launch_blocked = total.get("kernel_launch", 0.0), blocked.get("kernel_launch", 0.0)
    known = {
        "waiting inside alloc and free": sum(blocked[name] for name in memory),
        "alloc and free themselves": sum(total[name] - blocked[name] for name in memory),
        "waiting elsewhere (the device is the limit)": launch_blocked + sum(total.get(name, 0.0) for name in WAITS),
        "launching kernels": launch - launch_blocked,
    }
    known["everything else"] = max(0.0, wall_ms - sum(known.values()))
    return known


# The period of a count: a training step, or an epoch if a record does not separate training from validation.
PERIODS = {"step": "training step", "epoch": "epoch, validation included"}


def warm(run: Run, skip_epochs: int = 1) -> list[dict[str, Any]]:
    """The epochs after the first `skip_epochs`; all of them if there are no more.

    Raises AnalysisError when no epoch ended.
    """
    epochs: list[dict[str, Any]] = run.summary["epochs"]
    if not epochs:
        _ = run.epochs  # raises with the reason
    return epochs[skip_epochs:] or epochs


def counted_per(run: Run) -> str | None:
    """The period by which a record counts driver calls: `step`, `epoch`, or None if it has no counts.

    An epoch's `driver_calls` include training and validation, so they are not divided by its training steps;
    `train_driver_calls`, which older records lack, include only training.
    """
    epochs = warm(run)
    if all(epoch.get("train_driver_calls") for epoch in epochs):
        return "step"
    return "epoch" if any(epoch.get("driver_calls") for epoch in epochs) else None


def account(run: Run, skip_epochs: int = 1, per: str | None = None) -> pl.DataFrame:
    """Driver calls with their time and the time in which they blocked the host, after the first `skip_epochs` epochs.

    `per` is `step` (a training step) or `epoch` (with its validation); the default is the record's period, see
    `counted_per`.

    Columns: `call`, `calls`, `total_us` and `blocked_us` per that period, `blocked_share` (of the call's time).

    Raises AnalysisError when the record has no such counts.
    """
    chosen = warm(run, skip_epochs)
    period = counted_per(run)
    if period is None:
        raise AnalysisError(f"{run.path}: the record has no counts of driver calls.")
    per = per or period
    if per == "step" and period != "step":
        raise AnalysisError(
            f"{run.path}: the record does not separate the driver calls of training and validation, so there are none "
            "per step; run it again with this version."
        )
    key, periods = ("train_driver_calls", sum(one["steps"] for one in chosen)) if per == "step" else (
        "driver_calls", len(chosen))  # fmt: skip
    names = ("count", "total_ns", "blocked_ns")
    rows = [
        {"call": name, **{name: figures[name] for name in names}}
        for epoch in chosen for name, figures in epoch.get(key, {}).items()
    ]  # fmt: skip
    return _account(pl.DataFrame(rows, schema={"call": pl.String, **dict.fromkeys(names, pl.Int64)}), periods)


def _account(rows: pl.DataFrame, periods: int) -> pl.DataFrame:
    return (
        rows.group_by("call")
        .agg(pl.col("count", "total_ns", "blocked_ns").sum())
        .filter(pl.col("count") > 0)
        .select(
            "call",
            calls=pl.col("count") / periods,
            total_us=pl.col("total_ns") / 1e3 / periods,
            blocked_us=pl.col("blocked_ns") / 1e3 / periods,
            blocked_share=pl.col("blocked_ns") / pl.col("total_ns").clip(1),
        )
        .sort("total_us", "call", descending=[True, False])
    )


def account_between(calls: pl.DataFrame, start_ns: int, end_ns: int, steps: int) -> pl.DataFrame:
    """The sync account of calls of `driver_calls.jsonl` that began between two times, per step; as `account`."""
    inside = calls.filter(pl.col("start_ns").is_between(start_ns, end_ns, closed="left"))
    if inside.is_empty():
        raise AnalysisError("no driver call began in the steps that were chosen.")
    return _account(inside.select("call", "total_ns", "blocked_ns", count=pl.lit(1, pl.Int64)), steps)


def account_of_steps(run: Run, first: int, last: int) -> pl.DataFrame:
    """`account_between` over the steps `first` to `last` of a run, counted from 0; over those that the run has.

    Step 0 counts the calls from the run's beginning, such as those that copy the data.
    """
    window = histories.window(run.steps, first, last)
    return account_between(run.calls, *window, min(last + 1, run.steps.height) - first)


def with_waited_for(calls: pl.DataFrame) -> pl.DataFrame:
    """The calls with `waited_for`: the kernel that was launched last before each, null where none was.

    Of a call that blocked on one stream, that is the kernel that it waited for.
    """
    return calls.with_columns(
        waited_for=pl.when(pl.col("call") == "kernel_launch").then(pl.col("kernel")).forward_fill().shift(1)
    )
