"""Values of the two case studies: a loader that frees between its tensors, and a loop that empties the cache."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import polars as pl

from vramlab_analysis import inside, stories
from vramlab_analysis.pages.cells import span
from vramlab_analysis.pages.registry import group

GIB = 2**30
PAGE_CALLS = ("mem_create", "mem_map", "mem_set_access", "mem_unmap", "mem_release")


@group("loader-case")
def loader() -> Mapping[str, Any]:
    """Peak reserved in GiB by setting and phase, with `.max`; `active`; settings that ran within the limit; the
    setting whose largest peak is least, `best`, and the one that `advise` predicts to, `advised`."""
    runs = stories.load()
    reserved = {
        arm: {name: stories.phase(runs.one("load_serve", arm), name) / GIB for name in stories.PHASES}
        for arm in runs.arms("load_serve")
    }
    limited = {arm: {run["status"] for run in runs.one("load_serve", arm, "limit")} for arm in reserved}
    rows = stories.predicted().filter((pl.col("program") == "vllm_load_serve") & pl.col("limit_bytes").is_null())
    best = min(reserved, key=lambda arm: max(reserved[arm].values()))
    return {
        **{arm: {**phases, "max": max(phases.values())} for arm, phases in reserved.items()},
        "active": stories.active(runs) / GIB,
        "limit": statistics.median(run["limit"] for run in runs.runs if run["kind"] == "limit") / stories.active(runs),
        "limited": sum(map(bool, limited.values())),
        "limited-ok": sum(status == {"ok"} for status in limited.values()),
        "default-ok": int(limited["default"] == {"ok"}),
        "best-max": max(reserved[best].values()),
        "best": f"`{stories.SETTINGS[best]}`",
        "advised": f"`{rows.sort('predicted_peak_reserved_bytes')['conf'][0]}`",
    }


@group("emptying-case")
def emptying() -> Mapping[str, Any]:
    """Milliseconds a step by setting, `.kept` and `.emptied`, and `.over`, their ratio; calls; pages under `remap`."""
    runs = stories.load()
    arms = runs.arms("emptying")
    values: dict[str, Any] = {
        arm: {
            "kept": stories.step(runs.one("training", arm)),
            "emptied": stories.step(runs.one("emptying", arm)),
            "over": vars(stories.over(runs.one("emptying", arm), runs.one("training", arm))),
        }
        for arm in arms
    }
    pages = []
    for run in runs.one("emptying", "remap"):
        calls, steps = run["vramlab"]["0"]["calls"], run["steps"] + run["warm_up"]
        spent = sum(calls[name]["total_ns"] for name in PAGE_CALLS) / 1e6
        pages.append((calls["mem_create"]["count"] / steps, spent / steps))
    count, spent = (statistics.median(of) for of in zip(*pages, strict=True))
    machine = runs.machine
    return values | {
        "calls": {name: stories.calls(runs.one(name, "default")) for name in ("training", "emptying")},
        "pages": {"count": count, "ms": spent},
        "runs": span(len(runs.one(story, arm)) for story in ("training", "emptying") for arm in arms),
        **{key: machine[key] for key in ("gpu", "torch")},
        "driver": inside.driver(machine),
        "day": machine["at"][:10],
    }
