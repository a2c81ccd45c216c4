"""Pieces of the note on running inside PyTorch: checks, PyTorch's own tests, and where limits cost time."""

from __future__ import annotations

import json
import statistics
import tarfile
from collections import Counter
from functools import cache
from typing import Any

from vramlab_analysis import inside, repository
from vramlab_analysis.documents import Pieces
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.quoted.parts import listed

LOGS = "experiments/notes/inside-logs.tar.xz"
# The check that times a call, which no allocator fails.
SPEED = "speed"
# Within this multiple of active memory a step was to take at most so many times as long.
BAR = (1.01, 1.05)


@cache
def _logs() -> dict[str, list[str]]:
    """The lines of each log, by its name.

    Raises AnalysisError when the archive cannot be read.
    """
    try:
        with tarfile.open(repository.root() / LOGS) as tar:
            files = {one.name.rpartition("/")[2]: tar.extractfile(one) for one in tar if one.isfile()}
            return {name: file.read().decode().splitlines() for name, file in files.items() if file}
    except (OSError, tarfile.TarError) as error:
        raise AnalysisError(f"{LOGS}: cannot be read ({error}).") from error


def checks() -> str:
    """The table of what an allocator under PyTorch must do, without the check that times a call, which none fails."""
    runs = inside.load()
    told = {
        run["arm"]: [one.split() for one in run["checks"] if f" {SPEED} " not in one]
        for run in runs.every
        if run["part"] == "checks"
    }
    bits = {arm: words[3] for arm, lines in told.items() for words in lines if words[:2] == ["PASS", "training_bits"]}
    rows = ["| allocator | passes | fails | trains to native's bits |", "|---|--:|---|---|"]
    for arm in sorted(told, key=list(inside.ARMS).index):
        failed = [
            f"`{words[1]}`{' (no memory)' if 'OutOfMemoryError:' in words else ''}"
            for words in told[arm]
            if words[0] == "FAIL"
        ]
        same = "not known" if arm not in bits else "yes" if bits[arm] == bits["native"] else "no"
        passed = sum(words[0] == "PASS" for words in told[arm])
        rows.append(f"| `{arm}` | {passed} of {len(told[arm])} | {', '.join(failed) or 'none'} | {same} |")
    return "\n".join(rows) + "\n"


def tests() -> str:
    """The table of PyTorch's own tests."""
    told: dict[str, dict[str, dict[str, str]]] = {}
    for line in _logs()["torch-tests.jsonl"]:
        one = json.loads(line)
        module = one["test"].partition(".")[0]
        # Of a test that was run again, with the GPU for itself, the last run counts.
        told.setdefault(module, {}).setdefault(one["arm"], {})[one["test"]] = one["outcome"]
    lines = ["| PyTorch's tests | allocator | run | pass | skipped | fail, as natively | fail, pass natively |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for module, arms in sorted(told.items()):
        native = arms["native"]
        for arm, outcomes in sorted(arms.items(), key=lambda one: one[0] != "native"):
            count = Counter(outcomes.values())
            failed = [test for test, outcome in outcomes.items() if outcome not in ("passed", "skipped")]
            alone = sum(native.get(test) == "passed" for test in failed)
            row = (len(outcomes), count["passed"], count["skipped"], len(failed) - alone, alone)
            lines.append(f"| `{module}.py` | `{arm}` | {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"


def sanitizer() -> str:
    """The table of what compute-sanitizer sees."""
    lines = ["| program | allocator | blocks told | writes beyond | compute-sanitizer |", "|---|---|---|---|---|"]
    for line in _logs()["sanitizer.jsonl"]:
        one = json.loads(line)
        words = one["run"].removesuffix("-beyond").removesuffix("-inside").removesuffix("-on").removesuffix("-off")
        program, _, arm = words.partition("-") if words.startswith(("overrun-", "trainer-")) else ("", "", words)
        name = {"overrun": "example `overrun`", "trainer": "a short training"}.get(program, "PyTorch")
        if one["code"] == 0:
            seen = "no error"
        else:
            seen = "the write, with the bounds of the block" if one["error"] else "refuses the heap"
        yes = {key: "yes" if f"-{key}" in one["run"] else "no" for key in ("on", "beyond")}
        lines.append(f"| {name} | `{arm}` | {yes['on']} | {yes['beyond']} | {seen} |")
    return "\n".join(lines) + "\n"


def limits() -> str:
    """What a step takes under `remap` where memory is short."""
    runs = inside.load()
    parts, needs, over = [], [], []
    for program in inside.QUOTED_PROGRAMS:
        ratios = inside.over_unlimited(runs, program, "remap")
        tight = {limit: ratio for limit, ratio in ratios.items() if limit < 1.2}
        told = [f"{ratio:.2f} within {limit:g}" for limit, ratio in tight.items()]
        parts.append(f"on {inside.PROGRAMS[program]} {listed(told)}")
        needs.append(f"{inside.smallest(inside.curve(runs, program, 'native')):g} on {inside.PROGRAMS[program]}")
        if ratios.get(BAR[0], 9.0) > BAR[1]:
            over.append(inside.PROGRAMS[program])
    held = f"missed on {listed(over)}" if over else "met on both"
    return (
        "- A step under `remap`, in multiples of native's without a limit, within multiples of active memory: "
        f"{'; '.join(parts)}. The bar is {BAR[1]:g} times within {BAR[0]:g}: {held}. Native needs {listed(needs)} to "
        "run at all. One run each, the median of its steps; while pages still move, single steps take up to "
        f"{_slowest_step(runs):.1f} times as long."
    )


def _slowest_step(runs: inside.Runs) -> float:
    """The slowest step of `remap` within a limit, over native's median without one."""
    found: list[float] = []
    for program in inside.QUOTED_PROGRAMS:
        base = inside.unlimited(runs, program, "remap")
        for run in runs.of("curve", program=program, arm="remap"):
            if run["status"] == "ok" and base:
                found.append(max(run["device_ms"]) / base)
    return max(found)


def always() -> str:
    """What `remap:steal=always` reserves and takes."""
    runs = inside.load()
    told = []
    for program in inside.QUOTED_PROGRAMS:
        over = inside.ratio(runs, "timed", program, "remap:steal=always")
        timed = runs.of("timed", program=program, arm="remap:steal=always")
        held = [settled for run in timed if (settled := inside.settled(run))]
        if over is None or not held:
            raise AnalysisError(f"{program} under remap:steal=always: two runs with native's are needed.")
        told.append(
            f"{inside.PROGRAMS[program]} {max(held):.4f} times what is active, at {over[0]:.3f} ({over[1]:.3f} to "
            f"{over[2]:.3f}) of native's step"
        )
    return (
        f"- `remap:steal=always` reserves, after the warm-up, at most: {'; '.join(told)} (medians and their 95 % "
        "intervals)."
    )


def empty() -> str:
    """What `torch.empty` and its free take, beside native's."""
    runs = inside.load()
    over = {arm: inside.turns(runs, arm) for arm in runs.arms(runs.of("empty")) if arm != "native"}
    native = [ns / 1e3 for run in runs.of("empty", arm="native") for ns in run["ns"]]
    told = [f"`{arm}` {middle:.2f} ({low:.2f} to {high:.2f})" for arm, (low, middle, high) in over.items()]
    slower = [f"`{arm}`" for arm in (*inside.QUOTED, "remap:steal=always") if arm in over and over[arm][1] > 1.01]
    return (
        f"- `torch.empty` of a thousand floats and its free, serial, in multiples of native's in the same of "
        f"{len(native)} turns: {listed(told)}; medians and middle halves. All processes share a core and take turns of "
        f"{runs.of('empty')[0]['calls']:,} calls; native's took {min(native):.1f} to {max(native):.1f} µs a call. "
        "`expandable` is native's code here and shows how far to trust the others. The bar is native's time: "
        f"{'missed by ' + listed(slower) if slower else 'met'}."
    )


def passes() -> str:
    """What a later pass over varying shapes takes."""
    runs = inside.load()
    some = runs.of("passes")
    over = {
        arm: inside.ratio(runs, "passes", "varying", arm, of=inside.second_pass)
        for arm in runs.arms(some)
        if arm != "native"
    }
    told = [f"`{arm}` {one[0]:.2f} ({one[1]:.2f} to {one[2]:.2f})" for arm, one in over.items() if one]
    slower = [f"`{arm}`" for arm, one in over.items() if one and one[1] > 1]
    count = len(runs.of("passes", arm="native"))
    return (
        f"- A later pass over varying shapes, in multiples of native's step, {count} runs in turn, medians and 95 % "
        f"intervals: {listed(told)}. {listed(slower) if slower else 'None'} is shown to be slower."
    )


def nsight() -> str:
    """Which frees waited in a PyTorch program, by captures of Nsight Systems."""
    told = json.loads("".join(_logs()["nsight.json"]))
    free, other = (
        next((one for one in told[arm]["calls"] if one["call"] == "cuMemFree"), None) for arm in ("naive", "caching")
    )
    if free is None:
        raise AnalysisError("nsight.json: no free under naive.")
    longest = told["naive"]["waits"][0]
    calls = "no such calls" if other is None else f"{other['count']} such calls"
    kernels = [f"`{one['waited_for']}` ({one['count']})" for one in told["naive"]["waited_for"][:3]]
    return (
        f"Under `naive` {free['waited']:,} of {free['count']:,} calls of `cuMemFree` waited for the device, "
        f"{free['waited_ns'] / 1e6:.0f} ms in all, mostly behind {listed(kernels)}; the longest, of "
        f"{longest['bytes'] / inside.MIB:,.0f} MiB in our range `{longest['path']}`, {longest['waited_ns'] / 1e6:.1f} "
        f"ms behind `{longest['waited_for']}`. Under `caching` there were {calls}."
    )


def _rmm() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine, and what the program said for each allocator, a process each."""
    machine, *processes = (json.loads(line) for line in _logs()["rmm.jsonl"])
    return machine, processes


def rmm() -> str:
    """The table of RMM over each resource: what a buffer costs, and what held."""
    told: dict[str, list[dict[str, Any]]] = {}
    for process in _rmm()[1]:
        for name, one in process.items():
            if isinstance(one, dict):
                told.setdefault(name, []).append(one)
    lines = ["| resource of RMM | 1 KiB and its end, µs | 1 MiB | contents survive | CuPy's sums | all given back |"]
    lines.append("|---|--:|--:|---|---|---|")
    for name, each in told.items():
        times = [statistics.median(ns for one in each for ns in one[key]) / 1e3 for key in ("ns", "ns_large")]
        held = [
            "not asked" if key not in each[0] else "yes" if all(one[key] for one in each) else "no"
            for key in ("buffers", "arrays", "all_freed")
        ]
        lines.append(f"| `{name}` | {times[0]:.1f} | {times[1]:.1f} | {' | '.join(held)} |")
    return "\n".join(lines) + "\n"


def rmm_source() -> str:
    """Which machine, build and releases the table of RMM is of."""
    machine, processes = _rmm()
    first = processes[0]
    return (
        f"`programs/rmm_costs.py`: RMM {first['rmm']} and CuPy {first['cupy']} over each resource, on one "
        f"{machine['gpu']}, {machine['at'][:10]} (build {machine['build'][:8]}), a process for each of our allocators; "
        f"medians of {len(first['callback']['ns'])} rounds in each process. `callback` is RMM's own pool behind a "
        "function in Python, as these allocators are: a call costs what the way through Python costs."
    )


def source() -> str:
    """Where the table of real programs is from."""
    runs = inside.load()
    quoted = [
        run for part in ("timed", "curve") for arm in inside.QUOTED for program in inside.QUOTED_PROGRAMS
        for run in runs.of(part, program=program, arm=arm)
    ]  # fmt: skip
    calls = list(dict.fromkeys(run["call"] for run in quoted))
    machines = list(
        dict.fromkeys(
            f"one {told['gpu']}, driver {inside.driver(told)}, {told['at'][:10]} (build {told['build'][:8]})"
            for told in (runs.machines[call] for call in calls)
        )
    )
    repeats = {len(runs.of("timed", program=one, arm=arm)) for one in inside.QUOTED_PROGRAMS for arm in inside.QUOTED}
    return (
        "Peak reserved, a step over native's, and the smallest limit on reserved memory in which the program ran, as a "
        "multiple of what `native` holds active, with the step there over native's without a limit. "
        f"`experiments/pytorch/campaign.py`: {listed(map(str, sorted(repeats)))} runs in turn, medians of the ratios "
        f"to native's run of the same turn; under a limit one run each. Made on {listed(machines)}. `caching` follows "
        "PyTorch's policy and `pytorch-expandable` its expandable segments to the byte. [Notebook "
        "12](../analysis/notebooks/12_inside_real_programs.ipynb) says more, [a note](notes/inside.md) what was "
        "checked and what does not hold."
    )


PIECES: Pieces = {
    "| allocator | passes |": checks,
    "| PyTorch's tests |": tests,
    "| program | allocator | blocks told |": sanitizer,
    "Under `naive`": nsight,
    "`programs/rmm_costs.py`": rmm_source,
    "| resource of RMM |": rmm,
    "- A step under `remap`": limits,
    "- `remap:steal=always` reserves": always,
    "- `torch.empty` of a thousand floats": empty,
    "- A later pass over varying shapes": passes,
}
