"""Pieces of the notes in `experiments/notes`."""

from __future__ import annotations

import statistics
from typing import Any

import polars as pl

from vramlab_analysis.documents import Pieces
from vramlab_analysis.errors import AnalysisError, read_json
from vramlab_analysis.experiments import newest, results
from vramlab_analysis.quoted import beside, step_kernels
from vramlab_analysis.quoted.parts import cells, each, listed, runs, table

TYPES = ("f32", "tf32", "bf16", "f16")


def _step(spec: str, **where: Any) -> float:
    """Step time in us of the trainer's runs of a spec that are of this kind, the fastest of them."""
    program = where.pop("program", "trainer")
    how = where.pop("how", "")
    said = [pl.col(key) == value for key, value in where.items()]
    rows = table(spec).filter(pl.col("program") == program, pl.col("how").str.contains(how), *said)
    if rows.is_empty():
        raise AnalysisError(f"{spec}: no run of {program} with {where} {how}.")
    return float(rows["step_us"].min())  # type: ignore[arg-type]


def _fused(fuse: str) -> float:
    return float(cells("fusion-load", ["alloc", "fuse"], dtype="f32")["caching", fuse]["value"])


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def variants() -> str:
    """The table of kernels' variants: each beside the next best in a recorded cell."""
    graph: dict[str, Any] = {"launch": "graph", "how": "streams 1"}
    rows: list[tuple[str, str, float, float]] = []
    for hidden in (1024, 8192):
        at = {"hidden": hidden, **graph}
        rows.append(
            (
                "tf32",
                f"`fast-training`, width {hidden}, graph, beside f32",
                _step("fast-training", dtype="tf32", **at),
                _step("fast-training", dtype="f32", **at),
            )
        )
    for dtype in ("f16", "bf16"):
        at = {"hidden": 8192, **graph}
        rows.append(
            (
                dtype,
                "`fast-training`, width 8192, graph, beside tf32",
                _step("fast-training", dtype=dtype, **at),
                _step("fast-training", dtype="tf32", **at),
            )
        )
    rows += [
        ("fused updates", "`fusion-load`, width 784, eager, beside epilogues", _fused("update"), _fused("epilogue")),
        ("fused epilogues", "the same, beside nothing fused", _fused("epilogue"), _fused("none")),
    ]
    return _beside_each_other(["variant", "record and cell", "it, us", "the other, us", "times as fast"], rows)


def _beside_each_other(heads: list[str], rows: list[tuple[str, str, float, float]]) -> str:
    """A table of two times each, and how many times as long the second is."""
    lines = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|"]
    for words, cell, one, other in rows:
        lines.append(f"| {words} | {cell} | {_us(one)} | {_us(other)} | {other / one:.2f} |")
    return "\n".join(lines) + "\n"


def removed() -> str:
    """What f32 takes now, where it took less with three products in tf32."""
    words = "f32 of three products in tf32"
    rows = [
        (
            words,
            "`full-batch`, graph",
            _step("full-batch", dtype="f32", launch="graph", how="tensor"),
            _step("full-batch", dtype="f32", launch="graph", how="tiled"),
        )
    ]
    for (hidden, _), one in beside.record()[1].items():
        arms = {arm: one["arms"][arm]["median"] for arm in ("ours-tensor", "ours") if arm in one["arms"]}
        if len(arms) == 2:
            rows.append((words, f"`train_beside.py`, width {hidden}, batch 32", *arms.values()))
    return _beside_each_other(["removed", "record and cell", "it, us", "multiply-adds, us", "cost, times"], rows)


def captured_source() -> str:
    """Where the steps beside PyTorch's captured eager step are from."""
    experiment = results("fast-training", "gpu")
    repeats = each(table("fast-training")["repeats"])
    return (
        f"`experiments run fast-training --device cuda` on one {experiment.machine}, "
        f"{experiment.document['started_at'][:10]}, {repeats}; us a step by the GPU's own events (`vramlab-analysis "
        "steps`), and in brackets what part it is of PyTorch's eager step captured as one CUDA graph, with fused SGD. "
        "That is not PyTorch's fastest mode: see the next section. f16 and bf16 with half weights, one stream."
    )


def captured() -> str:
    """Steps beside PyTorch's captured eager step, by width."""
    told = table("fast-training")
    widths = sorted(told["hidden"].unique().to_list())
    theirs = {
        (dtype, hidden): _step("fast-training", program="pytorch", dtype=dtype, hidden=hidden, launch="graph")
        for dtype in TYPES
        for hidden in widths
    }
    lines = [f"| us a step by width | {' | '.join(map(str, widths))} |", "|---|" + "--:|" * len(widths)]
    for dtype in ("f16", "bf16", "tf32", "f32"):
        for launch in ("graph", "eager"):
            times = [
                _step("fast-training", dtype=dtype, hidden=hidden, launch=launch, how="streams 1|^$")
                for hidden in widths
            ]
            told_cells = [
                f"{_us(one)} ({one / theirs[dtype, hidden]:.2f})" for one, hidden in zip(times, widths, strict=True)
            ]
            lines.append(f"| {dtype}, {launch} | {' | '.join(told_cells)} |")
        lines.append(f"| {dtype}, PyTorch | {' | '.join(_us(theirs[dtype, hidden]) for hidden in widths)} |")
    return "\n".join(lines) + "\n"


def beyond_a_tile() -> str:
    """What a column or an example more than a tile costs."""
    parts = []
    told = cells("odd-shapes", ["dtype", "layers", "batch", "hidden"])
    four = {(dtype, batch, hidden): cell for (dtype, layers, batch, hidden), cell in told.items() if layers == 4}
    for dtype, words in (("f16", "f16 with f32 masters"), ("f32", "f32")):
        time = {(batch, hidden): _us(cell["value"]) for (one, batch, hidden), cell in four.items() if one == dtype}
        wide = "; ".join(f"{time[32, h + 1]} us at {h + 1} and {time[32, h]} at {h}" for h in (1024, 4096))
        parts.append(f"{words} takes {wide}; {time[33, 1024]} with 33 examples and {time[31, 1024]} with 31")
    return f"- One column or example more than a tile (`odd-shapes`): {'; '.join(parts)}; {runs(four.values())}."


def passes() -> str:
    """Step times of three passes over the same shapes, under both settings of PyTorch's."""
    told = read_json(newest("expandable-steps.json"))["runs"]
    lines = [
        "| ms a step: means of the processes, least to most | first pass, every shape new | second | third |",
        "|---|--:|--:|--:|",
    ]
    for setting in dict.fromkeys(run["setting"] for run in told):
        row = []
        for number in range(3):
            means = [
                statistics.mean(ms for at, _, _, ms, _ in run["rows"] if at == number)
                for run in told
                if run["setting"] == setting
            ]
            row.append(f"{min(means):.1f} to {max(means):.1f}, median {statistics.median(means):.1f}")
        lines.append(f"| {setting} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def growing() -> str:
    """In how many steps memory grows, and what those take."""
    told = read_json(newest("expandable-steps.json"))["runs"]
    parts = []
    for setting in dict.fromkeys(run["setting"] for run in told):
        of = [run["rows"] for run in told if run["setting"] == setting]
        grew = [[row for row in rows if row[0] == 0 and row[4]] for rows in of]
        times = [sum(row[3] for row in rows) / 1e3 for rows in grew]
        steps = sorted({len(rows) for rows in grew})
        later = sum(row[4] for rows in of for row in rows if row[0] > 0)
        parts.append(
            f"{setting}: in {listed(map(str, steps))} steps of the first pass, which take {min(times):.2f} to "
            f"{max(times):.2f} s together, and {later} times after it"
        )
    total = [sum(row[3] for row in run["rows"] if row[0] == 0) / 1e3 for run in told]
    return f"Memory grows, {'; '.join(parts)}. A first pass takes {min(total):.1f} to {max(total):.1f} s."


def steals() -> str:
    """What a steal costs beside a retry."""
    words = {"gpt2": "GPT-2", "gpt2_fsdp1.rank0": "GPT-2 under FSDP, one rank", "resnet50": "ResNet-50"}
    lines = [
        "| program, limit over active | allocator | all driver calls | a steal | a retry | refused requests |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, program in words.items():
        for row in read_json(newest(f"replay-limit-{name}.json")):
            told = [f"{1e3 * row['driver_s']:.0f} ms"]
            for path in ("steal", "retry"):
                one = row["requests"].get(path)
                told.append(f"{1e3 * one['driver_s'] / one['count']:.1f} ms, {one['count']}" if one else "none")
            told.append(str(row["failed_allocations"]))
            limit = row["limit_bytes"] / row["lower_bound_bytes"]
            lines.append(f"| {program}, {limit:.2f} | `{row['alloc']}` | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


PIECES: dict[str, Pieces] = {
    "experiments/notes/kernels.md": {"| variant |": variants, "| removed |": removed},
    "experiments/notes/training-step.md": {
        "`experiments run fast-training": captured_source,
        "| us a step by width |": captured,
        "| width and type |": beside.table,
        "`experiments/baselines/train_beside.py`": beside.source,
        "| type and width |": step_kernels.table,
        "At width": step_kernels.bounds,
        "- One column or example": beyond_a_tile,
    },
    "experiments/notes/expandable.md": {
        "| ms a step": passes,
        "Memory grows": growing,
        "| program, limit over active |": steals,
    },
}
