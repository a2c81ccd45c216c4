"""The table of step times: the trainer's and PyTorch's by width, type and launch, with the ratio to PyTorch's best."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import holds_experiment, load_experiment
from vramlab_analysis.measures import middle, train_pace
from vramlab_analysis.records import Run, load_run

# Settings that older records lack.
UNSAID = {"dtype": "f32", "accumulate": "f32", "weights": "master", "fuse": "none", "streams": 1, "fused_sgd": False}
# Two programs do the same work if these are equal.
WORK = ["device", "dataset", "layers", "batch", "loader", "hidden", "dtype", "accumulate", "weights"]
# Further settings that distinguish a program's runs of one type, in the order of the words.
HOW = ["allocator", "gemm", "fuse", "streams", "graph_steps", "sync", "loss_scale", "latency"]
HOW += ["compile_mode", "fused_sgd", "rows"]
TYPES = {"f32": 0, "tf32": 1, "bf16": 2, "f16": 3}


def gather(paths: list[str]) -> list[Run]:
    """Finished runs of the trainer and of PyTorch, every repeat, from records and experiments.

    Missing runs are reported on stderr.
    """
    runs: list[Run] = []
    for path in paths:
        if not holds_experiment(Path(path)):
            runs.append(load_run(path))
            continue
        experiment = load_experiment(path)
        entries = [run for run in experiment.runs if run.done and run.meta.get("program") in ("trainer", "pytorch")]
        missing = experiment.missing()
        if missing:
            print(f"note: {path} lacks {len(missing)} runs, such as {missing[0]}", file=sys.stderr)
        runs.extend(entry.record for entry in entries)
    if not runs:
        raise AnalysisError(f"{', '.join(paths)}: no finished run of the trainer or of PyTorch.")
    return runs


def frame(runs: list[Run]) -> pl.DataFrame:
    """One row for each kind of run, widths ascending.

    Columns: those of `WORK`; `program`, `how` (further settings in words), `launch`; the median
    `step_us` with `low_us` and `high_us`, of `repeats` runs; `best_us` and `best_mode`, the least of PyTorch's at the
    same work, and `ratio` to it (null where PyTorch did not do that work).
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        settings = {**UNSAID, **run.settings}
        program = str(run.summary.get("program", "trainer"))
        launch = settings.get("launch", settings.get("mode", "eager"))
        if program == "trainer" and launch == "graph":
            # Records without it are from builds in which a graph was one step.
            settings.setdefault("graph_steps", 1)
        row = {"program": program, "launch": launch, "device": run.device, "step_us": train_pace(run)}
        rows.append({key: settings.get(key) for key in [*WORK, *HOW]} | row)
    values: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        for key in HOW:
            # Only graphs have a number of steps, so it does not distinguish other launches.
            if key != "graph_steps" or row[key] is not None:
                values.setdefault((row["program"], row["dtype"], key), set()).add(str(row[key]))
    for row in rows:
        kinds = {key: values.get((row["program"], row["dtype"], key), set()) for key in HOW}
        telling = [key for key in HOW if len(kinds[key]) > 1 and row[key] is not None]
        row["how"] = ", ".join(_word(key, row[key]) for key in telling)
    by = [*WORK, "program", "how", "launch"]
    lines = middle(pl.DataFrame(rows, infer_schema_length=None, strict=False).select(*by, "step_us"), by, "step_us")
    lines = lines.rename({"value": "step_us", "low": "low_us", "high": "high_us"})
    theirs = lines.filter(pl.col("program") == "pytorch").sort("step_us").group_by(WORK, maintain_order=True).first()
    best = theirs.select(*WORK, pl.col("step_us").alias("best_us"), pl.col("launch").alias("best_mode"))
    return (
        lines.join(best, on=WORK, how="left", nulls_equal=True)
        .with_columns(
            ratio=pl.col("step_us") / pl.col("best_us"),
            rank=pl.col("dtype").replace_strict(TYPES, default=len(TYPES)),
            other=pl.col("program") != "trainer",
        )
        .sort("device", "dataset", "layers", "batch", "hidden", "rank", "accumulate", "weights", "other", "step_us")
        .drop("rank", "other")
    )


def _word(key: str, value: Any) -> str:
    """A setting as a word of a name: the allocator's and the compiler's own, a switch as on or off."""
    if key in ("allocator", "compile_mode"):
        return str(value)
    return f"{key.replace('_', ' ')} { ({True: 'on', False: 'off'}[value] if isinstance(value, bool) else value) }"


def markdown(table: pl.DataFrame) -> str:
    """The frame as tables in Markdown, one for each device and shape of work."""
    parts = []
    for work, lines in table.group_by("device", "dataset", "layers", "batch", "loader", maintain_order=True):
        device, dataset, layers, batch, loader = work
        rows = [["hidden", "type", "program", "launch", "µs a step", "spread", "to PyTorch's best"]]
        for row in lines.iter_rows(named=True):
            kind = arithmetic(row)
            ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f} ({row['best_mode']})"
            spread = f"{row['low_us']:.1f} – {row['high_us']:.1f}" if row["repeats"] > 1 else "–"
            name = str(row["program"]) + (f", {row['how']}" if row["how"] else "")
            rows.append([str(row["hidden"]), kind, name, str(row["launch"]), f"{row['step_us']:.1f}", spread, ratio])
        text = f"{device}: {dataset}, {layers} layers, batch {batch}, {loader} batches\n\n"
        parts.append(text + aligned(rows, [True, False, False, False, True, True, True]))
    return "\n\n".join(parts)


def arithmetic(row: dict[str, Any]) -> str:
    """A type with its weights and sums, in words: `f16, half weights, f16 sums`."""
    if row["dtype"] not in ("bf16", "f16"):
        return str(row["dtype"])
    return f"{row['dtype']}, {row['weights']} weights" + (", f16 sums" if row["accumulate"] == "f16" else "")


def aligned(rows: list[list[str]], right: list[bool]) -> str:
    """A table in Markdown, the head first, with columns as wide as their cells; `right` marks columns of numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * (width - 1) + ":" if far else "-" * width for width, far in zip(widths, right, strict=True)]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        cells = zip(row, widths, right, strict=True)
        lines.append(" | ".join(cell.rjust(width) if far else cell.ljust(width) for cell, width, far in cells))
    return "\n".join(f"| {line} |" for line in lines)


def show(paths: list[str], *, as_json: bool) -> str:
    """The table of these records and experiments, for people or as a JSON array of the frame's rows."""
    table = frame(gather(paths))
    return json.dumps(table.to_dicts(), indent=1) if as_json else markdown(table)
