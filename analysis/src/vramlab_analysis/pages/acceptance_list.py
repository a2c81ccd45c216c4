"""Values and tables of the acceptance list: each program under each allocator, compared with PyTorch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from vramlab_analysis import acceptance, inside
from vramlab_analysis.pages.cells import dates, listed
from vramlab_analysis.pages.registry import group, markdown, table

MIB = 2**20
# Peaks of native that differ by no more than this factor are shown as one.
SAME = 1.01


@cache
def _runs() -> acceptance.Runs:
    return acceptance.load(*acceptance.SPECS)


def _arms(gpus: int) -> list[str]:
    """Arms except native in the order of tables, those that were recorded last."""
    known = list(inside.ARMS)

    def rank(arm: str) -> tuple[bool, int, str]:
        name = arm.removesuffix(acceptance.RECORDED)
        return name != arm, known.index(name) if name in known else len(known), arm

    return sorted((arm for arm in _runs().arms(gpus) if arm != acceptance.NATIVE), key=rank)


def _head(arm: str) -> str:
    name = arm.removesuffix(acceptance.RECORDED)
    return f"`{name}`" if name == arm else f"`{name}`, recorded"


def _cell(program: str, arm: str) -> str:
    """The differences of a program under an arm, or its peak reserved over native's."""
    runs = _runs().of(program, arm)
    if not runs:
        return "–"
    differences = Counter(_runs().differences(program, arm))
    if differences:
        return "; ".join(
            f"{one} ({count} of {len(runs)})" if len(runs) > 1 else one for one, count in differences.items()
        )
    ratio = _runs().ratio(program, arm)
    return "ok" if ratio is None else f"{ratio:.2f}"


def _native(program: str) -> str:
    """Native's own peak in MiB, the median with the range where its runs differ by more than a hundredth, or its
    differences."""
    if differences := _runs().differences(program, acceptance.NATIVE):
        return "; ".join(dict.fromkeys(differences))
    peaks = [peak / MIB for peak in _runs().peaks(program, acceptance.NATIVE)]
    if not peaks:
        return "ok"
    least, middle, most = min(peaks), median(peaks), max(peaks)
    return f"{middle:,.0f} ({least:,.0f} to {most:,.0f})" if most > SAME * least else f"{middle:,.0f}"


def _table(title: str, gpus: int) -> str:
    arms = _arms(gpus)
    programs = _runs().programs(gpus)
    body = ([f"`{program}`", _native(program), *(_cell(program, arm) for arm in arms)] for program in programs)
    return markdown([title, "`native`, MiB", *map(_head, arms)], body)


@table("acceptance-1")
def one_gpu() -> str:
    """Programs of one GPU."""
    return _table("program of one GPU", 1)


@table("acceptance-2")
def two_gpus() -> str:
    """Programs of two GPUs."""
    return _table("program of two GPUs", 2)


def _equal(runs: acceptance.Runs, program: str) -> bool:
    """True if the losses of all completed runs of a program are equal in all bits."""
    return len({run.losses for run in runs.of(program) if run.completed}) == 1


@group("acceptance")
def counts() -> Mapping[str, Any]:
    """By the number of GPUs, `1` and `2`: programs, runs under other allocators than native, recorded runs of native,
    differences, and programs with equal losses in all bits in all runs (`equal`). The other programs (`unequal`), and
    how many of them differ between runs of native (`natively`); those that were skipped, and machines in words;
    `repeated`: the programs of the repeated runs, their number and those whose losses differ from the program's first
    run."""
    runs = _runs()
    values: dict[str, Any] = {"days": dates(run.entry.meta["started_at"] for run in runs.runs)}
    unequal: list[str] = []
    for gpus in (1, 2):
        programs, arms = runs.programs(gpus), _arms(gpus)
        count = {arm: sum(len(runs.of(program, arm)) for program in programs) for arm in arms}
        recorded = count.pop(acceptance.NATIVE + acceptance.RECORDED, 0)
        other = [program for program in programs if not _equal(runs, program)]
        values[str(gpus)] = {
            "programs": len(programs),
            "runs": sum(count.values()),
            "recorded": recorded,
            "differences": sum(len(runs.differences(program, arm)) for program in programs for arm in arms),
            "equal": len(programs) - len(other),
        }
        unequal += other
    machines = [machine for run in runs.runs if {"gpu", "torch"} <= (machine := run.machine).keys()]
    words = (f"{machine['gpu']}, driver {inside.driver(machine)}, PyTorch {machine['torch']}" for machine in machines)
    values["machines"] = "; ".join(dict.fromkeys(words))
    values["builds"] = listed(dict.fromkeys(inside.build(machine) for machine in machines))
    values["unequal"] = listed([f"`{program}`" for program in unequal]) if unequal else "none"
    natives = ({run.losses for run in runs.of(program, acceptance.NATIVE)} for program in unequal)
    values["natively"] = sum(len(losses) > 1 for losses in natives)
    skipped = sorted({f"`{run.program}` ({run.why_skipped})" for run in runs.runs if run.why_skipped})
    values["skipped"] = listed(skipped) if skipped else "none"
    again = acceptance.load(acceptance.REPEATS)
    first = {run.program: run.losses for run in reversed(again.runs)}
    values["repeated"] = {
        "programs": listed([f"`{program}`" for program in sorted(first)]) if first else "none",
        "arms": listed([_head(arm) for arm in again.arms(2)]) if first else "none",
        "runs": len(again.runs),
        "other": sum(run.losses != first[run.program] for run in again.runs),
    }
    return values
