"""Step times of unchanged CUDA programs under `vramlab run`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages.registry import group, markdown, table

LINE = re.compile(r"^(\S+)/(\S+) +median +([\d.]+) +min +([\d.]+) +max +([\d.]+) +n (\d+)$", re.MULTILINE)
IN_TURN = re.compile(
    r"^in turn: (\S+): own cache ([\d.]+) .*ratio ([\d.]+) \(middle half ([\d.]+) to ([\d.]+)\), (\d+) pairs$",
    re.MULTILINE,
)
PROGRAMS = {
    "matrices": "raw loop, default stream",
    "shared": "the same, shared cudart",
    "per-thread": "the same, per-thread streams",
    "two": "raw loop, two non-blocking streams",
    "four": "raw loop, four blocking streams",
    "managed": "managed memory",
    "texture": "textures",
    "cuda_mlp": "cuda_mlp",
    "cuda-mnist": "cuda-mnist",
    "cupy": "CuPy without its pool",
    "rmm": "RMM without its pool",
    "resnet50": "ResNet-50 in PyTorch without its cache",
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
    """Median, min, max and number of runs, by program and variant; `gpu`, `driver`, `day`.

    `in-turn` has the ratios of PyTorch's step with served memory to that with its own cache.
    """
    text = _record()
    out: dict[str, Any] = {}
    for program, variant, median, least, most, runs in LINE.findall(text):
        cell = {"median": float(median), "min": float(least), "max": float(most), "runs": int(runs)}
        out.setdefault(program, {})[variant] = cell
    machine = re.search(r"^machine +([^,]+), driver ([^,]+),.*, (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    if not out or not machine:
        raise AnalysisError("experiments/results: the newest *-any-program.txt has no machine or no times.")
    keys = ("own", "ratio", "low", "high")
    out["in-turn"] = {
        program: dict(zip(keys, map(float, numbers), strict=True)) | {"pairs": int(pairs)}
        for program, *numbers, pairs in IN_TURN.findall(text)
    }
    return out | dict(zip(("gpu", "driver", "day"), machine.groups(), strict=True))


@table("any-program")
def times() -> str:
    """Microseconds a step: as it is, recorded, and with its memory served by `caching` in three ways."""
    cells = values()

    def time(program: str, variant: str) -> str:
        cell = cells[program].get(variant)
        return f"{cell['median']:,.0f} ({cell['min']:,.0f} to {cell['max']:,.0f})" if cell else ""

    torch = ("resnet50", "gpt2")
    rows = [
        [
            title,
            time(name, "no-cache" if name in torch else "plain"),
            # PyTorch's recorded runs keep its cache.
            *("" if name in torch and key == "record" else time(name, key) for key in VARIANTS),
            time(name, "own-cache" if name in torch else "own-pool"),
        ]
        for name, title in PROGRAMS.items()
    ]
    return markdown(["µs a step: median (range)", "unchanged", *VARIANTS.values(), "its own pool"], rows)


def parts(cells: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """A step's remainder, waiting and driver's work as shares of the step with the driver's memory, by program's title.

    Only programs that were measured in all three ways. Where waiting is less than the runs vary, it is nothing.
    """
    out = {}
    for name, title in PROGRAMS.items():
        cell = cells.get(name, {})
        plain = "no-cache" if "no-cache" in cell else "driver"
        driver, waits, ordered = (cell.get(key, {}).get("median") for key in (plain, "waits", "ordered"))
        if driver and waits and ordered:
            waiting = max(waits - ordered, 0.0)
            out[title] = (ordered / driver, waiting / driver, 1 - (ordered + waiting) / driver)
    return out
