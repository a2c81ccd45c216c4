"""Several GPUs: memory that NCCL registers, and the memory of its communicators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, read_json
from vramlab_analysis.pages.cells import build
from vramlab_analysis.pages.registry import group, markdown, table

MIB = 2**20
OPERATIONS = {
    "all-reduce-in-place": "all-reduce in place",
    "all-reduce": "all-reduce into other memory",
    "all-gather": "all-gather",
}
COLUMNS = [(operation, launch) for operation in OPERATIONS for launch in ("eager", "graph")]


@cache
def _record() -> dict[str, Any]:
    """The newest record of `experiments register`. Raises AnalysisError without one."""
    paths = repository.listing().files("register.json")
    if not paths:
        raise AnalysisError(f"{repository.results()}: no *-register.json in it.")
    return dict(read_json(paths[-1]))


def verdict(kind: Mapping[str, Any], mode: str) -> str:
    """Whether NCCL registers a kind of memory in one mode, in words."""
    found = kind.get("measurement") or {}
    for row in found.get("registrations", []):
        if row["mode"] != mode:
            continue
        if row.get("error"):
            return "refused"
        if not row["registered"]:
            return "accepted, not registered"
        return "wrong sums" if row.get("correct") is False else "yes"
    return kind.get("error") or "not measured"


def _largest_bytes(kind: Mapping[str, Any]) -> int:
    """Size of the largest collective over a kind of memory."""
    return max((row["bytes"] for row in (kind.get("measurement") or {}).get("times", [])), default=0)


def sum_times(kind: Mapping[str, Any], operation: str, launch: str) -> dict[str, float]:
    """Median time of the largest collective in microseconds, by mode."""
    times, largest = (kind.get("measurement") or {}).get("times", []), _largest_bytes(kind)
    chosen = (row for row in times if (row["operation"], row["launch"], row["bytes"]) == (operation, launch, largest))
    return {row["mode"]: row["p50_ns"] / 1e3 for row in chosen}


def largest() -> dict[str, dict[str, dict[str, float]]]:
    """Median times of the largest collectives of the newest record, by kind, `operation.launch` and mode."""
    return {
        kind["kind"]: {f"{operation}.{launch}": sum_times(kind, operation, launch) for operation, launch in COLUMNS}
        for kind in _record()["kinds"]
    }


def _cell(times: Mapping[str, float]) -> str:
    """Times by mode: not registered, registered, as a window."""
    shown = [f"{times[mode]:,.0f}" for mode in ("none", "register", "window") if mode in times]
    return ", ".join(shown) or "-"


def registration_table(record: Mapping[str, Any]) -> str:
    """The kinds of memory of a record: what NCCL registers, and the times of the largest collectives."""
    body = []
    for kind in record["kinds"]:
        cells = [verdict(kind, mode) for mode in ("register", "window")]
        cells += [f"{_largest_bytes(kind) / MIB:,.0f}", *(_cell(sum_times(kind, *column)) for column in COLUMNS)]
        body.append([f"`{kind['kind']}`", *cells])
    heads = [f"{OPERATIONS[operation]}, {launch}" for operation, launch in COLUMNS]
    return markdown(["memory", "registers", "as a window", "MiB", *heads], body, left=3)


@table("registration")
def registration() -> str:
    """By kind of memory: whether NCCL registers it; microseconds of the largest collectives without and with it."""
    return registration_table(_record())


def communicator_table(record: Mapping[str, Any]) -> str:
    """Device memory by number of communicators."""
    body = []
    for row in record["communicators"].get("memory", []):
        counted = row.get("counted_bytes")
        body.append([
            str(row["count"]),
            f"{row['device_bytes'] / MIB:,.0f}",
            "not counted" if counted is None else f"{counted / MIB:,.0f}",
        ])  # fmt: skip
    return markdown(["communicators", "device memory, MiB", "counted by NCCL, MiB"], body)


@table("communicators")
def communicators() -> str:
    """Device memory that communicators take, by their number."""
    return communicator_table(_record())


@group("registration")
def values() -> Mapping[str, Any]:
    """Machine, ranks, NCCL, numbers of kinds (all, registered, as windows), and blocks of kernels by kind: `grid`."""
    record = _record()
    kinds = [kind for kind in record["kinds"] if kind.get("measurement")]
    blocks = {
        kind["kind"]: {
            f"{row['operation']}.{row['mode']}": row["blocks"]
            for row in kind["measurement"]["times"]
            if row.get("blocks") is not None
        }
        for kind in kinds
    }
    return {
        "gpu": kinds[0]["measurement"]["gpu"] if kinds else "",
        "build": build(record.get("provenance")),
        "day": record["started_at"][:10],
        "ranks": record["ranks"],
        "nccl": kinds[0]["measurement"]["nccl"] if kinds else "",
        "kinds": len(record["kinds"]),
        "registered": sum(verdict(kind, "register") == "yes" for kind in kinds),
        "windows": sum(verdict(kind, "window") == "yes" for kind in kinds),
        "grid": blocks,
    }
