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
# More runs of a program under an allocator than this look for rare failures.
FEW = 9
# Peaks of native that differ by no more than this factor are shown as one.
SAME = 1.01


@cache
def _runs() -> acceptance.Runs:
    return acceptance.load()


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


@table("acceptance-differences")
def differences() -> str:
    """Programs and allocators with runs that differ from native's, and how much native's own runs differ."""
    body = []
    for gpus in (1, 2):
        for program in _runs().programs(gpus):
            natives = _runs().of(program, acceptance.NATIVE)
            spread = acceptance.spread(natives)
            own = f"by up to {spread:.1e}" if spread else "equal in all bits"
            for arm in _arms(gpus):
                found = _runs().differences(program, arm)
                if found:
                    words, count = "; ".join(dict.fromkeys(found)), f"{len(found)} of {len(_runs().of(program, arm))}"
                    body.append([f"`{program}`", _head(arm), words, count, own, f"{len(natives)}"])
    head = ["program", "allocator", "difference", "in runs", "native's own losses", "native's runs"]
    return markdown(head, body, left=5)


def _usual(runs: acceptance.Runs, program: str) -> Any:
    """The losses that most of native's runs of a program have."""
    return Counter(map(acceptance.losses, runs.of(program, acceptance.NATIVE))).most_common(1)[0][0]


@table("acceptance-repeats")
def repeats() -> str:
    """Programs whose losses differed in a single run, repeated under native and other allocators."""
    runs = acceptance.repeats()
    body = []
    for program in runs.programs(2):
        natives = runs.of(program, acceptance.NATIVE)
        usual, seen = _usual(runs, program), set(map(acceptance.losses, natives))
        for arm in runs.arms(2):
            some = runs.of(program, arm)
            found = [acceptance.losses(run) for run in some]
            other = [one for one in found if one != usual]
            most = max(acceptance.loss_difference(run, base) for run in some for base in natives)
            body.append([
                f"`{program}`", _head(arm), f"{len(found)}", f"{len(other)}",
                f"{sum(one in seen for one in other)}" if arm != acceptance.NATIVE else "–", f"{most:.1e}",
            ])  # fmt: skip
    head = ["program", "allocator", "runs", "with other losses", "of these, also under native", "largest difference"]
    return markdown(head, body, left=2)


@group("acceptance-repeats")
def again() -> Mapping[str, Any]:
    """By arm: `runs` of the programs that were repeated, and those with `other` losses than most of native's."""
    runs = acceptance.repeats()
    values: dict[str, Any] = {}
    for run in runs.runs:
        counts = values.setdefault(run["arm"], {"runs": 0, "other": 0})
        counts["runs"] += 1
        counts["other"] += acceptance.losses(run) != _usual(runs, run["program"])
    return values


@group("acceptance")
def counts() -> Mapping[str, Any]:
    """Programs, runs under other allocators than native and differences by the number of GPUs, `1` and `2`; runs of
    native that were recorded, `recorded`; programs whose native runs agree in all bits, `bits`; skipped programs;
    machines in words; the repeated runs: `runs`, `hung`, `failed` and the programs' names."""
    runs = _runs()
    values: dict[str, Any] = {
        "machines": [],
        "days": dates(machine["at"] for machine in runs.machines if "at" in machine),
    }
    for gpus in (1, 2):
        programs, arms = runs.programs(gpus), _arms(gpus)
        count = {arm: sum(len(runs.of(program, arm)) for program in programs) for arm in arms}
        recorded = count.pop(acceptance.NATIVE + acceptance.RECORDED, 0)
        values[str(gpus)] = {
            "programs": len(programs),
            "runs": sum(count.values()),
            "recorded": recorded,
            "differences": sum(len(runs.differences(program, arm)) for program in programs for arm in arms),
            "bits": sum(acceptance.spread(runs.of(program, acceptance.NATIVE)) == 0 for program in programs),
        }
    machines = [machine for machine in runs.machines if "gpu" in machine]
    words = (f"{machine['gpu']}, driver {inside.driver(machine)}, PyTorch {machine['torch']}" for machine in machines)
    values["machines"] = "; ".join(dict.fromkeys(words))
    values["builds"] = listed(dict.fromkeys(inside.build(machine) for machine in machines))
    programs = sorted({run["program"] for run in runs.runs})
    skipped = [f"`{program}` ({why})" for program in programs if (why := runs.skip_reason(program))]
    values["skipped"] = listed(skipped) if skipped else "none"
    groups = [
        runs.of(program, arm) for program in programs for arm in dict.fromkeys(run["arm"] for run in runs.of(program))
    ]
    repeated = [group for group in groups if len(group) > FEW]
    values["repeated"] = {
        "programs": listed(dict.fromkeys(f"`{group[0]['program']}`" for group in repeated)) if repeated else "none",
        "arms": listed(dict.fromkeys(_head(group[0]["arm"]) for group in repeated)) if repeated else "none",
        "runs": sum(map(len, repeated)),
        "hung": sum(run["status"] == "hung" for group in repeated for run in group),
        "failed": sum(run["status"] == "failed" for group in repeated for run in group),
    }
    return values
