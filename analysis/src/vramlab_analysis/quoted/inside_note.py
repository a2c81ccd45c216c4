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
    told: dict[str, dict[str, str]] = {}
    for line in _logs()["torch-tests.jsonl"]:
        one = json.loads(line)
        told.setdefault(one["arm"], {})[one["test"]] = one["outcome"]
    native = told["native"]
    lines = ["| CUDA-graph trees | run | pass | skipped | fail, as natively | fail, pass natively |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for arm, outcomes in told.items():
        count = Counter(outcomes.values())
        failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
        alone = sum(native.get(test) != "failed" for test in failed)
        row = (len(outcomes), count["passed"], count["skipped"], len(failed) - alone, alone)
        lines.append(f"| `{arm}` | {' | '.join(map(str, row))} |")
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
        f"times within {BAR[0]:g}. Native needs {listed(needs)} to run at all."
    )


def left_by_the_start() -> str:
    """The most that `remap:steal=always` reserves of what is active, after the warm-up."""
    found = [(inside.settled(run), run["program"]) for run in inside.load().of(arm="remap:steal=always")]
    most, program = max((settled, program) for settled, program in found if settled)
    return (
        f"- `remap:steal=always` reserves up to {most:.3f} times what is active after the warm-up "
        f"({inside.PROGRAMS.get(program, program)}): the first steps leave more than later ones need."
    )


def empty() -> str:
    """How far the runs of `torch.empty` are apart."""
    times: dict[str, list[float]] = {}
    for run in inside.load().of("empty"):
        times.setdefault(run["arm"], []).append(statistics.median(run["ns"]))
    apart = [(max(values) - min(values)) / 1e3 for values in times.values()]
    return (
        f"- `torch.empty` and its free: the runs lay {min(apart):.1f} to {max(apart):.1f} µs apart under every "
        "allocator, so they say nothing of one another."
    )


def source() -> str:
    """Where the table of real programs is from."""
    runs = inside.load()
    told = runs.machines[0]
    repeats = {len(runs.of("timed", program=one, arm=arm)) for one in inside.QUOTED_PROGRAMS for arm in inside.QUOTED}
    return (
        "Peak reserved, milliseconds a step, and the smallest limit on reserved memory in which the program ran, as a "
        "multiple of what `native` holds active, with the step there. `experiments/inside/campaign.py`: "
        f"{listed(map(str, sorted(repeats)))} runs in turn, medians; under a limit one run each. One {told['gpu']}, "
        f"driver {told['driver']}, {told['at'][:10]} (build {told['build']}; `remap` has changed since: once pages "
        "were taken it records an event a free, and not one for several). `caching` follows PyTorch's policy and "
        "`pytorch-expandable` its expandable segments to the byte. [Notebook "
        "12](../analysis/notebooks/12_inside_real_programs.ipynb) says more, [a note](notes/inside.md) what was "
        "checked and what does not hold."
    )


PIECES: Pieces = {
    "| allocator | passes |": checks,
    "| CUDA-graph trees |": tests,
    "- A step under `remap`": limits,
    "- `remap:steal=always` reserves": left_by_the_start,
    "- `torch.empty` and its free:": empty,
}
