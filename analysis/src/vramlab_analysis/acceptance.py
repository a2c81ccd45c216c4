"""Runs of the acceptance list (specs `acceptance…`), compared with PyTorch's own allocator.

Older records are files of JSON lines: facts of the machine for each call, then one record per run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from vramlab_analysis import experiments, repository
from vramlab_analysis.errors import AnalysisError, read_json_lines
from vramlab_analysis.experiments import Entry, Experiment

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


def losses(record: Record) -> tuple[tuple[float | str, ...], ...]:
    """The losses of each process of a run."""
    return tuple(tuple(rank.get("losses", [])) for rank in record.get("ranks", []))


def loss_difference(record: Record, base: Record) -> float:
    """The largest relative difference of the losses of two runs, over the processes of a job."""
    actual, expected = losses(record), losses(base)
    if len(actual) != len(expected):
        return float("inf")
    return max((relative_difference(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def spread(natives: Sequence[Record]) -> float:
    """The largest relative difference between native's own runs of a program."""
    successful = [run for run in natives if run["status"] == "ok"]
    return max((loss_difference(*pair) for pair in combinations(successful, 2)), default=0.0)


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
    """The runs of all recorded lists. For each program the newest list counts, and its repeats."""

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

    def peaks(self, program: str, arm: str) -> list[int]:
        """Peak reserved memory in bytes of the runs of a program under an arm that succeeded, those that are known."""
        return [peak for run in self.of(program, arm) if run["status"] == "ok" and (peak := peak_reserved(run))]

    def ratio(self, program: str, arm: str) -> float | None:
        """Peak reserved memory over native's, medians; None if either is unknown."""
        actual, native = self.peaks(program, arm), self.peaks(program, NATIVE)
        return statistics.median(actual) / statistics.median(native) if actual and native else None


def _recorded() -> list[Experiment]:
    """The newest results of the specs, those that are there."""
    labels = experiments.labels()
    specs = (*SPECS, REPEATS)
    there = (spec for spec in specs if any(experiments.holds_experiment(label / spec) for label in labels))
    return [experiments.results(spec, "gpu") for spec in there]


def files() -> list[Path]:
    """Recorded lists, the newest last."""
    return repository.listing().files("acceptance.jsonl")


SPECS = ("acceptance", "acceptance-2")
# More runs of some programs of these.
REPEATS = "acceptance-repeats"
# The catalogue's names of the programs that need two GPUs.
TWO_GPUS = ("acceptance-two", "acceptance-job")
# The beginnings of the runner's errors about a run that exceeded its time, and about one that left processes.
HUNG, LEFT = "it was ended after", "it left a process behind"


def _of_entry(entry: Entry) -> tuple[Record, Record]:
    """The machine and the record of a run of the specs, as those of the files."""
    meta, options = entry.meta, entry.options
    result = entry.result if entry.done else {}
    lines, error = result.get("lines", []), str(meta.get("error") or "")
    torch = next((line["torch"] for line in lines if "torch" in line), None)
    machine = {"at": meta["started_at"], "build": meta["provenance"].get("git_commit")}
    machine |= {"driver": meta["provenance"].get("driver_release"), "gpu": meta["machine"].get("gpu"), "torch": torch}
    arm = str(options.get("alloc", NATIVE)) + (RECORDED if options.get("way", "plain") != "plain" else "")
    record = {
        "id": f"{options['of']} {arm} #{meta['repeat']}", "program": options["of"], "arm": arm,
        "repeat": meta["repeat"],
        "gpus": 1 + (options["program"] in TWO_GPUS), "tolerance": result.get("tolerance", 0.0),
        "code": meta["exit_code"], "took_s": meta["wall_s"], "ranks": lines,
        "status": "ok" if entry.done else "hung" if error.startswith(HUNG) else "failed",
    }  # fmt: skip
    if "skipped" in result:
        record |= {"status": "skipped", "why": result["skipped"]}
    if error.startswith(LEFT):
        record["left_behind"] = [error]
    if "recorded_files" in result:
        record["recorded"] = {"files": result["recorded_files"]}
    return {key: value for key, value in machine.items() if value is not None}, record


def of_experiment(experiment: Experiment) -> Runs:
    """The runs of one of the specs, failed ones included; those that the machine could not run are left out."""
    made = [_of_entry(entry) for entry in experiment.runs if entry.meta["status"] != "skipped"]
    found = Runs(runs=[record | {"machine": machine} for machine, record in made])
    for machine, _ in made:
        if "torch" in machine and not any(machine | {"at": one["at"]} == one for one in found.machines):
            found.machines.append(machine)
    return found


def repeats() -> Runs:
    """The runs of the spec that repeats programs whose losses differed once; none if it has no results."""
    return next((of_experiment(one) for one in _recorded() if one.name == REPEATS), Runs())


def load(*paths: Path) -> Runs:
    """The runs of some files, the newest last, or of all that are recorded, those of the specs included.

    Of a run that was repeated the last counts.

    Raises AnalysisError when a file is not a record of the list.
    """
    found = Runs()
    programs: dict[str, dict[str, Record]] = {}
    for path in paths or files():
        here: dict[str, dict[str, Record]] = {}
        machine: Record = {}
        for number, one in enumerate(read_json_lines(path), 1):
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
    for experiment in () if paths else _recorded():
        newer = of_experiment(experiment)
        found.machines += newer.machines
        if experiment.name != REPEATS:
            programs |= {run["program"]: {} for run in newer.runs}
        for run in newer.runs:
            programs.setdefault(run["program"], {})[f"{experiment.name}: {run['id']}"] = run
    found.runs = [run for runs in programs.values() for run in runs.values()]
    return found
