"""Values and tables of training runs: specs, the newest comparison, the simulator's agreement, kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from vramlab_analysis import agreement, histograms, losses, pytorch_comparison, step_kernels, steps
from vramlab_analysis.calls import account_of_steps
from vramlab_analysis.errors import AnalysisError, read_json
from vramlab_analysis.experiments import (
    Experiment,
    holds_experiment,
    labels,
    load_experiment,
    machine,
    newest,
    results,
)  # fmt: skip
from vramlab_analysis.measures import medians
from vramlab_analysis.pages.cells import build, cells, dates, listed, origin, span, step_table, us
from vramlab_analysis.pages.registry import GROUPS, group, markdown, table
from vramlab_analysis.plots import loss
from vramlab_analysis.style import si_time

MIB = 2**20
# Specs whose cells are values, `SPEC.KEY.KEY`, with the columns that name a cell and the runs that count.
SPECS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "caching-vs-stream-ordered": (["alloc", "hidden"], {}),
    "release-threshold": (["sync", "release_threshold"], {}),
    "synchronise": (["alloc", "sync"], {}),
    "loader": (["alloc", "loader"], {}),
    "width": (["name", "hidden"], {}),
    "graph-allocators": (["launch", "hidden", "alloc"], {}),
    "fusion-load": (["alloc", "fuse"], {"dtype": "f32"}),
    "odd-shapes": (["layers", "dtype", "batch", "hidden"], {}),
}


def cells_of(spec: str) -> dict[str, Any]:
    """Medians of a spec's cells as `KEY.KEY`, with `.low`, `.high` and `.runs`, and `repeats`, the runs of a cell."""
    by, where = SPECS[spec]
    found = cells(spec, by, **where)
    values: dict[str, Any] = {"repeats": span(cell["repeats"] for cell in found.values()), "of": origin(spec)}
    for key, cell in found.items():
        name = ".".join(map(str, key))
        values |= {name: cell["value"], f"{name}.low": cell["low"], f"{name}.high": cell["high"]}
        values[f"{name}.runs"] = cell["repeats"]
    return values


GROUPS.update({spec: lambda spec=spec: cells_of(spec) for spec in SPECS})  # type: ignore[misc]


@group("compare")
def compare() -> Mapping[str, Any]:
    """The newest comparison of the allocators on a GPU, by its rows; its build; `columns`: what the columns are of."""
    rows = comparison()
    runs = span(row["repeats"] for row in rows)
    columns = f"the epoch is a median of {runs} runs, all else of the last run"
    if all("middle_half" in row for row in rows):
        columns = f"medians of {runs} runs and their middle halves"
    return {
        "day": newest("cuda.json").parent.name[:10],
        "build": listed(dict.fromkeys(build(row.get("provenance")) for row in rows)),
        "columns": columns,
        **{row["arm"]: row for row in rows if "--" not in row["arm"]},
    }


def comparison() -> list[dict[str, Any]]:
    """The rows of the newest comparison of the allocators on a GPU."""
    rows: list[dict[str, Any]] = read_json(newest("cuda.json"))
    return rows


def _half(row: dict[str, Any], name: str, words: Callable[[float], str]) -> str:
    """The middle half of a number of a row in brackets; empty where the record has none, or it is one value."""
    low, high = map(words, row.get("middle_half", {}).get(name, (0.0, 0.0)))
    return "" if low == high else f" ({low}–{high})"


@table("epochs")
def epochs() -> str:
    """An epoch under each allocator with its default settings."""

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.0f}"

    def blocked(ns: float) -> str:
        return f"{ns / 1e6:.0f}"

    rows = [row for row in comparison() if "--" not in row["arm"]]
    best = min(row["epoch_s"] for row in rows)
    head = [f"epoch, {machine(rows[0]['device']).removeprefix('NVIDIA ')}", "relative to the best"]
    head += ["driver allocations", "host blocked, longest in", "allocate p50", "p99", "peak reserved"]
    body = [
        [
            f"`{row['arm']}`", f"{ms(row['epoch_s'])} ms{_half(row, 'epoch_s', ms)}", f"{row['epoch_s'] / best:.2f}",
            f"{row['driver_allocations']:,}",
            f"{blocked(row['blocked_ns'])} ms{_half(row, 'blocked_ns', blocked)}, `{row['blocked_in']}`",
            si_time(row["allocate_p50_ns"]),
            f"{si_time(row['allocate_p99_ns'])}{_half(row, 'allocate_p99_ns', si_time)}",
            f"{row['peak_reserved_bytes'] / MIB:.1f} MiB",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(["allocator", *head], body)


@group("hosts")
def hosts() -> Mapping[str, Any]:
    """The compared epoch in ms in the runs of all specs on such a GPU: `.min`, `.max` and `.runs` by allocator."""
    times: dict[str, list[float]] = {}
    work = {"hidden": 784, "layers": 4, "batch": 64, "sync": "never", "loader": "resident"}
    work |= {"dtype": "f32", "fuse": "none", "launch": "eager"}
    whole, gpu = comparison()[0]["steps"], comparison()[0]["device"]
    for entry in (entry for experiment in recorded() for entry in experiment.runs):
        if entry.meta["program"] != "trainer" or entry.record.summary["dataset"]["name"] != "mnist":
            continue
        settings: dict[str, Any] = {**steps.UNSAID, "launch": "eager", **entry.record.settings}
        done = [epoch["wall_s"] for epoch in entry.record.summary["epochs"][1:] if epoch["steps"] == whole]
        unlimited = settings.get("allocator_settings", {}).get("release_threshold", 2**64 - 1) == 2**64 - 1
        same = all(settings[key] == value for key, value in work.items()) and entry.record.device == gpu
        if same and done and unlimited:
            times.setdefault(settings["allocator"], []).append(1e3 * statistics.median(done))
    return {name: {"min": min(ms), "max": max(ms), "runs": len(ms)} for name, ms in times.items()}


def recorded() -> list[Experiment]:
    """All experiments that were recorded on GPUs."""
    paths = (path for label in labels() for path in sorted(label.iterdir()))
    return [load_experiment(path) for path in paths if holds_experiment(path)]


@group("records")
def records() -> Mapping[str, Any]:
    """The specs recorded on the compared GPU: their number, days and builds. Of their completed runs the number, and
    the number of those without a commit and from changed sources."""
    gpu = machine(comparison()[0]["device"])
    of = [one for one in recorded() if one.machine == gpu]
    pages = sorted({one.directories[0].parent.name for one in of})
    told = [entry.meta.get("provenance") or {} for one in of for entry in one.runs if entry.done]
    return {
        "specs": len({one.name for one in of}),
        "days": dates(one.document["started_at"] for one in of),
        "pages": pages,
        "runs": len(told),
        "builds": len({one["git_commit"] for one in told if one.get("git_commit")}),
        "unknown": sum(not one.get("git_commit") for one in told),
        "dirty": sum(bool(one.get("git_dirty")) for one in told),
    }


@group("waits")
def waits() -> Mapping[str, Any]:
    """Microseconds of a step under `naive` in the driver's two calls for memory, all and blocked; of `caching`, whose
    few allocations map new pages, their number and the share of their time beyond that on an idle device."""
    pool = [
        epoch["driver_calls"]["mem_alloc"]
        for entry in results("where-time-goes", "gpu").select(alloc="caching")
        for epoch in entry.record.summary["epochs"]
    ]
    blocked, total, count = (sum(calls[key] for calls in pool) for key in ("blocked_ns", "total_ns", "count"))
    entries = results("where-time-goes", "gpu").select(alloc="naive")
    rows = medians(pl.concat(account_of_steps(entry.record, 10, 29) for entry in entries), ["call"])
    calls = {row["call"]: row for row in rows.iter_rows(named=True)}
    return {
        "runs": len(entries),
        "caching": {"count": count, "share": blocked / total},
        **{call: calls[call] for call in ("mem_alloc", "mem_free")},
    }


@group("stop")
def stop() -> Mapping[str, Any]:
    """The last step in which `caching` asks the driver, and the number of steps."""
    counts = [
        one.record.steps["driver_allocations"]
        for one in results("when-allocations-stop", "gpu").select(alloc="caching")
    ]
    last = max(index + 1 for run in counts for index, count in enumerate(run) if count)
    return {"last": last, "steps": max(map(len, counts))}


@group("loss-against-pytorch")
def loss_against_pytorch() -> Mapping[str, Any]:
    """Largest relative difference from PyTorch's losses, `RATE.WIDTH.max`, over how many steps, and the step from
    which two runs differ by more than rounding."""
    experiment, values = results("loss-against-pytorch", "gpu"), {}
    for ours in experiment.select(program="trainer"):
        hidden, rate = ours.options["hidden"], ours.options["lr"]
        other = experiment.select(program="pytorch", hidden=hidden, lr=rate)[0]
        differences = loss.difference(ours.record.steps, other.record.steps)
        beyond = differences.filter(pl.col("relative") > 1e-4)
        values[f"{rate}.{hidden}"] = {
            "max": differences["relative"].max(),
            "steps": differences.height,
            "apart_from": None if beyond.is_empty() else beyond["index"][0] + 1,
        }
    return values


@group("full-batch")
def full_batch() -> Mapping[str, Any]:
    """Step time of the trainer's graph over PyTorch's, `f32` by multiply-adds and `tf32`."""
    rows = step_table("full-batch")
    batches = {entry.record.settings["batch"] for entry in results("full-batch", "gpu").select(program="trainer")}
    values: dict[str, Any] = {"rows": max(batches), "repeats": span(rows["repeats"])}
    for dtype in ("f32", "tf32"):
        graph = rows.filter(pl.col("dtype") == dtype, pl.col("launch") == "graph")
        ours, other = (graph.filter(pl.col("program") == name) for name in ("trainer", "pytorch"))
        values[dtype] = float(ours["step_us"].min()) / float(other["step_us"].min())  # type: ignore[arg-type]
    return values


@group("half-losses")
def half_losses() -> Mapping[str, Any]:
    """Loss added by a type and its weights, `TYPE.WEIGHTS`; `programs`: the largest share between the two programs."""
    rows = losses.frame([entry.record for entry in results("half-losses", "gpu").select()])
    rows = rows.filter((pl.col("accumulate") == "f32") & ((pl.col("dtype") != "f16") | (pl.col("loss_scale") > 1)))
    ours = rows.filter(pl.col("program") == "trainer").iter_rows(named=True)
    return {
        "programs": rows["to_other"].abs().max(),
        **{f"{row['dtype']}.{row['weights']}": row["to_f32"] for row in ours},
    }


@group("graph-slowest")
def graph_slowest() -> Mapping[str, Any]:
    """Time of the slowest allocator over the best, `LAUNCH.WIDTH`, and the spread of the repeats there, `.spread`."""
    found, values = cells("graph-allocators", ["launch", "hidden", "alloc"]), {}
    for launch, hidden in {key[:2] for key in found}:
        some = [cell for key, cell in found.items() if key[:2] == (launch, hidden)]
        medians = [cell["value"] for cell in some]
        values[f"{launch}.{hidden}"] = max(medians) / min(medians)
        values[f"{launch}.{hidden}.spread"] = max(cell["high"] / cell["low"] - 1 for cell in some)
    return values


@group("streams")
def streams() -> Mapping[str, Any]:
    """Change of a graph's step by the best number of streams, `graph.WIDTH`; of the eager settings with more streams
    how many are faster beyond the spread of the runs."""
    found = cells("streams", ["arm", "hidden", "loader", "name", "streams"])
    values: dict[str, Any] = {"repeats": span(cell["repeats"] for cell in found.values())}
    for hidden in {key[1] for key in found}:
        graph = {key[-1]: cell["value"] for key, cell in found.items() if key[:2] == ("graph", hidden)}
        if graph:
            values[f"graph.{hidden}"] = min(ms for count, ms in graph.items() if count > 1) / graph[1] - 1
    more = [key for key in found if key[0] == "eager" and key[-1] > 1]
    values["eager.settings"] = len(more)
    values["eager.faster"] = sum(found[key]["high"] < found[*key[:-1], 1]["low"] for key in more)
    return values


@group("fusion")
def fusion() -> Mapping[str, Any]:
    """Allocations a step under `caching`, validation included, by what is fused."""
    rows = results("fusion-load", "gpu").frame(dtype="f32", alloc="caching")
    made = rows.group_by("fuse").agg(count=pl.col("allocations").median() / pl.col("steps_done").median())
    return {"width": rows["hidden"][0], **{row["fuse"]: row["count"] for row in made.iter_rows(named=True)}}


@group("memory")
def memory() -> Mapping[str, Any]:
    """Peak bytes reserved and requested, by arm."""
    runs = {run.record.arm: run.record for run in results("memory", "gpu").select()}
    levels = ("reserved", "requested")
    return {arm: {level: run.statistic(f"{level}_bytes.all.peak") for level in levels} for arm, run in runs.items()}


@group("latency")
def latency() -> Mapping[str, Any]:
    """Nanoseconds of an allocation, `p50` and `p999`, by allocator, of the calls of all `runs`."""
    values: dict[str, Any] = {"runs": len(results("latency", "gpu").select(alloc="caching"))}
    for alloc in ("caching", "stream-ordered", "naive"):
        found = [
            histogram
            for entry in results("latency", "gpu").select(alloc=alloc)
            for histogram in entry.record.histograms
        ]
        found = [one for one in found if one.operation == "allocate"]
        values[alloc] = {name: histograms.percentile(found, share) for name, share in (("p50", 0.5), ("p999", 0.999))}
    return values


@group("profile")
def profile() -> Mapping[str, Any]:
    """The built-in profile of the simulated GPU."""
    return agreement.profile()


GROUPS["agreement"] = agreement.values
GROUPS["own-code"] = agreement.own_code
table("agreement")(agreement.table)
GROUPS["pytorch-steps"] = pytorch_comparison.values
table("pytorch-steps")(pytorch_comparison.table)
GROUPS["step-kernels"] = step_kernels.values
table("step-kernels")(step_kernels.table)


def _step(spec: str, *, program: str = "trainer", how: str = "", **where: Any) -> float:
    """Step time in us of the fastest of the runs of a spec with these values."""
    expected = [pl.col(key) == value for key, value in where.items()]
    rows = step_table(spec).filter(pl.col("program") == program, pl.col("how").str.contains(how), *expected)
    if rows.is_empty():
        raise AnalysisError(f"{spec}: no run of {program} with {where} {how}.")
    return float(rows["step_us"].min())  # type: ignore[arg-type]


Pair = tuple[str, str, float, float]


def _pairs(head: list[str], rows: list[Pair]) -> str:
    """A table of two times each, and their ratio."""
    return markdown(head, ([name, cell, us(a), us(b), f"{b / a:.2f}"] for name, cell, a, b in rows), left=2)


@table("kernel-variants")
def variants() -> str:
    """Kernel variants, each with the next best in a recorded cell."""
    graph: dict[str, Any] = {"launch": "graph", "how": "streams 1"}
    fused = {
        fuse: cells("fusion-load", ["alloc", "fuse"], dtype="f32")["caching", fuse]["value"]
        for fuse in ("none", "epilogue", "update")
    }
    rows: list[Pair] = []
    for dtype, other, hidden in (
        ("tf32", "f32", 1024),
        ("tf32", "f32", 8192),
        ("f16", "tf32", 8192),
        ("bf16", "tf32", 8192),
    ):
        a, b = (_step("fast-training", dtype=one, hidden=hidden, **graph) for one in (dtype, other))
        rows.append((dtype, f"`fast-training`, width {hidden}, graph; next best: {other}", a, b))
    rows.append(
        ("fused updates", "`fusion-load`, width 784, eager; next best: epilogues", fused["update"], fused["epilogue"])
    )
    rows.append(("fused epilogues", "the same; next best: nothing fused", fused["epilogue"], fused["none"]))
    return _pairs(["variant", "record and cell", "variant, us", "next best, us", "speedup"], rows)


@group("fast-training")
def fast_training() -> Mapping[str, Any]:
    """Day and repeats of the spec."""
    started = results("fast-training", "gpu").document["started_at"][:10]
    return {"day": started, "repeats": span(step_table("fast-training")["repeats"])}


@table("captured-steps")
def captured_steps() -> str:
    """Steps of the trainer and of PyTorch's captured eager step, by type and width."""
    widths = sorted(step_table("fast-training")["hidden"].unique().to_list())
    body = []
    for dtype in ("f16", "bf16", "tf32", "f32"):
        at: dict[str, Any] = {"spec": "fast-training", "dtype": dtype}
        other = [_step(program="pytorch", hidden=hidden, launch="graph", **at) for hidden in widths]
        for launch in ("graph", "eager"):
            times = [_step(hidden=hidden, launch=launch, how="streams 1|^$", **at) for hidden in widths]
            ratios = (f"{us(a)} ({a / b:.2f})" for a, b in zip(times, other, strict=True))
            body.append([f"{dtype}, {launch}", *ratios])
        body.append([f"{dtype}, PyTorch", *map(us, other)])
    return markdown(["us a step by width", *map(str, widths)], body)
