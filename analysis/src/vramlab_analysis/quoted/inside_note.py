"""Pieces of the note on running inside PyTorch: checks, PyTorch's own tests, and where limits cost time."""

from __future__ import annotations

import json
import statistics
import tarfile
from collections import Counter
from functools import cache

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


def _checks(arm: str) -> dict[str, list[str]]:
    """The names of the checks that an allocator passes and fails, without that of speed."""
    told: dict[str, list[str]] = {"PASS": [], "FAIL": []}
    for line in _logs()[f"checks-{arm}.txt"]:
        outcome, _, rest = line.partition(" ")
        if outcome in told and not rest.startswith(f"{SPEED} "):
            told[outcome].append(rest.split()[0])
    return told


def checks() -> str:
    """The table of what an allocator under PyTorch must do."""
    bits = {
        arm: next(line.split()[3] for line in _logs()[f"checks-{arm}.txt"] if " training_bits " in line)
        for arm in ("native", "caching", "pytorch-expandable", "remap")
    }
    lines = ["| allocator | passes | fails | trains to native's bits |", "|---|--:|---|---|"]
    for arm, found in bits.items():
        told = _checks(arm)
        failed = ", ".join(f"`{name}`" for name in told["FAIL"]) or "none"
        same = "yes" if found == bits["native"] else "no"
        lines.append(f"| `{arm}` | {len(told['PASS'])} of {sum(map(len, told.values()))} | {failed} | {same} |")
    return "\n".join(lines) + "\n"


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
    parts, needs = [], []
    for program in ("gpt2", "resnet50"):
        base = inside.unlimited(runs, program)
        if base is None:
            raise AnalysisError(f"{program}: no run of native without a limit to compare with.")
        ratios = {one.over_active: one.ms / base for one in inside.curve(runs, program, "remap") if one.ms is not None}
        # Up to the first limit at which nothing is lost.
        enough = next((limit for limit, ratio in ratios.items() if ratio < 1.01), max(ratios))
        told = [f"{ratio:.2f} times as long within {limit:g}" for limit, ratio in ratios.items() if limit <= enough]
        parts.append(f"on {inside.PROGRAMS[program]} {listed(told)}")
        needs.append(f"{inside.smallest(inside.curve(runs, program, 'native')):g} on {inside.PROGRAMS[program]}")
    return (
        f"- A step under `remap` takes, in multiples of active memory: {'; '.join(parts)}. The bar was {BAR[1]:g} "
        f"times within {BAR[0]:g}. Native needs {listed(needs)} to run at all. What is compared with is native's step "
        "of an earlier call on another H200."
    )


def left_by_the_start() -> str:
    """The most that `remap:steal=always` reserves of what is active, after the warm-up."""
    found = [(inside.settled(run), run["program"]) for run in inside.load().of("timed", arm="remap:steal=always")]
    most, program = max((settled, program) for settled, program in found if settled)
    return (
        f"- `remap:steal=always` reserves up to {most:.3f} times what is active after the warm-up "
        f"({inside.PROGRAMS.get(program, program)}): the first steps leave more than later ones need."
    )


def empty() -> str:
    """What `torch.empty` and its free take, and how that lies to PyTorch's own."""
    times: dict[str, list[float]] = {}
    for run in inside.load().of("empty"):
        times.setdefault(run["arm"], []).append(statistics.median(run["ns"]) / 1e3)
    medians = {arm: statistics.median(values) for arm, values in times.items()}
    told = [f"`{arm}` {medians[arm]:.1f} ({min(times[arm]):.1f} to {max(times[arm]):.1f})" for arm in medians]
    most = max(medians["native"], medians["expandable"])
    slower = [f"`{arm}`" for arm in medians if medians[arm] > most]
    verdict = f"slower than PyTorch's own: {listed(slower)}" if slower else "none is slower than PyTorch's own"
    return (
        f"- `torch.empty` of a thousand floats and its free, serial, in µs, median of {len(times['native'])} runs and "
        f"their range: {listed(told)}; {verdict}."
    )


def passes() -> str:
    """What a second pass over varying shapes takes."""
    times: dict[str, list[float]] = {}
    for run in inside.load().of("passes"):
        times.setdefault(run["arm"], []).append(run["ms"])
    native = statistics.median(times["native"])
    told = [f"`{arm}` {statistics.median(values) / native:.2f}" for arm, values in times.items() if arm != "native"]
    spread = (max(times["native"]) - min(times["native"])) / native
    return (
        f"- A later pass over varying shapes, in multiples of native's step, medians of {len(times['native'])} runs: "
        f"{listed(told)}. Native's own runs lie {spread:.0%} apart, so no order can be told."
    )


def source() -> str:
    """Where the table of real programs is from."""
    runs = inside.load()
    told = runs.machines[0]
    newest = next(run["build"] for run in reversed(runs.runs) if run["part"] == "curve" and run["arm"] == "remap")
    repeats = {len(runs.of("timed", program=one, arm=arm)) for one in inside.QUOTED_PROGRAMS for arm in inside.QUOTED}
    return (
        "Peak reserved, milliseconds a step, and the smallest limit on reserved memory in which the program ran, as a "
        "multiple of what `native` holds active, with the step there. `experiments/inside/campaign.py`: "
        f"{listed(map(str, sorted(repeats)))} runs in turn, medians; under a limit one run each. One {told['gpu']}, "
        f"driver {told['driver']}, {told['at'][:10]} (build {told['build']}, the limits of `remap` and "
        f"`pytorch-expandable` {newest}). `caching` follows PyTorch's policy and "
        "`pytorch-expandable` its expandable segments to the byte. [Notebook "
        "12](../analysis/notebooks/12_inside_real_programs.ipynb) says more, [a note](notes/inside.md) what was "
        "checked and what does not hold."
    )


PIECES: Pieces = {
    "| allocator | passes |": checks,
    "| PyTorch's tests |": tests,
    "| program | allocator | blocks told |": sanitizer,
    "- A step under `remap`": limits,
    "- `remap:steal=always` reserves": left_by_the_start,
    "- `torch.empty` of a thousand floats": empty,
    "- A later pass over varying shapes": passes,
}
