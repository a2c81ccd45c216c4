"""PyTorch programs of two ranks under FSDP 2 by allocator, and what papers report of other programs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from statistics import median
from typing import Any

from vramlab_analysis.experiments import results
from vramlab_analysis.pages.cells import origin, span
from vramlab_analysis.pages.registry import group, markdown, table

MIB = 2**20
# Allocators of PyTorch with which each step is compared.
BASES = ("native", "expandable")
# Gigabytes that papers report: model, PyTorch's cache, expandable segments, the paper's allocator, live memory.
PUBLISHED = {
    "[STAlloc](https://arxiv.org/abs/2507.16274)": [
        ("Llama-7B", 21.05, 18.18, 14.1, 13.85),
        ("Qwen-MoE", 50.6, 27.0, 31.9, None),
    ],
}
# GMLake's paper has averages over eight models on A100s: gigabytes saved, and percentage points of fragmentation.
GMLAKE = {"saved-gb": 9.2, "most-saved-gb": 25.0, "fragmentation": 15.0, "most-fragmentation": 33.0}
# Options, what the runs that are compared have in common, and the result.
Run = tuple[Mapping[str, Any], Hashable, Mapping[str, Any]]


def _by_cell(runs: Iterable[Run]) -> dict[str, dict[str, dict[Hashable, Mapping[str, Any]]]]:
    """Results by program, allocator and repeat."""
    cells: dict[str, dict[str, dict[Hashable, Mapping[str, Any]]]] = {}
    for options, repeat, result in runs:
        cells.setdefault(str(options["program"]), {}).setdefault(str(options["alloc"]), {})[repeat] = result
    return cells


def _ms(result: Mapping[str, Any]) -> float:
    """The step of the slower rank."""
    return float(max(rank["ms"] for rank in result["of_ranks"]))


def _over(
    cell: Mapping[Hashable, Mapping[str, Any]], base: Mapping[Hashable, Mapping[str, Any]]
) -> dict[str, float] | None:
    """The step over that of the base in the repeats that both have: the median, the least and the most."""
    both = [repeat for repeat in cell if cell[repeat].get("of_ranks") and base.get(repeat, {}).get("of_ranks")]
    ratios = [_ms(cell[repeat]) / _ms(base[repeat]) for repeat in both]
    return (
        {"median": median(ratios), "least": min(ratios), "most": max(ratios), "pairs": len(ratios)} if ratios else None
    )


def _ratio(over: Mapping[str, float] | None) -> str:
    """A ratio and, if it varies, its range."""
    if over is None:
        return "-"
    middle, least, most = (f"{over[name]:.2f}" for name in ("median", "least", "most"))
    return middle if least == most else f"{middle} ({least} to {most})"


def cells(runs: Iterable[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """By program and allocator: reserved in MiB and over active by rank, the step in ms and over the bases, losses.

    A cell that did not finish has only its error.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for program, allocs in _by_cell(runs).items():
        native = {result.get("losses_sha256") for result in allocs.get("native", {}).values()}
        for alloc, repeats in allocs.items():
            done = [result for result in repeats.values() if result.get("of_ranks")]
            if not done:
                error = next(iter(repeats.values())).get("oom") or "failed"
                found.setdefault(program, {})[alloc] = {"error": error}
                continue
            ranks = list(zip(*(result["of_ranks"] for result in done), strict=True))
            digests = {result["losses_sha256"] for result in done}
            steps = {base: _over(repeats, allocs.get(base, {})) for base in BASES}
            found.setdefault(program, {})[alloc] = {
                "runs": len(done),
                "reserved": [max(rank["peak_reserved"] for rank in each) / MIB for each in ranks],
                "ratio": [max(rank["peak_reserved"] / rank["peak_active"] for rank in each) for each in ranks],
                "ms": median(map(_ms, done)),
                "over": {base: ratio for base, ratio in steps.items() if ratio is not None},
                "losses": "equal" if digests == native and len(native) == 1 else "differ",
            }
    return found


def torch_rows(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Rows of the table of programs of several ranks."""
    body = []
    for program, allocs in sorted(found.items()):
        for alloc, cell in sorted(allocs.items(), key=lambda item: item[0] not in BASES):
            head = [f"`{program}`", f"`{alloc}`"]
            if "error" in cell:
                body.append([*head, "-", "-", "-", "-", "-", cell["error"]])
                continue
            over = [_ratio(cell["over"].get(base)) for base in BASES]
            reserved = ", ".join(f"{mib:.0f}" for mib in cell["reserved"])
            ratios = ", ".join(f"{ratio:.3f}" for ratio in cell["ratio"])
            body.append([*head, reserved, ratios, f"{cell['ms']:.1f}", *over, cell["losses"]])
    return body


def _runs() -> list[Run]:
    experiment = results("ranks-torch", "gpu")
    done = [entry for entry in experiment.runs if entry.done]
    return [(entry.options, entry.turn, entry.result) for entry in done]


@table("ranks-torch")
def torch_programs() -> str:
    """PyTorch programs of two ranks under FSDP 2, by allocator."""
    head = ["program", "allocator", "reserved by rank, MiB", "over active, by rank", "ms a step"]
    return markdown([*head, "over `native`", "over `expandable`", "losses"], torch_rows(cells(_runs())), left=2)


@group("ranks-torch")
def values() -> Mapping[str, Any]:
    """`cells` of the newest record, the number of runs of a cell, and where they are from."""
    found = cells(_runs())
    counts = [cell["runs"] for allocs in found.values() for cell in allocs.values() if "runs" in cell]
    finished = [cell for allocs in found.values() for cell in allocs.values() if "losses" in cell]
    return found | {
        "runs": span(counts),
        "pairs": span(over["pairs"] for cell in finished for over in cell["over"].values()),
        "cells": {"all": len(finished), "equal": sum(cell["losses"] == "equal" for cell in finished)},
        "origin": origin("ranks-torch"),
    }


@group("published")
def of_papers() -> Mapping[str, Any]:
    """What papers report without a table by model: `gmlake`."""
    return {"gmlake": GMLAKE}


@table("published-fragmentation")
def published() -> str:
    """What papers report, in gigabytes, and over live memory where they have it."""
    body = []
    for paper, models in PUBLISHED.items():
        for model, *reserved, live in models:
            over = [f"{size / live:.2f}" if live else "not reported" for size in reserved]
            body.append([paper, model, *(f"{size:g}" for size in reserved), *over])
    names = ("PyTorch's cache", "expandable segments", "the paper's")
    heads = [f"{name}, GB" for name in names] + [f"{name} over live" for name in names]
    return markdown(["paper", "model", *heads], body, left=2)
