"""Captions of the README's tables and figures."""

from __future__ import annotations

import re

from vramlab_analysis import inside
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import newest
from vramlab_analysis.quoted.answers import compared as rows
from vramlab_analysis.quoted.parts import listed
from vramlab_analysis.repository import root


def _day() -> str:
    """The day of the newest comparison on a GPU."""
    return newest("cuda.json").parent.name[:10]


def caption() -> str:
    """What the table of allocators is of."""
    told = rows()[0]
    return (
        f"One epoch of {told['steps']} steps and its validation; four layers of width 784, batch 64, f32, "
        f"{told['dataset'].upper()}; one {told['device']}, virtual machine, {_day()}: `experiments compare`, medians "
        f"of {told['repeats']} runs. More in [what the runs answered](experiments/answers.md)."
    )


def compared() -> str:
    """How the table of allocators was made."""
    told = rows()[0]
    repeats = told["repeats"]
    return (
        f"- One {told['device']}, virtual machine, {_day()}. `experiments compare --repeats {repeats} --json -- "
        f"--device cuda --hidden 784 --layers 4 --batch 64 --epochs 4` (release build), MNIST; medians over {repeats} "
        f"runs without their first epoch, {told['steps']} steps and validation in an epoch, in the time, too. Calls "
        "are of the last epoch; latencies are of the most frequent path, with the time for taking them included. Hosts "
        "differ, so ratios say more than times."
    )


def limits() -> str:
    """What build the figure of limits is of."""
    runs = inside.load()
    some = runs.of("curve")
    arms: dict[str, list[str]] = {}
    for arm in runs.arms(some):
        arms.setdefault(runs.of("curve", arm=arm)[0]["build"][:8], []).append(f"`{arm}`")
    most, *others = sorted(arms, key=lambda build: -len(arms[build]))
    apart = "".join(f", {build} for {listed(arms[build])}," for build in others)
    gpus = listed(dict.fromkeys(runs.machines[run["call"]]["gpu"] for run in some))
    return f"Build {most}{apart} on {gpus} ([table](experiments/answers.md))."


def reading() -> str:
    """How much memory `vramlab` takes to read a history, as its help says."""
    source = (root() / "app/cli/src/reading.rs").read_text()
    least = re.findall(r"Most memory that reading the history may take \[default: (\d+)GiB\]", source)
    if len(least) != 1:
        raise AnalysisError("app/cli/src/reading.rs: does not say how much memory reading takes by default.")
    return (
        "**Memory.** A history, what is read of it and the search for a plan together take at most "
        f"{least[0]} GiB, for `explain`, `advise` and `report` one and a half times a larger file; `--read-memory` "
        "allows more, or less. Where a search ends for that reason, the page and `--json` say so."
    )
