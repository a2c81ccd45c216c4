"""Two cases from the field in words, for the page of answers."""

from __future__ import annotations

import statistics

import polars as pl

from vramlab_analysis import stories
from vramlab_analysis.quoted.parts import each

GIB = 2**30


def loader() -> str:
    """The loader for which one setting cured one phase and spoilt the next."""
    told = stories.load()
    held = {
        arm: [stories.phase(told.one("load_serve", arm), name) / GIB for name in stories.PHASES]
        for arm in told.arms("load_serve")
    }
    within = {arm: [run["status"] for run in told.one("load_serve", arm, "limit")] for arm in held}
    ran = [stories.SETTINGS[arm] for arm, said in within.items() if said and set(said) == {"ok"}]
    least = min(held, key=lambda arm: max(held[arm]))
    return (
        "- **A loader that gives memory back between its tensors** (vLLM, pull request 41268 and issue 51205). "
        f"`max_split_size_mb:20` reserves {held['split20'][0]:.1f} GiB when the layers are loaded, the defaults "
        f"{held['default'][0]:.1f}; when it serves, {held['split20'][-1]:.1f} beside {held['default'][-1]:.1f}. "
        f"`{stories.SETTINGS[least]}` would have done both ({max(held[least]):.1f} at most), and "
        f"`max_split_size_mb:512` ({max(held['split512']):.1f}). Within 1.15 times what is active "
        f"({stories.active(told) / GIB:.1f} GiB) the defaults run out of memory, and {len(ran)} of "
        f"{sum(map(bool, within.values())) - 1} other settings do not. Of the settings that "
        f"were tried `advise` puts `{_first()}` first, from a recording under the defaults."
    )


def _first() -> str:
    """The setting under which `advise` predicts that the loader reserves least, of those that were run."""
    told = stories.predicted().filter((pl.col("program") == "vllm_load_serve") & pl.col("limit_bytes").is_null())
    return str(told.sort("predicted_peak_reserved_bytes")["conf"][0])


def _pages(told: stories.Stories) -> str:
    """What of an emptied cache under `remap` is the driver's time for pages."""
    of_runs = []
    for run in told.one("emptying", "remap"):
        calls = run["vramlab"]["0"]["calls"]
        steps = run["steps"] + run["warm_up"]
        names = ("mem_create", "mem_map", "mem_set_access", "mem_unmap", "mem_release")
        spent = sum(calls[name]["total_ns"] for name in names) / 1e6
        of_runs.append((calls["mem_create"]["count"] / steps, spent / steps))
    pages, spent = (statistics.median(values) for values in zip(*of_runs, strict=True))
    return f"under `remap` {pages:,.0f} pages go and come back in a step, {spent:.0f} ms of the driver's time"


def emptied() -> str:
    """The loop that empties its cache."""
    told = stories.load()
    times = {
        arm: (stories.step(told.one("training", arm)), stories.step(told.one("emptying", arm)))
        for arm in told.arms("emptying")
    }
    calls = stories.calls(told.one("emptying", "default"))
    counts = (len(told.one(story, arm)) for story in ("training", "emptying") for arm in times)
    words = ", ".join(
        f"`{stories.SETTINGS[arm]}` {after:.0f} ms a step for {before:.0f}"
        if arm != "default"
        else f"under the defaults {after:.0f} ms a step for {before:.0f}"
        for arm, (before, after) in times.items()
    )
    return (
        f"- **A loop that calls `empty_cache`** (GPT-2, shapes vary): {words}; {calls:.0f} driver calls a step where "
        f"there were none, and the peak stays; {_pages(told)}; {each(counts)}, so read no order into settings that are "
        f"near; {told.where()}. [Notebook 13](../analysis/notebooks/13_two_cases_from_the_field.ipynb) has both."
    )
