"""Step times of unchanged CUDA programs under `vramlab run`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages.registry import group, markdown, table

LINE = re.compile(r"^(\S+)/(\S+) +median +([\d.]+) +min +([\d.]+) +max +([\d.]+) +n (\d+)$", re.MULTILINE)
PROGRAMS = {
    "raw_static": "raw loop, default stream",
    "two": "raw loop, two non-blocking streams",
    "four": "raw loop, four blocking streams",
    "managed": "managed memory",
    "texture": "textures",
    "cupy": "CuPy without its pool",
    "torch": "ResNet-50 in PyTorch without its cache",
    "gpt2": "GPT-2 in PyTorch without its cache",
}
VARIANTS = {"record": "recorded", "driver": "`--free driver`", "waits": "`--free waits`", "ordered": "`--free ordered`"}


def _record() -> str:
    """The newest record. Raises AnalysisError without one."""
    found = repository.listing().files("any-program.txt")
    if not found:
        raise AnalysisError("experiments/results: has no *-any-program.txt.")
    return found[-1].read_text()


@group("any-program")
def values() -> Mapping[str, Any]:
    """Median, min, max and number of runs, by program and variant; `gpu`, `driver`, `day`."""
    text = _record()
    out: dict[str, Any] = {}
    for program, variant, median, least, most, runs in LINE.findall(text):
        cell = {"median": float(median), "min": float(least), "max": float(most), "runs": int(runs)}
        out.setdefault(program, {})[variant] = cell
    machine = re.search(r"^machine +([^,]+), driver ([^,]+),.*, (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    if not out or not machine:
        raise AnalysisError("experiments/results: the newest *-any-program.txt has no machine or no times.")
    return out | dict(zip(("gpu", "driver", "day"), machine.groups(), strict=True))


@table("any-program")
def times() -> str:
    """Microseconds a step: as it is, recorded, and with its memory served by `caching` in three ways."""
    cells = values()

    def time(program: str, variant: str) -> str:
        cell = cells[program].get(variant)
        return f"{cell['median']:,.0f} ({cell['min']:,.0f} to {cell['max']:,.0f})" if cell else ""

    own = {"cupy": "own-pool", "torch": "own-cache", "gpt2": "own-cache"}
    unchanged = {"torch": "no-cache", "gpt2": "no-cache"}
    rows = [
        [
            title,
            time(name, unchanged.get(name, "plain")),
            *(time(name, key) for key in VARIANTS),
            time(name, own.get(name, "")),
        ]
        for name, title in PROGRAMS.items()
    ]
    return markdown(["µs a step: median (range)", "unchanged", *VARIANTS.values(), "its own pool"], rows)
