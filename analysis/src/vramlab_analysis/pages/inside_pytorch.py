"""Values and tables of runs inside PyTorch: the specs `inside-…`, PyTorch's own tests, RMM, Nsight Systems."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from vramlab_analysis import experiments, inside, repository, truth
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages.cells import build, dates, listed, span
from vramlab_analysis.pages.registry import GROUPS, group, markdown, table

MIB = 2**20
LOGS = "experiments/notes/inside-logs.tar.xz"
# Programs and allocators of the documents' tables.
PROGRAMS = ("gpt2", "resnet50")
# Limits over active memory that count as tight, and the aim for a step there over native's without a limit.
TIGHT, AIM = 1.2, 1.05
ARMS = ("native", "expandable", "caching", "pytorch-expandable", "remap")
# Programs under compute-sanitizer, by the beginning of their name in the catalogue.
SANITIZED = {"pytorch": "PyTorch", "overrun": "example `overrun`", "training": "a short training"}

GROUPS["advise"] = truth.values
table("advise")(truth.table)


@cache
def _logs() -> dict[str, list[str]]:
    """The lines of each log, by its name.

    Raises AnalysisError when the archive cannot be unpacked.
    """
    folder = repository.unpack(repository.root() / LOGS)
    return {path.name: path.read_text().splitlines() for path in folder.iterdir() if not path.name.startswith(".")}


@table("inside")
def programs() -> str:
    """Peak reserved, step time and smallest limit of two programs under each allocator."""
    runs = inside.load()
    body = []
    for arm in ARMS:
        row = [f"`{arm}`"]
        for program in PROGRAMS:
            peaks = (inside.peak(run, "reserved") for run in runs.of("timed", program=program, arm=arm))
            reserved = [peak for peak in peaks if peak]
            step = inside.ratio(runs, "timed", program, arm)
            least = inside.smallest(inside.curve(runs, program, arm))
            row += [f"{statistics.median(reserved) / MIB:,.0f} MiB", f"{step[0]:.3f}" if step else "one run"]
            there = inside.within(runs, program, arm, least) if least else None
            row.append(f"{least:g} ({there.settled:.2f}, {there.mean:.2f})" if there else "none tried")
        body.append(row)
    columns = ("reserved", "step relative to native's", "smallest limit tried (settled step, mean)")
    heads = [f"{inside.PROGRAMS[program]}: {column}" for program in PROGRAMS for column in columns]
    return markdown(["under PyTorch 2.11", *heads], body)


@group("inside")
def campaign() -> Mapping[str, Any]:
    """The machine of the table `inside`, and steps within limits.

    By program: under `remap` settled and mean steps over native's within limits below `tight` (`remap.min`,
    `remap.max`, `remap.mean`); the smallest limits; `there`, the steps of `remap` at its smallest one; of native its
    peak reserved without a limit and the largest limit in which it ran out of memory, both over active memory. Over
    all: the slowest step, the runs of each limit (`limited`), and their steps (`steps`, behind `warm_up` others).
    """
    runs = inside.load()
    quoted = [
        run
        for part in ("timed", "curve")
        for program in PROGRAMS
        for arm in ARMS
        for run in runs.of(part, program=program, arm=arm)
    ]
    machines = [runs.machines[call] for call in dict.fromkeys(run["call"] for run in quoted)]
    values: dict[str, Any] = {
        "gpu": listed(dict.fromkeys(machine["gpu"] for machine in machines)),
        "hosts": len({machine["provenance"]["host_hash"] for machine in machines}),
        "driver": listed(dict.fromkeys(inside.driver(machine) for machine in machines)),
        "day": listed(dict.fromkeys(machine["at"][:10] for machine in machines)),
        "build": listed(dict.fromkeys(map(inside.build, machines))),
        "turns": span(len(runs.of("timed", program=one, arm=arm)) for one in PROGRAMS for arm in ARMS),
        **_limited(quoted),
    }
    slowest = 0.0
    for program in PROGRAMS:
        points = inside.curve(runs, program, "remap")
        steps = {one.over_active: inside.within(runs, program, "remap", one.over_active) for one in points if one.ms}
        tight = [one for limit, one in steps.items() if limit < TIGHT]
        slowest = max(slowest, inside.slowest_step(runs, program, "remap"))
        least = {arm: inside.smallest(inside.curve(runs, program, arm)) for arm in ("native", "remap")}
        if least["remap"] is None:
            raise AnalysisError(f"{program} under remap: no limit in which it ran.")
        there = steps[least["remap"]]
        values[program] = {
            "least": least,
            "native": _native_needs(runs, program),
            "remap": {
                "min": min(one.settled for one in tight),
                "max": max(one.settled for one in tight),
                "mean": max(one.mean for one in tight),
                "most": max(one.most for one in tight),
                "at": {limit: {"settled": one.settled, "mean": one.mean} for limit, one in steps.items()},
            },
            "there": {
                "first": len(there.first),
                **{key: getattr(there, key) for key in ("steps", "runs", "settled", "mean", "most", "longest")},
            },
        }
    return values | {"slowest": slowest, "tight": TIGHT, "aim": AIM}


def _limited(quoted: list[dict[str, Any]]) -> dict[str, str]:
    """Of the runs within limits: their number for each limit, and the steps of each that were and were not measured."""
    within = [run for run in quoted if "over_active" in run]
    ran = [run for run in within if run["status"] == "ok"]
    return {
        "limited": span(Counter((run["program"], run["arm"], run["over_active"]) for run in within).values()),
        "steps": span(len(run["device_ms"]) for run in ran),
        "warm_up": span(run["warm_up"] for run in ran),
    }


def _native_needs(runs: inside.Runs, program: str) -> dict[str, float]:
    """Of native, over active memory: the peak reserved without a limit, and the largest limit that was not enough."""
    free = [run for run in runs.of("curve", program=program, arm="native") if "over_active" not in run]
    peaks = [(inside.peak(run, "reserved"), inside.peak(run, "active")) for run in free]
    out = [one.over_active for one in inside.curve(runs, program, "native") if one.ms is None]
    ratios = [reserved / active for reserved, active in peaks if reserved and active]
    if not ratios or not out:
        raise AnalysisError(f"{program} under native: no run without a limit, or no limit that was not enough.")
    return {"peak": statistics.median(ratios), "out": max(out)}


@group("steal-always")
def steal_always() -> Mapping[str, Any]:
    """By program: peak reserved over active after the warm-up, the median step over native's with its interval, and
    the same of the mean step as `mean`, `mean.low` and `mean.high`."""
    runs, values = inside.load(), {}
    for program in PROGRAMS:
        arm = "remap:steal=always"
        ratio = inside.ratio(runs, "timed", program, arm)
        settled = [one for run in runs.of("timed", program=program, arm=arm) if (one := inside.settled(run))]
        mean = inside.ratio(runs, "timed", program, arm, of=inside.mean_step)
        if ratio is None or mean is None or not settled:
            raise AnalysisError(f"{program} under {arm}: two runs with native's are needed.")
        values[program] = {"reserved": max(settled), **dict(zip(("step", "low", "high"), ratio, strict=True))}
        values[program] |= dict(zip(("mean", "mean.low", "mean.high"), mean, strict=True))
    return values


@group("torch-empty")
def torch_empty() -> Mapping[str, Any]:
    """Facts of the runs that time `torch.empty` and its free; by allocator their time over native's: `.median`, and
    the middle half `.low` to `.high`."""
    runs = inside.load()
    machines = [runs.machines[run["call"]] for run in runs.of("empty")]
    over = {arm: sorted(inside.turns(runs, arm)) for arm in runs.arms(runs.of("empty")) if arm != "native"}
    native = [ns / 1e3 for run in runs.of("empty", arm="native") for ns in run["ns"]]
    return {
        "turns": len(native),
        "calls": runs.of("empty")[0]["calls"],
        "min_us": min(native),
        "max_us": max(native),
        "gpu": listed(dict.fromkeys(machine["gpu"] for machine in machines)),
        "build": listed(dict.fromkeys(map(inside.build, machines))),
        "day": dates(machine["at"] for machine in machines),
        **{arm: dict(zip(("low", "median", "high"), one, strict=True)) for arm, one in over.items()},
    }


@table("torch-empty")
def torch_empty_table() -> str:
    """`torch.empty` and its free over native's, and a later pass over varying shapes over native's."""
    runs = inside.load()
    body = []
    for arm in runs.arms(runs.of("empty")):
        if arm == "native":
            continue
        low, middle, high = sorted(inside.turns(runs, arm))
        later = inside.ratio(runs, "passes", "varying", arm, of=inside.second_pass)
        body.append([
            f"`{arm}`", f"{middle:.2f} ({low:.2f} to {high:.2f})", _verdict(low, high, 1.01),
            f"{later[0]:.2f} ({later[1]:.2f} to {later[2]:.2f})" if later else "–",
            _verdict(later[1], later[2], 1.0) if later else "–",
        ])  # fmt: skip
    head = [
        "allocator",
        "`torch.empty` and its free",
        "relative to native",
        "later pass, varying shapes",
        "relative to it",
    ]
    return markdown(head, body)


def _verdict(low: float, high: float, bar: float) -> str:
    """Whether an interval of times over native's is above `bar`, below 1, or neither."""
    return "slower" if low > bar else "faster" if high < 1 else "no difference shown"


# Recorders of the spec `inside-recording` in words.
RECORDERS = {
    "own": "VramLab's, frames of allocations",
    "own-none": "VramLab's, no frames",
    "pytorch-none": "PyTorch's, no frames",
    "pytorch-alloc": "PyTorch's, frames of allocations",
    "pytorch-all": "PyTorch's, frames of all events",
}


def _recorders() -> dict[tuple[str, str], dict[str, Any]]:
    """The results of `inside-recording` by program and recorder."""
    runs = experiments.results("inside-recording", "gpu").select()
    return {(run.options["program"], run.options["recorder"]): run.result for run in runs}


def _over_unrecorded(found: Mapping[tuple[str, str], dict[str, Any]], program: str, recorder: str) -> list[float]:
    """Step times over those without a recorder in the same turn."""
    turns, base = (found[program, name]["turn_ms"] for name in (recorder, "none"))
    return [ms / without for ms, without in zip(turns, base, strict=True)]


@table("recorders")
def recorders() -> str:
    """Step times of recorded programs over those without a recorder: medians with quartiles."""
    found, body = _recorders(), []
    for recorder, words in RECORDERS.items():
        row = [words]
        for program in (*PROGRAMS, "events"):
            low, middle, high = np.quantile(_over_unrecorded(found, program, recorder), (0.25, 0.5, 0.75))
            row.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        body.append(row)
    head = ["recorder", *(f"{inside.PROGRAMS[program]}: step" for program in PROGRAMS), "a loop of allocations"]
    return markdown(head, body)


@group("recorders")
def recording() -> Mapping[str, Any]:
    """Facts of the spec `inside-recording`: by program and recorder the median ratio of a step, `step`, the events of
    a recording and its MB; machine, build and day."""
    found, values = _recorders(), {}
    for (program, recorder), result in found.items():
        ratio = statistics.median(_over_unrecorded(found, program, recorder))
        size = {"events": result["events"], "mb": result["bytes"] / 1e6} if "events" in result else {}
        values[f"{program}.{recorder}"] = {"step": ratio, "turns": len(result["turn_ms"]), **size}
    entry = experiments.results("inside-recording", "gpu").select()[0]
    origin = entry.meta["provenance"]
    facts = {"gpu": entry.result["gpu"], "driver": origin["driver_release"], "build": origin["git_commit"][:8]}
    return values | facts | {"day": entry.meta["started_at"][:10]}


def _outcomes() -> Iterator[tuple[str, str, str]]:
    """Allocator, test and outcome of PyTorch's tests: of the spec, else of the older log."""
    if runs := _newest("torch-tests"):
        for entry in runs:
            for line in entry.result["lines"] if entry.done else ():
                yield str(entry.options["alloc"]), line["torch_test"], line["outcome"]
    else:
        for one in map(json.loads, _logs()["torch-tests.jsonl"]):
            yield one["arm"], one["test"], one["outcome"]


def _newest(spec: str) -> list[experiments.Entry]:
    """The runs of the newest results of a spec; none where there are none."""
    there = any(experiments.holds_experiment(label / spec) for label in experiments.labels())
    return experiments.results(spec, "gpu").runs if there else []


@table("torch-tests")
def torch_tests() -> str:
    """PyTorch's own tests under each allocator."""
    outcomes: dict[str, dict[str, dict[str, str]]] = {}
    for arm, test, outcome in _outcomes():
        # Of a test that was run again, with the GPU for itself, the last run counts.
        outcomes.setdefault(test.partition(".")[0], {}).setdefault(arm, {})[test] = outcome
    body = []
    for module, arms in sorted(outcomes.items()):
        native = arms["native"]
        for arm, results in sorted(arms.items(), key=lambda one: one[0] != "native"):
            count = Counter(results.values())
            failed = [test for test, outcome in results.items() if outcome not in ("passed", "skipped")]
            only = sum(native.get(test) == "passed" for test in failed)
            row = (len(results), count["passed"], count["skipped"], len(failed) - only, only)
            body.append([f"`{module}.py`", f"`{arm}`", *map(str, row)])
    head = ["run", "pass", "skipped", "fail, as natively", "fail, pass natively"]
    return markdown(["PyTorch's tests", "allocator", *head], body, left=2)


@table("sanitizer")
def sanitizer() -> str:
    """Reports of compute-sanitizer."""
    head = ["program", "allocator", "told to announce blocks", "writes beyond", "compute-sanitizer"]
    body = [_sanitized(entry) for entry in _newest("sanitizer") if entry.done]
    return markdown(head, body, left=5)


@group("sanitizer")
def sanitizer_machine() -> Mapping[str, Any]:
    """Machine, day and build of the table `sanitizer`."""
    metas = [entry.meta for entry in _newest("sanitizer") if entry.done]
    return {
        "gpu": listed(dict.fromkeys(meta["machine"]["gpu"] for meta in metas)),
        "day": dates(meta["started_at"] for meta in metas),
        "build": listed(dict.fromkeys(build(meta["provenance"]) for meta in metas)),
    }


def _sanitized(entry: experiments.Entry) -> list[str]:
    """The row of a run of the spec."""
    name, options = str(entry.options["program"]).removeprefix("sanitized-"), entry.options
    program = next(words for start, words in SANITIZED.items() if name.startswith(start))
    announced = options["of"] == "on" if name.startswith("pytorch") else not name.endswith("-off")
    beyond = name != "training" and not name.endswith("-inside")
    allocator = options.get("alloc", options["of"])
    report = "no error"
    if entry.meta["exit_code"]:
        values = entry.result["values"]
        if "invalid" in values:
            report = "the write, with the bounds of the block" if "block" in values else "the write"
        else:
            report = f"an error of `{values['call'].rstrip('.')}`" if "call" in values else "another error"
    return [program, f"`{allocator}`", *("yes" if is_so else "no" for is_so in (announced, beyond)), report]


@group("nsight")
def nsight() -> Mapping[str, Any]:
    """Frees that waited in a PyTorch program under `naive`, and the number of such calls under `caching`."""
    captures = json.loads("".join(_logs()["nsight.json"]))
    frees = {
        arm: next((call for call in captures[arm]["calls"] if call["call"] == "cuMemFree"), {"count": 0})
        for arm in ("naive", "caching")
    }
    if not frees["naive"]["count"]:
        raise AnalysisError("nsight.json: no free under naive.")
    kernels = (f"`{one['waited_for']}` ({one['count']})" for one in captures["naive"]["waited_for"][:3])
    return {**frees, "longest": captures["naive"]["waits"][0], "kernels": listed(kernels)}


def _rmm() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine, and the output of each allocator's process."""
    runs = experiments.results("rmm-costs", "gpu").select()
    meta = runs[0].meta
    facts = {"gpu": meta["machine"]["gpu"], "at": meta["started_at"], "build": meta["provenance"].get("git_commit")}
    return facts, [entry.result["lines"][0] for entry in runs]


@table("rmm")
def rmm() -> str:
    """The cost of a buffer of RMM's over each resource, and its checks."""
    resources: dict[str, list[dict[str, Any]]] = {}
    for process in _rmm()[1]:
        for name, one in process.items():
            if isinstance(one, dict):
                resources.setdefault(name, []).append(one)
    body = []
    for name, runs in resources.items():
        times = (statistics.median(ns for run in runs for ns in run[key]) / 1e3 for key in ("ns", "ns_large"))
        held = (
            "not tested" if key not in runs[0] else "yes" if all(run[key] for run in runs) else "no"
            for key in ("buffers", "arrays", "all_freed")
        )
        body.append([f"`{name}`", *(f"{time:.1f}" for time in times), *held])
    head = ["1 KiB and its free, µs", "1 MiB", "contents survive", "CuPy's sums are right", "all memory freed"]
    return markdown(["resource of RMM", *head], body)


@group("rmm")
def rmm_machine() -> Mapping[str, Any]:
    """Machine, build and releases of the table `rmm`."""
    machine, processes = _rmm()
    first = processes[0]
    facts = {"rmm": first["rmm"], "cupy": first["cupy"], "gpu": machine["gpu"], "day": machine["at"][:10]}
    return facts | {"build": inside.build(machine), "rounds": len(first["callback"]["ns"])}
