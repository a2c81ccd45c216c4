"""Values and tables of recorded programs and of single calls: `family`, `bench`, replays under a limit."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from typing import Any

import polars as pl

from vramlab_analysis.errors import AnalysisError, read_json
from vramlab_analysis.experiments import Experiment, newest, results
from vramlab_analysis.measures import medians
from vramlab_analysis.pages.cells import span
from vramlab_analysis.pages.registry import group, markdown, table
from vramlab_analysis.repository import root

MIB = 2**20
# Columns of the table of recordings: the allocator, and its head; None: RMM's pool with the best initial size. A column
# appears once the newest record has it.
FAMILY = {
    "caching": "PyTorch (`caching`)",
    "pytorch-expandable": "expandable segments",
    "remap": "`remap`",
    "remap:steal=always": "`remap`, always",
    "remap:steal=always,small_pool=off": "the same, one pool",
    "gmlake": "`gmlake`",
    "rmm-pool": "RMM's pool, defaults",
    None: "RMM's pool, best start",
    "bfc": "`bfc`",
    "stream-ordered": "`stream-ordered`",
}
RECORDINGS = {
    "mlp": "MLP",
    "gpt2": "GPT-2, lengths vary",
    "resnet50": "ResNet-50",
    "streams": "prefetch on a side stream",
    "ranks/gpt2_ddp.rank0": "GPT-2, DDP, one of two ranks",
    "ranks/gpt2_fsdp1.rank0": "GPT-2, FSDP, one of two ranks",
}
# Columns and rows of the tables of calls, by their names in the record. A column appears once the newest record has it.
ALLOCATORS = {
    "caching": "`caching`",
    "pytorch": "`pytorch`",
    "pytorch-expandable": "`pytorch-expandable`",
    "remap": "`remap`",
    "gmlake": "`gmlake`",
    "pytorch-c10": "PyTorch",
    "rmm-pool": "RMM pool",
    "rmm-arena": "RMM arena",
    "cuda-malloc-async": "CUDA memory pool",
}
# The mark of a cell whose repeats differ by more than a quarter of their median.
WIDE = "†"
TIMES = {
    "history/gpt2": "GPT-2, recorded",
    "history/resnet50": "ResNet-50, recorded",
    "history/mlp": "MLP, recorded",
    "history/streams": "prefetch on a side stream, recorded",
    "mixed/64": "mixed sizes, 64 live",
    "mixed/1024": "1,024 live",
    "mixed/16384": "16,384 live",
}
RATES = {
    "threads/1": "1 thread",
    "threads/4": "4 threads, a stream each",
    "threads/16": "16 threads, a stream each",
    "shared/4": "4 threads, one stream",
    "shared/16": "16 threads, one stream",
}


def _replays(experiment: Experiment, **options: Any) -> pl.DataFrame:
    """The rows of replays, medians over the repeats, with short names of recordings."""
    named = pl.col("history").str.replace(r"\.pickle\.xz$", "")
    frame = experiment.replays(**options).with_columns(history=named)
    return medians(frame, [name for name in ("history", "alloc", "completion") if name in frame.columns])


def _best_start() -> dict[str, float]:
    """By recording, the peak reserved of RMM's pool with the best of several initial sizes, simulated."""
    frame = _replays(results("rmm-start", "sim"))
    return dict(frame.group_by("history").agg(pl.col("peak_reserved_bytes").min()).iter_rows())


@table("recordings")
def recordings() -> str:
    """Recorded programs: the lower bound, the offline placement, and each policy's peak reserved over the bound."""
    frame, plans = (_replays(results("family", "gpu"), arm=arm) for arm in ("replay", "plan"))
    planned = dict(plans.select("history", "plan_bytes").iter_rows())
    bounds = dict(frame.select("history", "lower_bound_bytes").iter_rows())
    peaks: dict[tuple[str, str | None], float] = {
        row[:2]: row[2] for row in frame.select("history", "alloc", "peak_reserved_bytes").iter_rows()
    }
    peaks |= {(name, None): peak for name, peak in _best_start().items()}
    columns = {alloc: head for alloc, head in FAMILY.items() if any((name, alloc) in peaks for name in RECORDINGS)}
    body = []
    for name, words in RECORDINGS.items():
        bound = bounds[name]
        ratios = [planned[name] / bound, *(peaks[name, alloc] / bound for alloc in columns)]
        body.append([words, f"{bound / MIB:,.0f} MiB", *(f"{ratio:.3f}" for ratio in ratios)])
    return markdown(["peak reserved over the bound", "bound", "offline placement", *columns.values()], body)


@group("family")
def family() -> Mapping[str, Any]:
    """Machine and day of the table of recordings; of the MLP RMM's pool over the bound and its initial sizes."""
    experiment = results("family", "gpu")
    rows = _replays(experiment, arm="replay", alloc="rmm-pool")
    row = rows.row(by_predicate=pl.col("history") == "mlp", named=True)
    best = _best_start()["mlp"]
    return {
        "day": experiment.document["started_at"][:10],
        "driver": experiment.document["provenance"]["driver_release"],
        "runs": len({entry.meta["repeat"] for entry in experiment.select(arm="replay")}),
        "rmm": {
            "start_mib": row["peak_reserved_bytes"] / MIB,
            "over": row["peak_reserved_bytes"] / row["lower_bound_bytes"],
        },
        "rmm-best": {"start_mib": best / MIB, "over": best / row["lower_bound_bytes"]},
    }


@group("deferred-frees")
def deferred_frees() -> Mapping[str, Any]:
    """Under PyTorch's rules, by recording: the share of peak reserved that deferred frees add, `.reserved`, the MiB
    that they keep active, `.active_mib`, and the share that taking blocks of other streams adds, `.steal`."""
    experiment = results("family", "sim")
    frame = _replays(experiment, arm="completion")
    peak = {(row["history"], row["alloc"], row["completion"]): row for row in frame.iter_rows(named=True)}
    values: dict[str, Any] = {"day": experiment.document["started_at"][:10]}
    for name in set(frame["history"]) & RECORDINGS.keys():
        recorded, instant, steal = (
            peak[name, alloc, how]
            for alloc, how in (("lab", "recorded"), ("lab", "instant"), ("lab:stream=steal", "recorded"))
        )
        values[name.rpartition("/")[2].partition(".")[0]] = {
            "reserved": recorded["peak_reserved_bytes"] / instant["peak_reserved_bytes"] - 1,
            "active_mib": (recorded["peak_active_bytes"] - instant["peak_active_bytes"]) / MIB,
            "steal": steal["peak_reserved_bytes"] / recorded["peak_reserved_bytes"] - 1,
        }
    return values


@group("bench")
def bench() -> Mapping[str, Any]:
    """The newest record of the calls of all allocators: facts, and the rows as `CASE.ALLOCATOR`; `slower.min` and
    `slower.max` are PyTorch's time over that of `caching` on recordings; `wide` of `cells` repeats differ by more than
    a quarter of their median."""
    document = read_json(newest("bench.json"))
    rows = {f"{row['case']}.{row['allocator']}": row for row in document["rows"]}
    columns = [name for name in ALLOCATORS if any(f"{case}.{name}" in rows for case in TIMES)]
    shown = [rows[f"{case}.{name}"] for case in TIMES | RATES for name in columns]
    ratios = [
        rows[f"{one}.pytorch-c10"]["median"] / rows[f"{one}.caching"]["median"] for one in TIMES if "history" in one
    ]
    return {
        **{key: document[key] for key in ("repeats", "cores")},
        "gpu": document["device"]["name"],
        "driver": document["provenance"]["driver_release"],
        "day": document["date"][:10],
        "cells": len(shown),
        "wide": sum(map(_is_wide, shown)),
        "mark": WIDE,
        "slower": {"min": min(ratios), "max": max(ratios)},
        **{name: {key: row[key] for key in ("median", "min", "max")} for name, row in rows.items()},
    }


def _calls(title: str, cases: dict[str, str]) -> str:
    """A table of calls: a row for each case, a column for each allocator; medians."""
    rows = {(row["case"], row["allocator"]): row for row in read_json(newest("bench.json"))["rows"]}
    columns = {name: head for name, head in ALLOCATORS.items() if any((case, name) in rows for case in cases)}
    body = []
    for case, words in cases.items():
        some = [rows[case, name] for name in columns]
        texts = (f"{row['median']:.2g}" if row["median"] < 10 else f"{row['median']:,.0f}" for row in some)
        body.append([words, *(f"{text}{WIDE * _is_wide(row)}" for text, row in zip(texts, some, strict=True))])
    return markdown([title, *columns.values()], body)


def _is_wide(row: dict[str, Any]) -> bool:
    """Whether the repeats of a cell differ by more than a quarter of their median."""
    return bool(row["max"] - row["min"] > row["median"] / 4)


@table("call-times")
def call_times() -> str:
    """Nanoseconds of an allocation and its free."""
    return _calls("ns for one allocation and its free", TIMES)


@table("call-rates")
def call_rates() -> str:
    """Allocations a second of all threads."""
    return _calls("million allocations and frees a second, all threads", RATES)


@group("instruments")
def instruments() -> Mapping[str, Any]:
    """Nanoseconds of a call by case: `bare/1`, `latency/1`, `trace/1`, `trace/16`."""
    document = read_json(newest("bench-instruments.json"))
    rows = {row["case"].partition("/")[2]: row for row in document["rows"]}
    return {"repeats": document["repeats"], "day": document["date"][:10], **rows}


def _expandable_runs() -> dict[str, list[list[Any]]]:
    """The rows (pass, …, ms, growth of memory) of each process of the spec `expandable-steps`, by setting."""
    runs: dict[str, list[list[Any]]] = {}
    for entry in results("expandable-steps", "gpu").select():
        runs.setdefault(entry.options["alloc"].replace("native", "default"), []).append(entry.result["rows"])
    return runs


@table("passes")
def passes() -> str:
    """Step times of three passes over the same shapes, under two settings of PyTorch's."""
    body = []
    for setting, runs in _expandable_runs().items():
        row = [setting]
        for number in range(3):
            means = [statistics.mean(ms for at, _, _, ms, _ in rows if at == number) for rows in runs]
            row.append(f"{min(means):.1f} to {max(means):.1f}, median {statistics.median(means):.1f}")
        body.append(row)
    head = ["mean step of a process in ms, least to greatest", "first pass, every shape new", "second", "third"]
    return markdown(head, body)


@group("passes")
def growth() -> Mapping[str, Any]:
    """By setting: in how many steps of the first pass memory grows, their seconds, and how often it grows later.
    `.overlap.PASS`: whether the ranges of the settings overlap (1) or not (0)."""
    values: dict[str, Any] = {}
    firsts, ranges = [], []
    for setting, runs in _expandable_runs().items():
        grew = [[row for row in rows if row[0] == 0 and row[4]] for rows in runs]
        seconds = [sum(row[3] for row in rows) / 1e3 for rows in grew]
        values[setting] = {
            "steps": span(len(rows) for rows in grew),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "later": sum(row[4] for rows in runs for row in rows if row[0] > 0),
        }
        firsts += [sum(row[3] for row in rows if row[0] == 0) / 1e3 for rows in runs]
        means = [[statistics.mean(row[3] for row in rows if row[0] == number) for rows in runs] for number in range(3)]
        ranges.append([(min(mean), max(mean)) for mean in means])
    overlap = sum(max(a[0], b[0]) <= min(a[1], b[1]) for a, b in zip(*ranges, strict=True))
    return values | {"first": {"min_s": min(firsts), "max_s": max(firsts)}, "overlapping": overlap}


@table("steals")
def steals() -> str:
    """Driver time of replays under a limit, and the mean of one request that remapped pages or retried."""
    programs = {"gpt2": "GPT-2", "gpt2_fsdp1.rank0": "GPT-2 under FSDP, one rank", "resnet50": "ResNet-50"}
    body = []
    for name, program in programs.items():
        for row in read_json(newest(f"replay-limit-{name}.json")):
            requests = (row["requests"].get(path) for path in ("steal", "retry"))
            means = (
                f"{1e3 * request['driver_s'] / request['count']:.1f} ms, {request['count']}" if request else "none"
                for request in requests
            )
            limit = row["limit_bytes"] / row["lower_bound_bytes"]
            body.append([
                f"{program}, {limit:.2f}", f"`{row['alloc']}`", f"{1e3 * row['driver_s']:,.0f} ms",
                *means,
                str(row["failed_allocations"]),
            ])  # fmt: skip
    head = ["program, limit over active", "allocator", "all driver calls", "a steal", "a retry", "failed requests"]
    return markdown(head, body, left=2)


@group("reading")
def reading() -> Mapping[str, Any]:
    """The default of `vramlab`'s limit on the memory for reading a recording, from the program's source."""
    source = (root() / "app/cli/src/reading.rs").read_text()
    found = re.findall(r"--read-memory|\[default: (\d+)GiB\]", source)
    sizes = [one for one in found if one]
    if len(sizes) != 1:
        raise AnalysisError("app/cli/src/reading.rs: no default of --read-memory in GiB.")
    return {"gib": int(sizes[0])}
