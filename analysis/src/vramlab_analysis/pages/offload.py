"""PyTorch programs that keep data in pinned host memory, under PyTorch's own allocator of it and others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from vramlab_analysis import experiments, measures
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages.registry import group, markdown, table

GIB = 2**30
SPEC = "offload"
PROGRAMS = {
    "fsdp": "GPT-2 under FSDP 2 with CPU offload",
    "optimizer": "GPT-2, optimizer state on the host",
    "activations": "GPT-2, activations on the host",
    "weights": "weights streamed layer by layer",
    "loader": "a loader with `pin_memory=True`",
}
OWN = "pytorch"
HOSTS = (OWN, "host-pytorch", "host-exact")

Rows = dict[tuple[str, str], dict[str, Any]]


@cache
def _rows() -> Rows:
    """The newest record of the spec, by program and allocator. Raises AnalysisError without one."""
    finished = [run for run in experiments.results(SPEC, "gpu").runs if run.done]
    return of_runs((str(run.options["host-alloc"]), run.meta, run.result) for run in finished)


def of_runs(runs: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Rows:
    """Rows of the runs of a spec, each given by its allocator, its record and its result.

    A step is a run's median. It is divided by that under PyTorch's own allocator in the same repeat: the median over
    the repeats and its interval. Losses are equal if they are so in all runs under both. Raises AnalysisError if a
    program lacks an allocator or two repeats.
    """
    lines: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for host, meta, result in runs:
        for line in result["lines"]:
            lines.setdefault((line["program"], host), {})[meta["repeat"]] = line
    out: Rows = {}
    for program in PROGRAMS:
        for host in HOSTS:
            found, own = (lines.get((program, name), {}) for name in (host, OWN))
            both = sorted(found.keys() & own.keys())
            if len(both) < 2:
                raise AnalysisError(f"{SPEC}: {program} under {host} has fewer than two repeats with PyTorch's.")
            steps = {repeat: statistics.median(line["step_s"]) for repeat, line in found.items()}
            base = {repeat: statistics.median(line["step_s"]) for repeat, line in own.items()}
            middle, low, high = measures.median_interval(steps[repeat] / base[repeat] for repeat in both)
            asked, pinned = (max(line[key] for line in found.values()) for key in ("requested_bytes", "reserved_bytes"))
            out[program, host] = {
                "requested_bytes": asked,
                "reserved_over_requested": pinned / asked,
                "step_s": statistics.median(steps.values()),
                "step_over_pytorch": middle,
                "low": low,
                "high": high,
                "rounds": len(both),
                "equal_losses": len({line["digest"] for line in [*found.values(), *own.values()]}) == 1,
            }
    return out


@group("offload")
def values() -> Mapping[str, Any]:
    """By program and allocator: `reserved_over_requested`, `step_over_pytorch` with its interval `low` and `high`,
    `rounds`; `day`. `exact`: the most of `host-exact` over the programs other than the loader; `step` the most
    of its steps; `equal`: programs with equal losses under all allocators.
    """
    day = experiments.results(SPEC, "gpu").document["started_at"][:10]
    return values_of(_rows()) | {"day": day}


def values_of(rows: Rows) -> dict[str, Any]:
    """The values of `values`, of the rows of one record."""
    keys = ("reserved_over_requested", "step_over_pytorch", "low", "high", "rounds")
    out: dict[str, Any] = {}
    for (program, host), row in rows.items():
        out.setdefault(program, {})[host] = {key: row[key] for key in keys}
    large = [program for program in PROGRAMS if program != "loader"]
    ratios = [rows[program, "host-exact"]["reserved_over_requested"] for program in large]
    steps = [rows[program, "host-exact"]["step_over_pytorch"] for program in PROGRAMS]
    equal = [program for program in PROGRAMS if all(rows[program, host]["equal_losses"] for host in HOSTS)]
    return out | {"exact": max(ratios), "step": max(steps), "programs": len(PROGRAMS), "equal": len(equal)}


@table("offload")
def ratios() -> str:
    """By program: the most that it requested, what each allocator pinned over that, and the step over PyTorch's."""
    return table_of(_rows())


def table_of(rows: Rows) -> str:
    """The table of the rows of one record."""

    def step(row: Mapping[str, Any]) -> str:
        return f"{row['step_over_pytorch']:.3f} ({row['low']:.3f} to {row['high']:.3f})"

    body = []
    for program, title in PROGRAMS.items():
        cells = [f"{rows[program, OWN]['requested_bytes'] / GIB:.2f}"]
        cells += [f"{rows[program, host]['reserved_over_requested']:.3f}" for host in HOSTS]
        cells += [step(rows[program, host]) for host in HOSTS[1:]]
        body.append([title, *cells])
    pinned = ["PyTorch pins, times", "`host-pytorch`", "`host-exact`"]
    return markdown(["", "requested, GiB", *pinned, "step, `host-pytorch`", "step, `host-exact`"], body)
