"""Runs of the acceptance list, recorded by `experiments/pytorch/acceptance.py`, compared with PyTorch's own allocator.

A file is JSON lines: facts of the machine for each call, then one record per run. The runner uses this module for its
verdicts, too, so it imports only Python's standard library.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes

Record = dict[str, Any]
NATIVE = "native"
# Suffix of an allocator's name: the program ran under `vramlab run`, which recorded it.
RECORDED = "+run"
# PyTorch's own allocators, which it may report under other names.
PYTORCHS = (NATIVE, "expandable", "cudaMallocAsync")
_KEYS = {"id", "program", "arm", "repeat", "gpus", "tolerance", "status", "code"}


def relative_difference(one: Sequence[float | str], other: Sequence[float | str]) -> float:
    """The largest relative difference of two lists of losses.

    0 if all bits are equal, infinite if they cannot be compared. Losses that are not finite are written as text.
    """
    if len(one) != len(other):
        return float("inf")
    worst = 0.0
    for a, b in zip(map(float, one), map(float, other), strict=True):
        if a == b or (a != a and b != b):
            continue
        difference = abs(a - b) / max(abs(a), abs(b))
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def loss_difference(record: Record, base: Record) -> float:
    """The largest relative difference of the losses of two runs, over the processes of a job."""
    actual, expected = ([rank.get("losses", []) for rank in run.get("ranks", [])] for run in (record, base))
    if len(actual) != len(expected):
        return float("inf")
    return max((relative_difference(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def spread(natives: Sequence[Record]) -> float:
    """The largest relative difference between native's own runs of a program."""
    successful = [run for run in natives if run["status"] == "ok"]
    return max((loss_difference(run, successful[0]) for run in successful), default=0.0)


def verdict(record: Record, natives: Sequence[Record]) -> str:
    """The difference of a run from native's, in words; empty where there is none, or the run was skipped.

    Losses may differ by the program's tolerance, or by twice the difference of native's own runs.
    """
    if record["status"] == "skipped":
        return ""
    if record["status"] == "hung":
        return "did not end"
    if record["status"] == "failed":
        orphans = "left_behind" in record and record["code"] == 0
        return "left processes behind" if orphans else f"ended with {record['code']}"
    if record.get("recorded", {}).get("files") == 0:
        return "was not recorded"
    allocator = record["arm"].removesuffix(RECORDED)
    backends = {rank["backend"] for rank in record.get("ranks", []) if "backend" in rank}
    if allocator not in PYTORCHS and backends and backends != {f"vramlab:{allocator}"}:
        return f"ran under {', '.join(sorted(backends))}"
    successful = [run for run in natives if run["status"] == "ok"]
    if not successful:
        return "" if record["arm"] == NATIVE else "native did not run"
    allowed = max(record["tolerance"], 2 * spread(successful))
    difference = min(loss_difference(record, run) for run in successful)
    return f"losses differ by {difference:.1e}" if difference > allowed else ""


def peak_reserved(record: Record) -> int | None:
    """Peak reserved memory in bytes, summed over the processes of a job; None if unknown."""
    peaks = [rank["peak_reserved"] for rank in record.get("ranks", []) if "peak_reserved" in rank]
    return sum(peaks) if peaks else None


@dataclass
class Runs:
    """The runs of all recorded lists. For each program the newest file counts."""

    machines: list[Record] = field(default_factory=list)
    runs: list[Record] = field(default_factory=list)

    def of(self, program: str, arm: str | None = None) -> list[Record]:
        """The runs of a program, under an arm or all."""
        return [run for run in self.runs if run["program"] == program and arm in (None, run["arm"])]

    def programs(self, gpus: int) -> list[str]:
        """Programs of this number of GPUs that native ran, by name."""
        return sorted(
            {run["program"] for run in self.runs if run["gpus"] == gpus and not self.skip_reason(run["program"])}
        )

    def skip_reason(self, program: str) -> str | None:
        """Why a program was skipped, if it was."""
        return next((run["why"] for run in self.of(program, NATIVE) if run["status"] == "skipped"), None)

    def arms(self, gpus: int) -> list[str]:
        """Arms under which programs of this number of GPUs ran, in the order of the runs."""
        return list(dict.fromkeys(run["arm"] for run in self.runs if run["gpus"] == gpus))

    def differences(self, program: str, arm: str) -> list[str]:
        """The differences of the runs of a program under an arm from native's; empty if there are none."""
        natives = self.of(program, NATIVE)
        return [difference for run in self.of(program, arm) if (difference := verdict(run, natives))]

    def ratio(self, program: str, arm: str) -> float | None:
        """Peak reserved memory over native's, medians; None if either is unknown."""
        actual, native = (
            [peak for run in self.of(program, one) if run["status"] == "ok" and (peak := peak_reserved(run))]
            for one in (arm, NATIVE)
        )
        return statistics.median(actual) / statistics.median(native) if actual and native else None


def files() -> list[Path]:
    """Recorded lists, the newest last."""
    return repository.listing().files("acceptance.jsonl")


def load(*paths: Path) -> Runs:
    """The runs of some files, the newest last, or of all that are recorded.

    Of a run that was repeated the last counts.

    Raises AnalysisError when a file is not a record of the list.
    """
    found = Runs()
    programs: dict[str, dict[str, Record]] = {}
    for path in paths or files():
        here: dict[str, dict[str, Record]] = {}
        machine: Record = {}
        for number, line in enumerate(read_bytes(path).splitlines(), 1):
            one = parse_json(line, f"{path}: line {number}")
            if isinstance(one, dict) and one.get("kind") == "machine":
                machine = one
                found.machines.append(one)
            elif isinstance(one, dict) and one.keys() >= _KEYS:
                runs = here.setdefault(one["program"], {})
                runs.pop(one["id"], None)
                runs[one["id"]] = one | {"machine": machine}
            else:
                raise AnalysisError(f"{path}: line {number}: not a run of the acceptance list.")
        programs |= here
    found.runs = [run for runs in programs.values() for run in runs.values()]
    return found
