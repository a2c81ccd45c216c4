"""Two case studies recorded by `experiments run stories`: loader settings, and an emptied cache."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import experiments, inside, style, truth
from vramlab_analysis.experiments import Entry
from vramlab_analysis.measures import Interval, ratio

# Settings in the order of tables and figures, in PyTorch's notation.
SETTINGS = {
    "default": "defaults",
    "split20": "max_split_size_mb:20",
    "split20-while-loading": "max_split_size_mb:20, while it loads",
    "split64": "max_split_size_mb:64",
    "split512": "max_split_size_mb:512",
    "roundup8": "roundup_power2_divisions:8",
    "expandable": "expandable_segments:True",
    "remap": "remap",
}
PHASES = {"layers": "layers loaded", "experts": "experts loaded", "steps": "serving"}
# These case studies in the table of predictions, by their names there.
PROGRAMS = {
    "vllm_load_serve": "loading, then serving",
    "gpt2_shapes": "GPT-2, shapes vary",
    "gpt2_emptying": "GPT-2, cache emptied",
}


@dataclass(frozen=True)
class Stories:
    """The machine, and the runs."""

    machine: dict[str, Any]
    runs: list[dict[str, Any]]

    def one(self, story: str, arm: str, kind: str = "free") -> list[dict[str, Any]]:
        """The runs of a case under a setting, including those that ran out of memory."""
        return [run for run in self.runs if (run["story"], run["arm"], run["kind"]) == (story, arm, kind)]

    def arms(self, story: str) -> list[str]:
        """The settings under which a case ran, in the order of tables."""
        tested = {run["arm"] for run in self.runs if run["story"] == story and run["kind"] == "free"}
        return [arm for arm in SETTINGS if arm in tested]

    def where(self) -> str:
        """The machine in words."""
        facts = self.machine
        return f"one {facts['gpu']}, driver {inside.driver(facts)}, PyTorch {facts['torch']}, {facts['at'][:10]}"


def load() -> Stories:
    """The runs of the newest recorded experiment.

    Raises AnalysisError when there is none.
    """
    experiment = experiments.results("stories", "gpu")
    entries = experiment.select()
    runs = [entry.result | _kind(entry) for entry in entries]
    last = max(entries, key=lambda entry: str(entry.meta["started_at"]))
    machine = {"gpu": last.result["gpu"], "torch": last.result["torch"], "at": last.meta["started_at"]}
    return Stories(machine | {"driver": last.meta["provenance"]["driver_release"]}, runs)


def _kind(entry: Entry) -> dict[str, Any]:
    """A run's case, setting, kind, turn and status."""
    options = entry.options
    loading = options.get("while-loading")
    words = f"{loading}, while it loads" if loading else options.get("conf") or "defaults"
    settings = {words: name for name, words in SETTINGS.items()}
    kind = "history" if options.get("history") else "limit" if "limit-over-active" in options else "free"
    return {
        "story": options["program"],
        "arm": options.get("alloc") or settings[words],
        "kind": kind,
        "turn": entry.turn,
        "status": "oom" if entry.result["oom"] else "ok",
    }


def phase(runs: list[dict[str, Any]], name: str, what: str = "peak_reserved") -> float:
    """Median bytes of a phase of the loader: reserved or active at its end, or (`peak_…`) their peak during it."""
    held = [float(one[what]) for run in runs for one in run["phases"] if one["name"] == name]
    return statistics.median(held)


def peak_reserved(runs: list[dict[str, Any]]) -> float:
    """Median over runs of the peak reserved bytes in the measured steps."""
    return statistics.median(float(run["after_warm_up"]["reserved_bytes.all.peak"]) for run in runs)


def active(stories: Stories) -> float:
    """Peak active bytes of the loader under the defaults."""
    held = [float(run["stats"]["active_bytes.all.peak"]) for run in stories.one("load_serve", "default")]
    return statistics.median(held)


def step(runs: list[dict[str, Any]]) -> float:
    """Median step in ms."""
    times = [float(run["ms"]) for run in runs]
    return statistics.median(times)


def over(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> Interval:
    """The ratio of steps of runs over those of others in the same turns."""
    return ratio(*({run["turn"]: float(run["ms"]) for run in side} for side in (runs, others)))


def calls(runs: list[dict[str, Any]]) -> float:
    """Driver allocations and frees per step."""
    found: list[float] = []
    for run in runs:
        called = run["calls_in_steps"]
        found.append(float(called["num_device_alloc"] + called["num_device_free"]) / run["steps"])
    return statistics.median(found)


def predicted() -> pl.DataFrame:
    """`advise`'s predictions from the recordings of the cases, and PyTorch's peaks."""
    return truth.pairs().filter(pl.col("program").is_in(list(PROGRAMS)))


def draw(stories: Stories) -> Figure:
    """The loader's peak reserved in each phase, by setting; the line is its peak active."""
    figure, axes = style.new(1, 1, width=9.0, height=3.6)
    arms = stories.arms("load_serve")
    colours = (style.SKY, style.BLUE, style.ORANGE)
    for number, (name, words) in enumerate(PHASES.items()):
        values = [phase(stories.one("load_serve", arm), name) / 2**30 for arm in arms]
        places = [place + 0.27 * (number - 1) for place in range(len(arms))]
        axes.bar(places, values, width=0.25, color=colours[number], label=words)
    axes.axhline(active(stories) / 2**30, color=style.INK, linewidth=0.8, label="peak active, defaults")
    axes.set_xticks(range(len(arms)), [SETTINGS[arm].replace(":", ":\n") for arm in arms], fontsize=7)
    axes.set_ylabel("peak reserved, GiB")
    axes.legend(fontsize=7)
    style.grid(axes)
    return figure
