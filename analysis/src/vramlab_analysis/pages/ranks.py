"""Training on two GPUs: step times of both ranks by allocator and buffers, and PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes
from vramlab_analysis.experiments import Entry, results
from vramlab_analysis.pages.cells import origin, span
from vramlab_analysis.pages.registry import group, markdown, table

MICRO = 1e6
MIB = 2**20
# Runs of the trainer by name in the record, with the row of the table.
VARIANTS = {
    "m-caching": "`caching`",
    "m-stream-ordered": "`stream-ordered`",
    "m-rmm-arena": "`rmm-arena`",
    "m-naive": "`naive`",
    "m-mixed": "`naive` on rank 0, `caching` on rank 1",
    "m-no-overlap": "`caching`, `--overlap off`",
    "m-bucket-1M": "`caching`, `--bucket 1M`",
    "m-record-stream": "`caching`, `--buffers record-stream`",
    "m-events": "`caching`, `--buffers events`",
    "m-graph": "`caching`, `--launch graph`",
}


@cache
def _lines() -> list[dict[str, Any]]:
    """The lines of the newest record, the machine first. Raises AnalysisError without one."""
    paths = repository.listing().files("ranks.jsonl")
    if not paths:
        raise AnalysisError(f"{repository.results()}: no *-ranks.jsonl in it.")
    return [parse_json(line, str(paths[-1])) for line in read_bytes(paths[-1]).splitlines()]


def _runs(name: str) -> list[dict[str, Any]]:
    """Finished runs of a name. Raises AnalysisError where there is none."""
    runs = [line for line in _lines() if line.get("name") == name and line.get("rc") == 0]
    if not runs:
        raise AnalysisError(f"the record of several GPUs has no finished run of {name}.")
    return runs


def _ddp(name: str) -> dict[str, float]:
    """Median step of PyTorch by width, in microseconds."""
    steps: dict[str, list[float]] = {}
    for run in _runs(name)[-1]["runs"]:
        steps.setdefault(str(run["hidden"]), []).append(MICRO * run["step_s"])
    return {width: median(times) for width, times in steps.items()}


@group("ranks")
def values() -> Mapping[str, Any]:
    """Median step in microseconds by variant, `ddp` by mode and width, `sum` of 256 MiB in microseconds, and counts."""
    equal = [line for line in _lines() if str(line.get("name", "")).startswith(("c-n2-", "c-f16-n2-"))]
    counts = [len(_runs(name)) for name in VARIANTS]
    kills = [line for line in _lines() if line.get("name") == "kill"]
    return {
        "machine": _lines()[0]["machine"],
        "day": _lines()[0]["day"],
        "step": {name.removeprefix("m-"): _step(name) for name in VARIANTS},
        "runs": {"least": min(counts), "most": max(counts)},
        "ddp": {"eager": _ddp("ddp-eager"), "graph": _ddp("ddp-graph")},
        "sum": {
            "mib": _runs("ddp-all-reduce")[0]["all_reduce_bytes"] / MIB,
            "trainer-mib": _runs("all-reduce-256M")[0]["communication"]["bucket_bytes"][0] / MIB,
            "pytorch": MICRO * median(_runs("ddp-all-reduce")[0]["all_reduce_s"]),
            "trainer": MICRO * _runs("all-reduce-256M")[0]["communication"]["sum_s"][0],
        },
        "equal": {"runs": len(equal), "losses": len({run["losses"] for run in equal})},
        "kill": {
            "runs": len(kills),
            "ended": sum(line["processes_left"] == "0" for line in kills),
            "longest": max(line["seconds"] for line in kills),
        },
    }


def _step(name: str) -> float:
    """Median step of the slower rank, in microseconds."""
    return float(median(MICRO * max(rank["step_s"] for rank in run["ranks"]) for run in _runs(name)))


@table("ranks")
def steps() -> str:
    """Both ranks by variant: median step with the range, host blocked, reserved memory, and memory that waits."""
    body = []
    for name, title in VARIANTS.items():
        runs = _runs(name)
        cells = []
        for rank in (0, 1):
            times = [MICRO * run["ranks"][rank]["step_s"] for run in runs]
            cells.append(f"{median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f})")
        blocked = [median(MICRO * run["ranks"][rank]["blocked_s"] for run in runs) for rank in (0, 1)]
        peaks = [
            max(rank[key] for run in runs for rank in run["ranks"]) / MIB for key in ("reserved_peak", "pending_peak")
        ]
        body.append([title, *cells, f"{blocked[0]:,.0f}, {blocked[1]:,.0f}", *(f"{peak:,.1f}" for peak in peaks)])
    head = ["", "rank 0, µs a step", "rank 1, µs a step", "host blocked, µs", "reserved, MiB", "pending, MiB"]
    return markdown(head, body)


# Rows of the table by width: arm and allocator in the spec `ranks`.
BY_WIDTH = {
    ("allocators", "caching"): "`caching`",
    ("allocators", "stream-ordered"): "`stream-ordered`",
    ("allocators", "naive"): "`naive`",
    ("mixed", "caching"): "`naive` on rank 0, `caching` on rank 1",
}


@cache
def _by_width() -> dict[tuple[str, str], dict[int, list[Entry]]]:
    """Finished runs of the spec `ranks` by row and width. Raises AnalysisError without one."""
    found: dict[tuple[str, str], dict[int, list[Entry]]] = {row: {} for row in BY_WIDTH}
    for entry in results("ranks", "gpu").runs:
        row = (entry.arm, entry.options["alloc"])
        if entry.done and row in found:
            found[row].setdefault(int(entry.options["hidden"]), []).append(entry)
    if not all(found.values()):
        raise AnalysisError("experiments/results: the newest experiment `ranks` lacks rows of the table by width.")
    return found


def largest_of_ranks(entries: list[Entry], value: str) -> list[float]:
    """The largest value of a run's ranks, in microseconds, for each run."""
    return [MICRO * max(rank[value] for rank in entry.record.summary["ranks"]) for entry in entries]


@group("ranks-by-width")
def by_width() -> Mapping[str, Any]:
    """Median step of the slower rank and exposed communication in microseconds, by allocators and width; the step over
    that of `caching` in the same repeat on the same host, `over`; and counts."""
    rows = _by_width()
    base = {width: _by_turn(entries) for width, entries in rows[("allocators", "caching")].items()}
    names = {("mixed", "caching"): "mixed"}
    cells = {
        names.get(row, row[1]): {
            str(width): {
                "step": median(largest_of_ranks(entries, "step_s")),
                "exposed": median(largest_of_ranks(entries, "exposed_communication_s")),
                "over": median(_over(_by_turn(entries), base[width])),
            }
            for width, entries in sorted(widths.items())
        }
        for row, widths in rows.items()
    }
    counts = [len(entries) for widths in rows.values() for entries in widths.values()]
    return cells | {"runs": span(counts), "origin": origin("ranks")}


def _by_turn(entries: list[Entry]) -> dict[tuple[int, str], float]:
    """The step of the slower rank of each run, by repeat and host."""
    turns = ((entry.meta["repeat"], entry.meta["provenance"]["host_hash"]) for entry in entries)
    return dict(zip(turns, largest_of_ranks(entries, "step_s"), strict=True))


def _over(steps: dict[tuple[int, str], float], base: dict[tuple[int, str], float]) -> list[float]:
    """Steps over those of the same turn."""
    return [step / base[turn] for turn, step in steps.items() if turn in base]


@table("ranks-by-width")
def steps_by_width() -> str:
    """The slower rank's median step with the range, and the exposed communication, by allocators and width."""
    rows = _by_width()
    widths = sorted({width for found in rows.values() for width in found})
    body = []
    for row, found in rows.items():
        cells = []
        for width in widths:
            times = largest_of_ranks(found[width], "step_s")
            exposed = median(largest_of_ranks(found[width], "exposed_communication_s"))
            cells.append(f"{median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f}); {exposed:,.0f}")
        body.append([BY_WIDTH[row], *cells])
    return markdown(["µs a step; exposed sums", *(f"width {width:,}" for width in widths)], body)
