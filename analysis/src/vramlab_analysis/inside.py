"""Runs of PyTorch programs under its own allocators and ours, recorded by the specs `inside-*`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vramlab_analysis import experiments, style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import Entry
from vramlab_analysis.measures import median_interval

MIB = 2**20
# Every allocator in the order of figures and tables, PyTorch's own first, with its colour and marker.
ARMS: dict[str, tuple[str, str]] = {
    "native": (style.BLACK, "o"),
    "expandable": (style.GREY, "o"),
    "cudaMallocAsync": (style.GREEN, "^"),
    "caching": (style.BLUE, "s"),
    "pytorch-expandable": (style.SKY, "s"),
    "remap": (style.VERMILION, "D"),
    "remap:steal=always": (style.ORANGE, "D"),
    "stream-ordered": (style.PURPLE, "v"),
    "rmm-pool": ("#7F6000", "X"),
    "bfc": ("#44AA99", "P"),
    "tlsf": ("#882255", "*"),
}
PROGRAMS = {
    "gpt2": "GPT-2 124 M",
    "resnet50": "ResNet-50",
    "varying": "GPT-2, shapes vary",
    "moe": "mixture of experts",
    "generate": "text generation",
    "gnn": "random subgraphs",
    "graphed": "CUDA graph by hand",
    "compiled": "torch.compile",
}
# A step within this share of the settled one is settled itself.
SETTLED = 0.1
# The specs with the names of their runs here.
PARTS = {
    "inside-start": "smoke",
    "inside-calls": "empty",
    "inside-steps": "timed",
    "inside-limits": "curve",
    "inside-memory": "memory",
}


@dataclass
class Runs:
    """The runs of one or more campaigns, in the order in which they ended.

    A session is one build on one machine. For a part, a program and an allocator the newest build on a kind of GPU
    counts, with all of its sessions, and the times of each are compared only with native's in the same session.
    """

    machines: list[dict[str, Any]] = field(default_factory=list)
    # Runs of the sessions that count.
    runs: list[dict[str, Any]] = field(default_factory=list)
    # Runs of all sessions.
    every: list[dict[str, Any]] = field(default_factory=list)

    def of(self, *parts: str, program: str | None = None, arm: str | None = None) -> list[dict[str, Any]]:
        """Runs that succeeded or ran out of memory, of these parts (default: all), a program and an arm."""
        return _chosen(self.runs, parts, program, arm)

    def beside(self, arm: str, base: str, part: str, program: str) -> list[dict[str, Any]]:
        """Runs of `base` in the sessions of the runs of `arm`."""
        sessions = {run["session"] for run in self.of(part, program=program, arm=arm)}
        return [run for run in _chosen(self.every, (part,), program, base) if run["session"] in sessions]

    def arms(self, runs: Iterable[dict[str, Any]]) -> list[str]:
        """The arms of some runs, in the order of figures."""
        names = {run["arm"] for run in runs}
        return [*(arm for arm in ARMS if arm in names), *sorted(names - set(ARMS))]

    def machine(self, *parts: str) -> str:
        """The machines of the runs of these parts, in words."""
        machines = [self.machines[run["call"]] for run in self.of(*parts) if run["call"] is not None]
        words = [
            f"{machine['gpu']}, driver {driver(machine)}, PyTorch {machine['torch']}"
            for machine in machines
            if "gpu" in machine
        ]
        return "; ".join(dict.fromkeys(words)) or "unknown machine"


def _chosen(
    runs: Iterable[dict[str, Any]], parts: Sequence[str], program: str | None, arm: str | None
) -> list[dict[str, Any]]:
    return [
        run
        for run in runs
        if run["status"] in ("ok", "oom")
        and (not parts or run["part"] in parts)
        and program in (None, run["program"])
        and arm in (None, run["arm"])
    ]


def driver(machine: dict[str, Any]) -> str:
    """The release of a machine's driver, which some records repeat for each GPU."""
    release = re.match(r"[\d.]+", str(machine.get("driver")))
    return release[0] if release else "?"


def build(machine: dict[str, Any]) -> str:
    """The build of a machine's programs: a short commit, with `-dirty` if its sources differed from it."""
    commit, origin = machine.get("build") or "unknown", machine.get("provenance") or {}
    # A provenance of another commit is of other sources.
    dirty = origin.get("git_dirty") and origin.get("git_commit") == commit
    return f"{commit[:8]}{'-dirty' if dirty else ''}"


def files() -> list[Path]:
    """The recorded experiments, the newest of each spec last."""
    return [path for spec in PARTS for path in experiments.kept(spec)]


def _records(folder: Path) -> Iterable[dict[str, Any]]:
    """The runs of an experiment in the order in which they began, each machine before its own."""
    experiment = experiments.load_experiment(folder)
    part, last = PARTS[experiment.name], None
    for entry in sorted(experiment.runs, key=lambda entry: str(entry.meta["started_at"])):
        if entry.done and (machine := _machine(entry)) != last:
            last = machine
            yield machine
        yield _run(entry, part)


def _machine(entry: Entry) -> dict[str, Any]:
    """The machine of a run and its software, on the day of the run."""
    result, origin = entry.result, entry.meta["provenance"]
    return {
        "kind": "machine",
        "at": entry.meta["started_at"][:10],
        "gpu": result.get("gpu"),
        "torch": result["torch"],
        "driver": origin.get("driver_release"),
        "build": origin.get("git_commit", "unknown"),
        "provenance": origin,
    }


def _run(entry: Entry, part: str) -> dict[str, Any]:
    """A run of an experiment."""
    options = entry.options
    program, arm, limit = options["program"], options["alloc"], options.get("limit-over-active")
    part = "latency" if options.get("latency") else "passes" if (part, program) == ("timed", "varying") else part
    within = {"over_active": limit} if limit else {}
    named = {"part": part, "program": program, "arm": arm, "repeat": entry.meta["repeat"], **within}
    named["id"] = f"{part} {program} {arm}{f' at {limit:g}' if limit else ''} #{entry.meta['repeat']}"
    if not entry.done:
        return named | {"status": "failed", "log": entry.meta["error"]}
    result: dict[str, Any] = entry.result
    return result | named | {"status": "oom" if result["oom"] else "ok"}


def load(*folders: Path) -> Runs:
    """The runs of some experiments, the newest last, or of all that are recorded."""
    return joined(record for folder in folders or files() for record in _records(folder))


def joined(records: Iterable[dict[str, Any]]) -> Runs:
    """Runs, the newest last, each machine before its own.

    Each run gets the number of its `call` (an index of `machines`), its `session` and its `build`. Of runs that a
    session repeated, the last counts.
    """
    found = Runs()
    by_id: dict[tuple[Any, str], dict[str, Any]] = {}
    session: tuple[Any, ...] = ()
    for one in records:
        if one.get("kind") == "machine":
            found.machines.append(one)
            session = (one.get("gpu"), (one.get("provenance") or {}).get("host_hash"), one.get("build"))
        else:
            by_id.pop((session, one["id"]), None)
            call = len(found.machines) - 1
            build = found.machines[call].get("build")
            by_id[session, one["id"]] = one | {"build": build, "call": call, "session": session}
    found.every = list(by_id.values())
    newest = {(run["part"], run["program"], run["arm"]): _kind(run) for run in found.every}
    found.runs = [run for run in found.every if newest[run["part"], run["program"], run["arm"]] == _kind(run)]
    return found


def _kind(run: dict[str, Any]) -> tuple[Any, ...]:
    """The session of a run without its machine: GPU and build."""
    return run["session"][0], run["session"][-1]


def peak(run: dict[str, Any], what: str) -> int | None:
    """Peak bytes of a run at a level: reserved, active, allocated or requested."""
    value = (run.get("stats") or {}).get(f"{what}_bytes.all.peak")
    return None if value is None else int(value)


def settled(run: dict[str, Any]) -> float | None:
    """Peak reserved over peak active, both since the warm-up."""
    after = run.get("after_warm_up") or {}
    reserved, active = (after.get(f"{what}_bytes.all.peak") for what in ("reserved", "active"))
    return reserved / active if reserved and active else None


def span(values: Sequence[float], number: Any = lambda value: f"{value:,.0f}") -> str:
    """Median of some values, with the least and the greatest if they differ."""
    if not values:
        return ""
    low, middle, high = (number(value) for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def step(run: dict[str, Any]) -> float | None:
    """Median step of a run in ms."""
    return run.get("ms")


def ratio(
    runs: Runs,
    part: str,
    program: str,
    arm: str,
    base: str = "native",
    of: Callable[[dict[str, Any]], float | None] = step,
) -> tuple[float, float, float] | None:
    """Step time over that of `base`: the median and its 95 % interval (bootstrap over the runs).

    Runs of a repeat were made in turn, so each is compared with the run of the same repeat in its session. None without
    two of them.
    """
    actual, expected = (
        {_turn(run): value for run in some if (value := of(run))}
        for some in (runs.of(part, program=program, arm=arm), runs.beside(arm, base, part, program))
    )
    over = [value / expected[turn] for turn, value in actual.items() if turn in expected]
    return median_interval(over) if len(over) > 1 else None


def _turn(run: dict[str, Any]) -> tuple[tuple[Any, ...], int]:
    """The session and the repeat of a run."""
    return run["session"], run.get("repeat", 0)


def turns(runs: Runs, arm: str, key: str = "ns") -> tuple[float, float, float]:
    """Time of a call over native's in the same turn: lower quartile, median, upper quartile of all turns."""
    native = {_turn(run): run[key] for run in runs.beside(arm, "native", "empty", "empty")}
    over = [
        ns / base for run in runs.of("empty", arm=arm) for ns, base in zip(run[key], native[_turn(run)], strict=True)
    ]
    low, middle, high = np.quantile(over, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def passes(run: dict[str, Any], shapes: int = 16) -> tuple[float, float] | None:
    """Median step of the first and of the second pass over the same shapes, in ms."""
    times = run.get("device_ms") or []
    if len(times) < 2 * shapes:
        return None
    return statistics.median(times[:shapes]), statistics.median(times[shapes : 2 * shapes])


def second_pass(run: dict[str, Any]) -> float | None:
    """Median step of the second pass over the same shapes, in ms."""
    both = passes(run)
    return both and both[1]


def same_losses(runs: Runs, program: str, arm: str) -> str:
    """Whether an arm's losses equal native's in all bits, if native's runs agree."""
    native, actual = (
        {tuple(run["losses"]) for run in some if run["status"] == "ok"}
        for some in (runs.beside(arm, "native", "timed", program), runs.of("timed", program=program, arm=arm))
    )
    if not native or not actual:
        return "not run"
    if len(native) > 1:
        return "native's differ from run to run"
    return "the same" if actual == native else "differ"


@dataclass(frozen=True)
class Point:
    """One limit of a curve."""

    over_active: float
    # None: out of memory.
    ms: float | None


def curve(runs: Runs, program: str, arm: str) -> list[Point]:
    """The step time within each limit that the allocator respected, the smallest first."""
    times: dict[float, list[float | None]] = {}
    for run in runs.of("curve", program=program, arm=arm):
        if "over_active" in run and not beyond(run):
            times.setdefault(run["over_active"], []).append(None if run["status"] == "oom" else run["ms"])
    return [Point(limit, _if_all_ran(some)) for limit, some in sorted(times.items())]


def _if_all_ran(times: Sequence[float | None]) -> float | None:
    """The median of the runs within a limit, if none ran out of memory."""
    done = [ms for ms in times if ms is not None]
    return statistics.median(done) if len(done) == len(times) else None


def beyond(run: dict[str, Any]) -> bool:
    """Whether a run reserved more than its limit. A CUDA memory pool limits allocated memory, not reserved memory."""
    return bool(run["status"] == "ok" and (peak(run, "reserved") or 0) > run["limit"])


def _unlimited(runs: Runs, program: str, arm: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The runs of native without a limit, by session, in the sessions of an arm's curve that have some.

    Raises AnalysisError when none has.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs.beside(arm, "native", "curve", program):
        if "over_active" not in run:
            found.setdefault(run["session"], []).append(run)
    if not found:
        raise AnalysisError(f"{program} under {arm}: no run of native without a limit to compare with.")
    return found


def over_unlimited(runs: Runs, program: str, arm: str) -> dict[float, float]:
    """Step time within each limit that ran, over native's without one in the same session, the smallest limit first.

    Raises AnalysisError when native ran in none of the sessions.
    """
    native = {
        session: statistics.median(run["ms"] for run in some)
        for session, some in _unlimited(runs, program, arm).items()
    }
    over: dict[float, list[float]] = {one.over_active: [] for one in curve(runs, program, arm) if one.ms is not None}
    for run in runs.of("curve", program=program, arm=arm):
        if run.get("over_active") in over and run["session"] in native and not beyond(run):
            over[run["over_active"]].append(run["ms"] / native[run["session"]])
    return {limit: statistics.median(ratios) for limit, ratios in over.items() if ratios}


def slowest_step(runs: Runs, program: str, arm: str) -> float:
    """The longest step within any limit that an arm ran in, over native's median step without one.

    Raises AnalysisError when native ran in none of the sessions, or the arm in no limit.
    """
    native = _unlimited(runs, program, arm)
    over: list[float] = [
        max(run["device_ms"]) / statistics.median(one["ms"] for one in native[run["session"]])
        for run in runs.of("curve", program=program, arm=arm)
        if "over_active" in run and run["status"] == "ok" and run["session"] in native
    ]
    if not over:
        raise AnalysisError(f"{program} under {arm}: no limit in which it ran.")
    return max(over)


def mean_step(run: dict[str, Any]) -> float | None:
    """Mean of all recorded steps of a run in ms, the first ones included."""
    times = run.get("device_ms")
    return statistics.mean(times) if times else None


@dataclass(frozen=True)
class Within:
    """The steps of the runs within one limit, relative to native's without a limit: `mean` to its mean, the others to
    its settled step."""

    # Steps of a run, and runs.
    steps: int
    runs: int
    # Steps before the run settles: those at its beginning that are longer than the settled step by more than `SETTLED`.
    first: list[float]
    # Median of the second half of the steps, and mean of all of them.
    settled: float
    mean: float
    # Of all runs the largest mean and the longest step.
    most: float
    longest: float


def within(runs: Runs, program: str, arm: str, limit: float) -> Within:
    """First steps, settled step and mean of the runs within a limit; of several runs the medians.

    Raises AnalysisError when there are no such runs, or none of native in their sessions, or they differ in length.
    """
    units = {
        session: (statistics.median(map(_settled_step, base)), statistics.median(map(statistics.mean, base)))
        for session, native in _unlimited(runs, program, arm).items()
        if (base := [run["device_ms"] for run in native if run.get("device_ms")])
    }
    done = [
        (run["device_ms"], *units[run["session"]])
        for run in runs.of("curve", program=program, arm=arm)
        if run.get("over_active") == limit and run.get("device_ms") and run["session"] in units
    ]
    if not done:
        raise AnalysisError(f"{program} under {arm} at {limit:g}: no steps, or none of native without a limit.")
    over = [[step / unit for step in times] for times, unit, _ in done]
    if len(set(map(len, over))) > 1:
        raise AnalysisError(f"{program} under {arm} at {limit:g}: runs of different numbers of steps.")
    steps = [statistics.median(same) for same in zip(*over, strict=True)]
    settled = statistics.median(map(_settled_step, over))
    means = [statistics.mean(times) / unit for times, _, unit in done]
    count = next((at for at, one in enumerate(steps) if one <= settled * (1 + SETTLED)), len(steps))
    longest = max(map(max, over))
    return Within(len(steps), len(done), steps[:count], settled, statistics.median(means), max(means), longest)


def _settled_step(times: Sequence[float]) -> float:
    """The median of the second half of a run's steps."""
    return statistics.median(times[len(times) // 2 :])


def smallest(points: Sequence[Point]) -> float | None:
    """The smallest limit that ran, if every larger one ran."""
    least = None
    for point in reversed(points):
        if point.ms is None:
            break
        least = point.over_active
    return least


def draw_curves(runs: Runs, programs: Sequence[str]) -> Figure:
    """Step time over native's without a limit, against the limit, for each allocator; below, where it ran."""
    figure, axes = style.new(
        2, len(programs), width=10.0, height=5.6, sharex="col", squeeze=False, height_ratios=[3, 2]
    )
    drawn: dict[str, Any] = {}
    for place, program in enumerate(programs):
        top, below = axes[0][place], axes[1][place]
        arms = [
            arm
            for arm in runs.arms(run for run in runs.of("curve", program=program) if "over_active" in run)
            if curve(runs, program, arm)
        ]
        for row, arm in enumerate(arms):
            colour, mark = ARMS.get(arm, (style.GREY, "X"))
            ran = over_unlimited(runs, program, arm)
            out = [point.over_active for point in curve(runs, program, arm) if point.ms is None]
            line = top.plot(list(ran), list(ran.values()), color=colour, marker=mark, linewidth=1.2, markersize=4)
            drawn.setdefault(arm, line[0])
            below.plot(list(ran), [row] * len(ran), mark, color=colour, markersize=4)
            below.plot(out, [row] * len(out), "x", color=colour, markersize=4)
        top.axhline(1.0, color=style.INK, linewidth=0.8)
        top.set_title(PROGRAMS.get(program, program))
        below.set_yticks(range(len(arms)), arms, fontsize=7)
        below.invert_yaxis()
        below.set_xlabel("limit over active memory (x: out of memory)")
        style.grid(top, "both")
        style.grid(below, "x")
    axes[0][0].set_ylabel("step time over native's\nwithout a limit")
    figure.legend(drawn.values(), drawn.keys(), fontsize=7, ncols=6, loc="outside lower center")
    return figure


def draw_coverage(runs: Runs) -> Figure:
    """The number of runs of each program and allocator."""
    programs = [*PROGRAMS, "usual", "empty"]
    counts = np.zeros((len(programs), len(ARMS)), dtype=int)
    for row, program in enumerate(programs):
        for column, arm in enumerate(ARMS):
            counts[row, column] = len(runs.of(program=program, arm=arm))
    figure, axes = style.new(1, 1, width=9.0, height=3.6)
    axes.imshow(np.minimum(counts, 20), cmap="Greys", vmin=0, vmax=40, aspect="auto")
    for (row, column), count in np.ndenumerate(counts):
        axes.text(column, row, str(count) if count else "·", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(ARMS)), list(ARMS), rotation=25, ha="right", fontsize=7)
    axes.set_yticks(range(len(programs)), [PROGRAMS.get(program, program) for program in programs], fontsize=7)
    axes.set_title("completed runs by program and allocator")
    return figure


def draw_peaks(runs: Runs, programs: Sequence[str]) -> Figure:
    """Peak reserved over peak active of native, by program and allocator."""
    figure, axes = style.new(1, 1, width=9.0, height=3.8)
    arms = runs.arms(run for run in runs.of("memory", "timed") if peak(run, "reserved"))
    ticks = []
    for place, program in enumerate(programs):
        active = [peak(run, "active") for run in runs.of("memory", "timed", program=program, arm="native")]
        known = [one for one in active if one]
        if not known:
            continue
        ticks.append((place, PROGRAMS.get(program, program)))
        for at, arm in enumerate(arms):
            held = [peak(run, "reserved") for run in runs.of("memory", "timed", program=program, arm=arm)]
            values = [one / statistics.median(known) for one in held if one]
            if values:
                x = place + 0.8 * ((at + 0.5) / len(arms) - 0.5)
                colour, mark = ARMS.get(arm, (style.GREY, "X"))
                axes.plot([x] * len(values), values, mark, color=colour, markersize=4, label=arm)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), fontsize=7, ncols=6, loc="outside lower center")
    axes.axhline(1.0, color=style.INK, linewidth=0.8)
    axes.set_xticks([at for at, _ in ticks], [word for _, word in ticks], fontsize=7)
    axes.set_ylabel("peak reserved over native's active")
    style.grid(axes)
    return figure
