"""Pieces of the note on running inside PyTorch: the acceptance list, program by program under each allocator."""

from __future__ import annotations

from collections import Counter
from functools import cache

from vramlab_analysis import acceptance, inside
from vramlab_analysis.documents import Pieces
from vramlab_analysis.quoted.parts import dates, listed

MIB = 2**20
# How often a program runs under an arm where it is run to be looked at once, and not to find what happens seldom.
FEW = 9
HEADS = {1: "program of one GPU", 2: "program of two GPUs"}


@cache
def _runs() -> acceptance.Runs:
    return acceptance.load()


def _arms(gpus: int) -> list[str]:
    """Arms beside native in the order of tables, those that were recorded last."""
    known = list(inside.ARMS)

    def place(arm: str) -> tuple[bool, int, str]:
        name = arm.removesuffix(acceptance.RECORDED)
        return name != arm, known.index(name) if name in known else len(known), arm

    return sorted((arm for arm in _runs().arms(gpus) if arm != acceptance.NATIVE), key=place)


def _head(arm: str) -> str:
    name = arm.removesuffix(acceptance.RECORDED)
    return f"`{name}`" if name == arm else f"`{name}`, recorded"


def _cell(program: str, arm: str) -> str:
    """A program under an arm: its differences, or its peak of reserved memory over native's."""
    runs = _runs().of(program, arm)
    if not runs:
        return "–"
    told = Counter(_runs().differences(program, arm))
    if told:
        return "; ".join(what if len(runs) == 1 else f"{what} ({count} of {len(runs)})" for what, count in told.items())
    ratio = _runs().ratio(program, arm)
    return "ok" if ratio is None else f"{ratio:.2f}"


def _native(program: str) -> str:
    """Native's own peak in MiB, or what went wrong."""
    natives = _runs().of(program, acceptance.NATIVE)
    if told := _runs().differences(program, acceptance.NATIVE):
        return "; ".join(dict.fromkeys(told))
    peaks = [peak for run in natives if (peak := acceptance.peak_reserved(run))]
    return f"{max(peaks) / MIB:,.0f}" if peaks else "ok"


def _table(gpus: int) -> str:
    """The table of programs by allocator, a head alone where nothing is recorded."""
    arms = _arms(gpus)
    lines = [
        " | ".join([f"| {HEADS[gpus]}", "`native`, MiB", *map(_head, arms)]) + " |",
        "|---|--:" + "|--:" * len(arms) + "|",
    ]
    for program in _runs().programs(gpus):
        lines.append(" | ".join([f"| `{program}`", _native(program), *(_cell(program, arm) for arm in arms)]) + " |")
    return "\n".join(lines) + "\n"


def one_gpu() -> str:
    """The table of programs of one GPU."""
    return _table(1)


def two_gpus() -> str:
    """The table of programs of two GPUs."""
    return _table(2)


def sentence() -> str:
    """The number of programs and runs, the machines, and the number of differences."""
    opening = "The list has programs that were made for it"
    runs = _runs()
    if not runs.runs:
        return f"{opening}; no run of them is recorded yet."
    parts = []
    for gpus, words in ((1, "one GPU"), (2, "two")):
        programs, arms = runs.programs(gpus), _arms(gpus)
        if programs:
            several = [len(runs.of(program, arm)) for program in programs for arm in arms]
            bad = sum(len(runs.differences(program, arm)) for program in programs for arm in arms)
            parts.append(f"{len(programs)} of {words} in {sum(several):,} runs beside native's, of which {bad} differ")
    builds: dict[str, list[str]] = {}
    for one in runs.machines:
        if "gpu" in one:
            machine = f"{one['gpu']}, driver {inside.driver(one)}, PyTorch {one['torch']}"
            some = builds.setdefault(machine, [])
            if (build := one.get("build", "")[:8]) and build not in some:
                some.append(build)
    machines = [machine + (f" (build {listed(some)})" if some else "") for machine, some in builds.items()]
    days = dates(one["at"] for one in runs.machines if "at" in one) if any("at" in one for one in runs.machines) else ""
    where = f" On {'; '.join(machines)}, {days}." if machines else ""
    bits = [
        program for gpus in HEADS for program in runs.programs(gpus)
        if acceptance.spread(runs.of(program, acceptance.NATIVE)) == 0
    ]  # fmt: skip
    count = sum(len(runs.programs(gpus)) for gpus in HEADS)
    equal = f"Native's own runs are equal to the bit in {len(bits)} of {count} programs."
    return f"{opening}: {', and '.join(parts)}.{where} {equal}"


def skipped() -> str:
    """Which programs were skipped, and why."""
    runs = _runs()
    told = {
        program: why for program in sorted({run["program"] for run in runs.runs}) if (why := runs.skip_reason(program))
    }
    words = [f"`{program}` ({why})" for program, why in told.items()]
    return f"Skipped where it ran: {listed(words) if words else 'none'}."


def often() -> str:
    """Programs that were run many times, with the number of runs that did not end or failed."""
    runs = _runs()
    told = []
    for program in sorted({run["program"] for run in runs.runs}):
        for arm in dict.fromkeys(run["arm"] for run in runs.of(program)):
            some = runs.of(program, arm)
            if len(some) > FEW:
                hung = sum(run["status"] == "hung" for run in some)
                bad = sum(run["status"] == "failed" for run in some)
                told.append(f"`{program}` {len(some)} times under {_head(arm)}: {hung} did not end, {bad} failed")
    return f"Run many times: {'; '.join(told) if told else 'none'}."


PIECES: Pieces = {
    "The list has programs": sentence,
    "Skipped where it ran": skipped,
    "Run many times": often,
    f"| {HEADS[1]} |": one_gpu,
    f"| {HEADS[2]} |": two_gpus,
}
