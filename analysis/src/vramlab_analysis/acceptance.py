"""Runs of the acceptance list, as `experiments/pytorch/acceptance.py` records them, beside PyTorch's own allocator.

A file is JSON lines: facts of the machine for each call, then one record a run. The runner judges by this module, too,
so nothing outside of Python's own library is needed here.
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
# Behind the name of an allocator: the program ran under `vramlab run`, which recorded it.
RECORDED = "+run"
# Allocators of PyTorch's own, under whatever name it gives them.
PYTORCHS = (NATIVE, "expandable", "cudaMallocAsync")
_KEYS = {"id", "program", "arm", "repeat", "gpus", "tolerance", "status", "code"}


def relative_difference(one: Sequence[float | str], other: Sequence[float | str]) -> float:
    """The most that two lists of losses differ by, relatively.

    0 where all bits are equal, infinite where they cannot be compared. What is no finite number is written as text.
    """
    if len(one) != len(other):
        return float("inf")
    worst = 0.0
    for mine, theirs in zip(map(float, one), map(float, other), strict=True):
        if mine == theirs or (mine != mine and theirs != theirs):
            continue
        apart = abs(mine - theirs) / max(abs(mine), abs(theirs))
        worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def loss_difference(record: Record, base: Record) -> float:
    """The most that the losses of two runs differ by, over the processes of a job."""
    mine, theirs = ([rank.get("losses", []) for rank in one.get("ranks", [])] for one in (record, base))
    if len(mine) != len(theirs):
        return float("inf")
    return max((relative_difference(a, b) for a, b in zip(mine, theirs, strict=True)), default=0.0)


def spread(natives: Sequence[Record]) -> float:
    """The largest relative difference between native's own runs of a program."""
    well = [one for one in natives if one["status"] == "ok"]
    return max((loss_difference(one, well[0]) for one in well), default=0.0)


def verdict(record: Record, natives: Sequence[Record]) -> str:
    """The difference of a run from native's, in words; empty where there is none, or the run was skipped.

    Losses may differ by what the program says, or by twice what native's own runs differ by.
    """
    if record["status"] == "skipped":
        return ""
    if record["status"] == "hung":
        return "did not end"
    if record["status"] == "failed":
        left = "left_behind" in record and record["code"] == 0
        return "left processes behind" if left else f"ended with {record['code']}"
    if record.get("recorded", {}).get("files") == 0:
        return "was not recorded"
    allocator = record["arm"].removesuffix(RECORDED)
    backends = {rank["backend"] for rank in record.get("ranks", []) if "backend" in rank}
    if allocator not in PYTORCHS and backends and backends != {f"vramlab:{allocator}"}:
        return f"ran under {', '.join(sorted(backends))}"
    well = [one for one in natives if one["status"] == "ok"]
    if not well:
        return "" if record["arm"] == NATIVE else "native did not run"
    allowed = max(record["tolerance"], 2 * spread(well))
    apart = min(loss_difference(record, one) for one in well)
    return f"losses differ by {apart:.1e}" if apart > allowed else ""


def peak_reserved(record: Record) -> int | None:
    """Peak of reserved memory in bytes, over the processes of a job; None where it is not known."""
    peaks = [rank["peak_reserved"] for rank in record.get("ranks", []) if "peak_reserved" in rank]
    return sum(peaks) if peaks else None


@dataclass
class Runs:
    """The runs of all recorded lists. Of a program the newest file counts."""

    machines: list[Record] = field(default_factory=list)
    runs: list[Record] = field(default_factory=list)

    def of(self, program: str, arm: str | None = None) -> list[Record]:
        """The runs of a program, under an arm or all."""
        return [run for run in self.runs if run["program"] == program and arm in (None, run["arm"])]

    def programs(self, gpus: int) -> list[str]:
        """Programs of so many GPUs that native ran, by name."""
        return sorted(
            {run["program"] for run in self.runs if run["gpus"] == gpus and not self.skip_reason(run["program"])}
        )

    def skip_reason(self, program: str) -> str | None:
        """Why a program was skipped, if it was."""
        return next((run["why"] for run in self.of(program, NATIVE) if run["status"] == "skipped"), None)

    def arms(self, gpus: int) -> list[str]:
        """Arms under which programs of so many GPUs ran, in the order of the runs."""
        return list(dict.fromkeys(run["arm"] for run in self.runs if run["gpus"] == gpus))

    def differences(self, program: str, arm: str) -> list[str]:
        """The differences of the runs of a program under an arm from native's; empty where there is none."""
        natives = self.of(program, NATIVE)
        return [what for run in self.of(program, arm) if (what := verdict(run, natives))]

    def ratio(self, program: str, arm: str) -> float | None:
        """Peak reserved memory over native's, medians; None where either is not known."""
        mine, theirs = (
            [peak for run in self.of(program, one) if run["status"] == "ok" and (peak := peak_reserved(run))]
            for one in (arm, NATIVE)
        )
        return statistics.median(mine) / statistics.median(theirs) if mine and theirs else None


def files() -> list[Path]:
    """Recorded lists, the newest last."""
    return sorted(repository.results().glob("*-acceptance.jsonl*"))


def load(*paths: Path) -> Runs:
    """The runs of some files, the newest last, or of all that are recorded.

    Of a run that was made twice the last counts.

    Raises AnalysisError when a file is none of the list.
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
                raise AnalysisError(f"{path}: line {number}: no run of the acceptance list.")
        programs |= here
    found.runs = [run for runs in programs.values() for run in runs.values()]
    return found
