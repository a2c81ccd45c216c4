"""Several GPUs: memory that NCCL registers, its own memory, second streams, and PyTorch programs under FSDP 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from statistics import median
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, read_json
from vramlab_analysis.experiments import Entry, results
from vramlab_analysis.pages.cells import span
from vramlab_analysis.pages.registry import group, markdown, table

MICRO = 1e6
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
        raise AnalysisError("experiments/results: has no *-register.json.")
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


def sum_times(kind: Mapping[str, Any], operation: str, launch: str) -> dict[str, float]:
    """Median time of the largest collective in microseconds, by mode."""
    times = (kind.get("measurement") or {}).get("times", [])
    largest = max((row["bytes"] for row in times), default=0)
    chosen = (row for row in times if (row["operation"], row["launch"], row["bytes"]) == (operation, launch, largest))
    return {row["mode"]: row["p50_ns"] / 1e3 for row in chosen}


def _cell(times: Mapping[str, float]) -> str:
    """Times by mode: not registered, registered, as a window."""
    shown = [f"{times[mode]:,.0f}" for mode in ("none", "register", "window") if mode in times]
    return ", ".join(shown) or "-"


def registration_table(record: Mapping[str, Any]) -> str:
    """The kinds of memory of a record: what NCCL registers, and the times of the largest collectives."""
    body = []
    for kind in record["kinds"]:
        cells = [verdict(kind, mode) for mode in ("register", "window")]
        cells += [_cell(sum_times(kind, *column)) for column in COLUMNS]
        body.append([f"`{kind['kind']}`", *cells])
    heads = [f"{OPERATIONS[operation]}, {launch}" for operation, launch in COLUMNS]
    return markdown(["memory", "registers", "as a window", *heads], body, left=3)


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
        "source": record["source"],
        "day": record["started_at"][:10],
        "ranks": record["ranks"],
        "nccl": kinds[0]["measurement"]["nccl"] if kinds else "",
        "kinds": len(record["kinds"]),
        "registered": sum(verdict(kind, "register") == "yes" for kind in kinds),
        "windows": sum(verdict(kind, "window") == "yes" for kind in kinds),
        "grid": blocks,
    }


# Rows of the table of the spec `ranks-buffers`: options that differ, in words.
def _row_of(entry: Entry) -> str:
    options = entry.options
    if entry.arm == "streams":
        return f"`--comm-streams {options['comm-streams']} --buffers {options['buffers']}`"
    if entry.arm == "shared":
        return f"`{options['alloc']}`, open to peers, registered"
    source, register, launch = (options[name] for name in ("bucket-source", "register", "launch"))
    return f"`--bucket-source {source} --register {register} --launch {launch}`"


def _of_ranks(entries: Iterable[Entry], name: str) -> list[float]:
    """The largest value of the ranks, for each run."""
    return [max(rank[name] for rank in entry.record.summary["ranks"]) for entry in entries]


@table("ranks-buffers")
def buffers() -> str:
    """By streams, lifetime, source and registration: the slower rank's step, peaks of active and pending memory."""
    rows: dict[str, list[Entry]] = {}
    for entry in results("ranks-buffers", "gpu").runs:
        if entry.done:
            rows.setdefault(_row_of(entry), []).append(entry)
    body = []
    for words, entries in rows.items():
        steps = [MICRO * step for step in _of_ranks(entries, "step_s")]
        peaks = [max(_of_ranks(entries, f"peak_{name}_bytes")) / MIB for name in ("reserved", "active", "pending")]
        body.append([
            words,
            f"{median(steps):,.0f} ({span(round(step) for step in steps)})",
            *(f"{peak:,.1f}" for peak in peaks),
        ])  # fmt: skip
    head = ["", "µs a step, the slower rank", "reserved, MiB", "active, MiB", "pending, MiB"]
    return markdown(head, body)


def torch_rows(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[list[str]]:
    """Rows of programs of several ranks: peak reserved, reserved over active, step, and equality of losses."""
    by_row: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for options, result in runs:
        by_row.setdefault((str(options["program"]), str(options["alloc"])), []).append(result)
    native = {program: found[0].get("losses_sha256") for (program, alloc), found in by_row.items() if alloc == "native"}
    body = []
    for (program, alloc), found in sorted(by_row.items()):
        done = [result for result in found if result.get("of_ranks")]
        if not done:
            body.append([f"`{program}`", f"`{alloc}`", "-", "-", "-", found[0].get("oom") or "failed"])
            continue
        ranks = [rank for result in done for rank in result["of_ranks"]]
        ratio = max(rank["peak_reserved"] / rank["peak_active"] for rank in ranks)
        same = all(result["losses_sha256"] == native.get(program) for result in done)
        body.append([
            f"`{program}`",
            f"`{alloc}`",
            f"{max(rank['peak_reserved'] for rank in ranks) / MIB:,.0f}",
            f"{ratio:.3f}",
            f"{median(max(rank['ms'] for rank in result['of_ranks']) for result in done):.1f}",
            "equal" if same else "differ",
        ])  # fmt: skip
    return body


@table("ranks-torch")
def torch_programs() -> str:
    """PyTorch programs of two ranks under FSDP 2, by allocator."""
    runs = [(entry.options, entry.result) for entry in results("ranks-torch", "gpu").runs if entry.done]
    head = ["program", "allocator", "peak reserved, MiB", "reserved over active", "ms a step", "losses"]
    return markdown(head, torch_rows(runs), left=2)
