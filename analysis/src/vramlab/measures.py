"""What one run comes to: the figures by which runs are compared."""

from __future__ import annotations

from typing import Any

import polars as pl

from vramlab.calls import MEMORY_CALLS
from vramlab.records import Run


def step_times(run: Run, skip: int | None = None) -> pl.Series:
    """Host time of each training step in ns, without the first of each epoch and the first `skip` of the run.

    A step's time is from the end of the step before, as the host saw it. Where the host waits for the device nowhere,
    single steps say when the work was queued; their mean over many is the pace, because the queue is bounded.
    Without `skip` a quarter of the run is left out, at most 100 steps.
    """
    steps = run.steps
    skip = min(100, steps.height // 4) if skip is None else skip
    spans = steps.select("index", "epoch", ns=pl.col("host_ns").diff().over("epoch"))
    return spans.filter((pl.col("index") >= skip) & pl.col("ns").is_not_null())["ns"]


def train_pace(run: Run) -> float | None:
    """Microseconds of one training step: median over the epochs after the first.

    On a GPU by the GPU's own events, `train_device_s` over the steps: what the host does before the first launch and after
    the last is not in it, and that differs between programs. Elsewhere by the host's clock, `train_s` over the steps. None
    where the record has neither (both are younger than the other fields).
    """
    epochs = run.epochs
    fields = ["train_device_s", "train_s"] if run.summary["device"]["kind"] == "cuda" else ["train_s"]
    field = next((name for name in fields if name in epochs.columns), None)
    if field is None:
        return None
    chosen = epochs.slice(1) if epochs.height > 1 else epochs
    value = (chosen[field] * 1e6 / chosen["steps"]).median()
    return None if value is None else float(value)  # type: ignore[arg-type]


def epoch_pace(run: Run) -> float | None:
    """Microseconds a step takes with its share of validation: median over the epochs after the first."""
    epochs = run.epochs
    chosen = epochs.slice(1) if epochs.height > 1 else epochs
    value = (chosen["wall_s"] * 1e6 / chosen["steps"]).median()
    return None if value is None else float(value)  # type: ignore[arg-type]


def measures(run: Run) -> dict[str, Any]:
    """Comparable figures of a run; None where its record does not tell.

    Times are microseconds, memory bytes. `step_us` is `train_pace`, or, where the record does not tell, the median of
    `step_times` (with `--sync never` their mean); `step_p10_us` and `step_p90_us` are the spread of single steps, which
    is known where the host waits for each and the record has its table of steps; `epoch_step_us` contains validation.
    `allocations` are those of the whole run, validation included, over its training steps.
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
    epochs = summary["epochs"][1:] or summary["epochs"]
    steps = sum(epoch["steps"] for epoch in epochs)
    calls = [epoch["driver_calls"] for epoch in epochs if "driver_calls" in epoch]
    if calls:
        total = {name: sum(c[name]["blocked_ns"] for c in calls if name in c) for name in {n for c in calls for n in c}}
        out["blocked_us"] = sum(total.values()) / 1e3 / steps
        out["blocked_in"] = max(total, key=lambda name: (total[name], name)) if any(total.values()) else None
        out["driver_calls"] = sum(call["count"] for c in calls for call in c.values()) / steps
        memory = [c[name] for c in calls for name in MEMORY_CALLS if name in c]
        out["memory_calls"] = sum(call["count"] for call in memory) / steps
        out["memory_us"] = sum(call["total_ns"] for call in memory) / 1e3 / steps
    for level in ("reserved", "active", "allocated", "requested"):
        out[f"peak_{level}_bytes"] = run.statistic(f"{level}_bytes.all.peak")
    made = run.statistic("allocation.all.allocated")
    out["allocations"] = made / out["steps_done"] if made is not None and out["steps_done"] else None
    peak, active = out["peak_reserved_bytes"], out["peak_active_bytes"]
    out["utilisation"] = active / peak if peak and active is not None else None
    for operation in ("allocate", "deallocate"):
        rows = [row for row in summary.get("latency", []) if row["operation"] == operation]
        most = max(rows, key=lambda row: row["count"], default=None)
        out[f"{operation}_p50_ns"] = most and most["p50_ns"]
        out[f"{operation}_p99_ns"] = most and most["p99_ns"]
    last = summary["epochs"][-1]
    out |= {
        "train_loss": last.get("train_loss"),
        "val_loss": last.get("val_loss"),
        "val_accuracy": last.get("val_accuracy"),
    }
    out["process_s"] = summary.get("process_s")
    return out


def _quantile(values: pl.Series, share: float) -> float | None:
    quantile = values.quantile(share) if len(values) else None
    return None if quantile is None else float(quantile) / 1e3


def middle(frame: pl.DataFrame, by: list[str], value: str) -> pl.DataFrame:
    """Median, least and greatest of the repeats of each group: columns `by`, `value`, `low`, `high`, `repeats`."""
    return (
        frame.filter(pl.col(value).is_not_null())
        .group_by(by, maintain_order=True)
        .agg(
            pl.col(value).median().alias("value"),
            pl.col(value).min().alias("low"),
            pl.col(value).max().alias("high"),
            pl.len().alias("repeats"),
        )
    )
