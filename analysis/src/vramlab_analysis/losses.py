"""The table of losses: the cost of each type, and the difference of trainer and PyTorch in the same type."""

from __future__ import annotations

import json
import math
from typing import Any

import polars as pl

from vramlab_analysis.records import Run, losses_of
from vramlab_analysis.steps import TYPES, UNSAID, aligned, arithmetic, gather

# Runs with equal values are compared: the same network, batches and rate.
WORK = ["dataset", "layers", "hidden", "batch", "lr", "seed", "init"]
# Types of values.
HOW = ["dtype", "accumulate", "weights", "loss_scale"]
EARLY = 100


def frame(runs: list[Run]) -> pl.DataFrame:
    """One row for each run, sorted by type.

    Columns: those of `WORK` and `HOW`; `program`, `device`, `steps`; `last`, the mean loss of the last tenth of the
    steps; `to_f32`, what is added to it against the program's own f32 run, as a share; `to_other`, the same against the
    other program's run that computes alike; `early`, the largest relative difference of a step to that one in the first
    hundred. Null where there is no such run, or PyTorch's began with weights of its own instead of a start file. Of
    several repeats the first counts.
    """
    kinds: dict[tuple[Any, ...], tuple[dict[str, Any], pl.Series]] = {}
    for run in runs:
        settings = {**UNSAID, "loss_scale": 1.0, **run.settings}
        program = str(run.summary.get("program", "trainer"))
        row = {key: settings.get(key) for key in [*WORK, *HOW]} | {"program": program, "device": run.device}
        losses = losses_of(run.steps, str(run.path))
        row["shared"] = program == "trainer" or "start" in run.summary
        row |= {"steps": len(losses), "last": _mean(losses.tail(max(1, len(losses) // 10)))}
        kinds.setdefault((program, *(row[key] for key in WORK), *(row[key] for key in HOW)), (row, losses))
    rows = []
    for (program, *key), (row, losses) in kinds.items():
        work, how = key[: len(WORK)], key[len(WORK) :]
        other = "pytorch" if program == "trainer" else "trainer"
        plain = kinds.get((program, *work, "f32", "f32", "master", 1.0))
        alike = kinds.get((other, *work, *how))
        differences: dict[str, Any] = {
            "to_f32": _added(row, plain[0]) if plain else None,
            "to_other": None,
            "early": None,
        }
        if alike and row["shared"] and alike[0]["shared"]:
            ones, others = (part.head(EARLY) for part in (losses, alike[1]))
            length = min(len(ones), len(others))
            relative = ((ones.head(length) - others.head(length)) / others.head(length)).abs()
            differences |= {"to_other": _added(row, alike[0]), "early": _finite(relative.max())}
        rows.append(row | differences)
    order = pl.col("dtype").replace_strict(TYPES, default=len(TYPES))
    table = pl.DataFrame(rows, infer_schema_length=None, strict=False).with_columns(rank=order)
    return table.sort(*WORK, "rank", "accumulate", "weights", "loss_scale", "program").drop("rank", "shared")


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return None if mean is None else float(mean)  # type: ignore[arg-type]


def _added(row: dict[str, Any], base: dict[str, Any]) -> float | None:
    """The change from the last loss of `base`, as a share of it; None if one of them has none, or diverged."""
    return _finite(row["last"] / base["last"] - 1) if row["last"] is not None and base["last"] else None


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def markdown(table: pl.DataFrame) -> str:
    """The frame as tables in Markdown, one for each network."""
    head = ["type", "loss scale", "program", "device", "steps", "last loss", "to f32", "to the other program", "early"]
    parts = []
    for work, lines in table.group_by(WORK, maintain_order=True):
        dataset, layers, hidden, batch, lr, seed, init = work
        rows = [head]
        for row in lines.iter_rows(named=True):
            shares = ["–" if row[key] is None else f"{100 * row[key]:+.2f} %" for key in ("to_f32", "to_other")]
            early = "–" if row["early"] is None else f"{row['early']:.1e}"
            scale, last = f"{row['loss_scale']:g}", "–" if row["last"] is None else f"{row['last']:.4f}"
            rows.append(
                [arithmetic(row), scale, row["program"], row["device"], str(row["steps"]), last, *shares, early]
            )
        title = f"{dataset}, {layers} layers of {hidden}, batch {batch}, rate {lr:g}, seed {seed}, {init}"
        parts.append(f"{title}\n\n{aligned(rows, [False, True, False, False, True, True, True, True, True])}")
    return "\n\n".join(parts)


def show(paths: list[str], *, as_json: bool) -> str:
    """The table of these records and experiments, for people or as a JSON array of the frame's rows."""
    table = frame(gather(paths))
    if not as_json:
        return markdown(table)
    # JSON has no NaN, which the last loss of a run that diverged is.
    rows = [row | {"last": _finite(row["last"])} for row in table.to_dicts()]
    return json.dumps(rows, indent=1, allow_nan=False)
