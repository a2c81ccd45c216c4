"""Runs of the acceptance list (specs `acceptance…`), compared with PyTorch's own allocator."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vramlab_analysis import experiments
from vramlab_analysis.experiments import Entry, Experiment

NATIVE = "native"
# Suffix of an allocator's name: the program ran under `vramlab run`, which recorded it.
RECORDED = "+run"
# PyTorch's own allocators, which it may report under other names.
PYTORCHS = (NATIVE, "expandable", "cudaMallocAsync")
SPECS = ("acceptance", "acceptance-2")
# More runs of some programs of these.
REPEATS = "acceptance-repeats"
# The catalogue's names of the programs that need two GPUs.
TWO_GPUS = ("acceptance-two", "acceptance-job")
# The beginnings of the runner's errors about a run that exceeded its time, and about one that left processes.
HUNG, LEFT = "it was ended after", "it left a process behind"


@dataclass(frozen=True)
class Run:
    """One run of a program."""

    entry: Entry

    @property
    def program(self) -> str:
        """The program's name."""
        return str(self.entry.options["of"])

    @property
    def arm(self) -> str:
        """Its allocator, with a suffix if it was recorded."""
        options = self.entry.options
        return str(options.get("alloc", NATIVE)) + (RECORDED if options.get("way", "plain") != "plain" else "")

    @property
    def gpus(self) -> int:
        """The number of GPUs that the program needs."""
        return 1 + (self.entry.options["program"] in TWO_GPUS)

    @property
    def result(self) -> dict[str, Any]:
        """What it printed; empty if it failed."""
        return dict(self.entry.result) if self.entry.done else {}

    @property
    def why_skipped(self) -> str | None:
        """Why the program skipped itself, if it did."""
        return self.result.get("skipped")

    @property
    def completed(self) -> bool:
        """True if the program ran to its end."""
        return self.entry.done and self.why_skipped is None

    @property
    def processes(self) -> list[dict[str, Any]]:
        """What each process of a job printed."""
        return list(self.result.get("lines", []))

    @property
    def losses(self) -> tuple[tuple[float | str, ...], ...]:
        """The losses of each process. Those that are not finite are written as text."""
        return tuple(tuple(process.get("losses", [])) for process in self.processes)

    @property
    def peak_reserved(self) -> int | None:
        """Peak reserved memory in bytes, summed over the processes of a job; None if unknown."""
        peaks = [process["peak_reserved"] for process in self.processes if "peak_reserved" in process]
        return sum(peaks) if peaks else None

    @property
    def machine(self) -> dict[str, Any]:
        """Its GPU, driver, build and version of PyTorch, those that are known."""
        provenance = self.entry.meta["provenance"]
        known = {"gpu": self.entry.meta["machine"].get("gpu"), "driver": provenance.get("driver_release")}
        known |= {"build": provenance.get("git_commit")}
        known |= {"torch": next((line["torch"] for line in self.processes if "torch" in line), None)}
        return {key: value for key, value in known.items() if value is not None}


def relative_difference(one: Sequence[float | str], other: Sequence[float | str]) -> float:
    """The largest relative difference of two lists of losses.

    0 if all bits are equal, infinite if they cannot be compared.
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


def loss_difference(run: Run, base: Run) -> float:
    """The largest relative difference of the losses of two runs, over the processes of a job."""
    actual, expected = run.losses, base.losses
    if len(actual) != len(expected):
        return float("inf")
    return max((relative_difference(a, b) for a, b in zip(actual, expected, strict=True)), default=0.0)


def verdict(run: Run, natives: Sequence[Run]) -> str:
    """The difference of a run from native's, in words; empty where there is none, or the run was skipped.

    Losses may differ by the program's tolerance, which is 0 for most.
    """
    meta = run.entry.meta
    if not run.entry.done:
        error = str(meta.get("error") or "")
        if error.startswith(HUNG):
            return "did not end"
        return "left processes behind" if error.startswith(LEFT) else f"ended with {meta['exit_code']}"
    if not run.completed:
        return ""
    if run.result.get("recorded_files") == 0:
        return "was not recorded"
    allocator = run.arm.removesuffix(RECORDED)
    backends = {process["backend"] for process in run.processes if "backend" in process}
    if allocator not in PYTORCHS and backends and backends != {f"vramlab:{allocator}"}:
        return f"ran under {', '.join(sorted(backends))}"
    differences = [loss_difference(run, native) for native in natives if native.completed]
    if not differences:
        return "" if run.arm == NATIVE else "native did not run"
    if min(differences) > run.result.get("tolerance", 0.0):
        return f"losses differ by {min(differences):.1e}"
    return ""


@dataclass
class Runs:
    """Runs of programs of the list."""

    runs: list[Run] = field(default_factory=list)

    def of(self, program: str, arm: str | None = None) -> list[Run]:
        """The runs of a program, under an arm or all."""
        return [run for run in self.runs if run.program == program and arm in (None, run.arm)]

    def programs(self, gpus: int) -> list[str]:
        """Programs of this number of GPUs that native ran, by name."""
        return sorted({run.program for run in self.runs if run.gpus == gpus and not self.why_skipped(run.program)})

    def why_skipped(self, program: str) -> str | None:
        """Why a program was skipped, if it was."""
        return next((run.why_skipped for run in self.of(program, NATIVE) if run.why_skipped), None)

    def arms(self, gpus: int) -> list[str]:
        """Arms under which programs of this number of GPUs ran, in the order of the runs."""
        return list(dict.fromkeys(run.arm for run in self.runs if run.gpus == gpus))

    def differences(self, program: str, arm: str) -> list[str]:
        """The differences of the runs of a program under an arm from native's; empty if there are none."""
        natives = self.of(program, NATIVE)
        return [difference for run in self.of(program, arm) if (difference := verdict(run, natives))]

    def peaks(self, program: str, arm: str) -> list[int]:
        """Peak reserved memory in bytes of the runs of a program under an arm, those that are known."""
        return [peak for run in self.of(program, arm) if (peak := run.peak_reserved)]

    def ratio(self, program: str, arm: str) -> float | None:
        """Peak reserved memory over native's, medians; None if either is unknown."""
        actual, native = self.peaks(program, arm), self.peaks(program, NATIVE)
        return statistics.median(actual) / statistics.median(native) if actual and native else None


def of_experiment(experiment: Experiment) -> list[Run]:
    """The runs of one of the specs, failed ones included; those that the machine could not run are left out."""
    return [Run(entry) for entry in experiment.runs if entry.meta["status"] != "skipped"]


def load(*specs: str) -> Runs:
    """The runs of the newest results of some of the specs, those that have results."""
    labels = experiments.labels()
    there = (spec for spec in specs if any(experiments.holds_experiment(label / spec) for label in labels))
    return Runs([run for spec in there for run in of_experiment(experiments.results(spec, "gpu"))])
