"""PyTorch programs that keep data in pinned host memory, under PyTorch's own allocator of it and others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages.registry import group, markdown, table

GIB = 2**30
PROGRAMS = {
    "fsdp": "GPT-2 under FSDP 2 with CPU offload",
    "optimizer": "GPT-2, optimizer state on the host",
    "activations": "GPT-2, activations on the host",
    "weights": "weights streamed layer by layer",
    "loader": "a loader with `pin_memory=True`",
}
HOSTS = ("pytorch", "host-pytorch", "host-exact")


@cache
def _rows() -> dict[tuple[str, str], dict[str, Any]]:
    """The newest record of `offload/compare.py`, by program and allocator. Raises AnalysisError without one."""
    paths = repository.listing().files("offload.jsonl")
    if not paths:
        raise AnalysisError("experiments/results: has no *-offload.jsonl.")
    rows = [json.loads(line) for line in paths[-1].read_text().splitlines()]
    return {(row["program"], row["host"]): row for row in rows}


@group("offload")
def values() -> Mapping[str, Any]:
    """By program and allocator: `reserved_over_requested`, `step_over_pytorch`, `rounds`. `exact`: the most of
    `host-exact` over the programs other than the loader; `equal`: programs with equal losses under all allocators.
    """
    rows = _rows()
    keys = ("reserved_over_requested", "step_over_pytorch", "rounds")
    out: dict[str, Any] = {}
    for (program, host), row in rows.items():
        out.setdefault(program, {})[host] = {key: row[key] for key in keys}
    large = [program for program in PROGRAMS if program != "loader"]
    ratios = [rows[program, "host-exact"]["reserved_over_requested"] for program in large]
    equal = [program for program in PROGRAMS if all(rows[program, host]["equal_losses"] for host in HOSTS)]
    return out | {"exact": max(ratios), "programs": len(PROGRAMS), "equal": len(equal)}


@table("offload")
def ratios() -> str:
    """By program: the most that it requested, what each allocator pinned over that, and the step over PyTorch's."""
    rows = _rows()
    body = []
    for program, title in PROGRAMS.items():
        cells = [f"{rows[program, 'pytorch']['requested_bytes'] / GIB:.2f}"]
        cells += [f"{rows[program, host]['reserved_over_requested']:.3f}" for host in HOSTS]
        cells += [f"{rows[program, host]['step_over_pytorch']:.2f}" for host in HOSTS[1:]]
        body.append([title, *cells])
    pinned = ["PyTorch pins, times", "`host-pytorch`", "`host-exact`"]
    return markdown(["", "requested, GiB", *pinned, "step, `host-pytorch`", "step, `host-exact`"], body)
