"""Measures of a run, by which runs are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import polars as pl

from vramlab_analysis.calls import MEMORY_CALLS, account, counted_per
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.records import Run


def step_times(run: Run, skip: int | None = None) -> pl.Series:
    """Host time of each training step in ns, without the first of each epoch and the first `skip` of the run.

    A step's time starts at the end of the previous step on the host. If the host never waits for the device, single
    steps measure queueing; their mean over many is the pace, because the queue is bounded.
    By default a quarter of the run is skipped, at most 100 steps.
    """
    steps = run.steps
    if "host_ns" not in steps.columns:
        return pl.Series(dtype=pl.Int64)
    skip = min(100, steps.height // 4) if skip is None else skip
    spans = steps.select("index", "epoch", ns=pl.col("host_ns").diff().over("epoch"))
    return spans.filter((pl.col("index") >= skip) & pl.col("ns").is_not_null())["ns"]


def train_pace(run: Run) -> float | None:
    """Microseconds of one training step: median over the epochs after the first.

    On a GPU by GPU events, `train_device_s` over the steps: it excludes the host's work before the first launch
    and after the last, which differs between programs. Otherwise by the host's clock, `train_s` over the steps. None if
    the record has neither (older records lack both).
    """
    epochs = run.epochs
    fields = ["train_device_s", "train_s"] if run.summary["device"].get("kind") == "cuda" else ["train_s"]
    field = next((name for name in fields if name in epochs.columns), None)
    if field is None:
        return None
    chosen = epochs.slice(1) if epochs.height > 1 else epochs
    value = (chosen[field] * 1e6 / chosen["steps"]).median()
    return None if value is None else float(value)  # type: ignore[arg-type]


def epoch_pace(run: Run) -> float | None:
    """Microseconds of a step with its share of validation: median over the epochs after the first."""
    epochs = run.epochs
    chosen = epochs.slice(1) if epochs.height > 1 else epochs
    value = (chosen["wall_s"] * 1e6 / chosen["steps"]).median()
    return None if value is None else float(value)  # type: ignore[arg-type]


def measures(run: Run) -> dict[str, Any]:
    """Comparable measures of a run; None if its record lacks them.

    Times are microseconds, memory bytes. `step_us` is `train_pace`, or else the median of `step_times` (with `--sync
    never` their mean). `step_p10_us` and `step_p90_us` are the spread of single steps; they need a host that waits for
    each step and a table of steps. `epoch_step_us` includes validation. Per training step: `driver_calls`,
    `blocked_us`, `blocked_in` (the call that blocked longest), and of memory calls `memory_calls` and `memory_us`;
    under `epoch_` the same per epoch with its validation, the only counts of older records. `allocations` counts the
    whole run.
    """
    summary = run.summary
    times = step_times(run) if run.has_steps else pl.Series(dtype=pl.Int64)
    sync = run.settings.get("sync", "never")
    single = times if sync != "never" else times.clear()
    middle = train_pace(run)
    if middle is None and len(times):
        middle = float(times.mean() if sync == "never" else times.median()) / 1e3  # type: ignore[arg-type]
    out: dict[str, Any] = {
        "step_us": middle,
        "step_p10_us": _quantile(single, 0.1),
        "step_p90_us": _quantile(single, 0.9),
        "epoch_step_us": epoch_pace(run),
        "steps_done": run.steps.height if run.has_steps else int(run.epochs["steps"].sum()),
    }
    period = counted_per(run)
    for per, before in (("step", ""), ("epoch", "epoch_")):
        known = period is not None and (per == "epoch" or period == "step")
        out |= {before + key: one for key, one in _calls(account(run, per=per) if known else None).items()}
    for level in ("reserved", "active", "allocated", "requested"):
        out[f"peak_{level}_bytes"] = run.statistic(f"{level}_bytes.all.peak")
    out["allocations"] = run.statistic("allocation.all.allocated")
    peak, active = out["peak_reserved_bytes"], out["peak_active_bytes"]
    out["utilisation"] = active / peak if peak and active is not None else None
    for operation in ("allocate", "deallocate"):
        rows = [row for row in summary.get("latency", []) if row["operation"] == operation]
        most = max(rows, key=lambda row: row["count"], default=None)
        for name in ("p50_ns", "p99_ns"):
            value = most and most.get(name)
            # On a simulated device only driver calls take time; 0 means not measured.
            out[f"{operation}_{name}"] = None if run.simulated and not value else value
    last = summary["epochs"][-1]
    out |= {
        "train_loss": last.get("train_loss"),
        "val_loss": last.get("val_loss"),
        "val_accuracy": last.get("val_accuracy"),
    }
    out["process_s"] = summary.get("process_s")
    return out


def _calls(account: pl.DataFrame | None) -> dict[str, Any]:
    """Sums over a sync account."""
    if account is None:
        return dict.fromkeys(("driver_calls", "blocked_us", "blocked_in", "memory_calls", "memory_us"))
    memory = account.filter(pl.col("call").is_in(MEMORY_CALLS))
    waits = account.filter(pl.col("blocked_us") > 0).sort("blocked_us", "call")
    return {
        "driver_calls": float(account["calls"].sum()),
        "blocked_us": float(account["blocked_us"].sum()),
        "blocked_in": waits["call"][-1] if waits.height else None,
        "memory_calls": float(memory["calls"].sum()),
        "memory_us": float(memory["total_us"].sum()),
    }


def _quantile(values: pl.Series, share: float) -> float | None:
    quantile = values.quantile(share) if len(values) else None
    return None if quantile is None else float(quantile) / 1e3


# The number of repeats from which the spread is the middle half: single runs on a shared host are outliers.
MANY = 10


def spread(values: pl.Series) -> tuple[float, float]:
    """The spread of repeats: the least and the greatest, or from `MANY` repeats the bounds of the middle half."""
    numbers = values.drop_nulls().cast(pl.Float64)
    low, high = (0.25, 0.75) if len(numbers) >= MANY else (0.0, 1.0)
    return tuple(numbers.quantile(share, "linear") for share in (low, high))  # type: ignore[return-value]


def median_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """The median of values and its 95 % interval (bootstrap)."""
    given = np.array(list(values))
    drawn = np.random.default_rng(0).integers(0, len(given), (4000, len(given)))
    low, high = np.quantile(np.median(given[drawn], axis=1), (0.025, 0.975))
    return float(np.median(given)), float(low), float(high)


@dataclass(frozen=True)
class Interval:
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __sub__(self, by: float) -> Self:
        """The value less a number: a ratio less 1 is a change."""
        return type(self)(self.value - by, self.low - by, self.high - by)


def ratio(of: Mapping[Any, float], to: Mapping[Any, float]) -> Interval:
    """The ratio of two medians, and the interval of the median of ratios of runs with the same key, such as a repeat.

    Runs without a counterpart do not count. Raises AnalysisError if there are no others.
    """
    common = [key for key in of if key in to]
    if not common:
        raise AnalysisError("the runs of a ratio have no repeat in common.")
    ones, others = (np.array([side[key] for key in common]) for side in (of, to))
    _, low, high = median_interval(ones / others)
    return Interval(float(np.median(ones) / np.median(others)), low, high)


def over(frame: pl.DataFrame, value: str, of: dict[str, Any], to: dict[str, Any]) -> Interval:
    """The `ratio` of a column in two settings, `of` over `to`, which have the values of other columns.

    Runs are compared by repeat and host; where several of a setting have one repeat, their median is.
    """
    turns = (
        frame.filter([pl.col(column) == expected for column, expected in where.items()])
        .drop_nulls(value)
        .group_by("repeat", "host", maintain_order=True)
        .agg(pl.col(value).median())
        for where in (of, to)
    )
    return ratio(*({(repeat, host): middle for repeat, host, middle in side.iter_rows()} for side in turns))


def middle(frame: pl.DataFrame, by: list[str], value: str) -> pl.DataFrame:
    """Median and `spread` of the repeats of each group: columns `by`, `value`, `low`, `high`, `repeats`."""
    values, many = pl.col(value).cast(pl.Float64), pl.len() >= MANY
    return (
        frame.filter(pl.col(value).is_not_null())
        .group_by(by, maintain_order=True)
        .agg(
            values.median().alias("value"),
            pl.when(many).then(values.quantile(0.25, "linear")).otherwise(values.min()).alias("low"),
            pl.when(many).then(values.quantile(0.75, "linear")).otherwise(values.max()).alias("high"),
            pl.len().alias("repeats"),
        )
    )


def medians(frame: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """One row for the repeats of each group: medians of numbers, the first value of other columns."""
    numbers = [name for name, kind in frame.schema.items() if kind.is_numeric() and name not in by]
    others = [name for name in frame.columns if name not in by and name not in numbers]
    grouped = frame.group_by(by, maintain_order=True).agg(pl.col(numbers).median(), pl.col(others).first())
    return grouped.select(frame.columns)
