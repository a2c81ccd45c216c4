"""Step times of unchanged CUDA programs under `vramlab run`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from vramlab_analysis import experiments, measures
from vramlab_analysis.measures import Interval
from vramlab_analysis.pages.cells import dates, listed
from vramlab_analysis.pages.registry import group, markdown, table

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


SPECS = ("any-program", "any-program-pytorch")
TORCH = ("resnet50", "gpt2")
IN_TURN = "-in-turn"
CHECKS = "any-program-checks"
REMAINDER = "any-program-remainder"
# The values of `launches`: nanoseconds of a launch, and how many more than through the driver's entry point.
LAUNCHES = ("default", "default-more", "non-blocking", "non-blocking-more")


def _variant(program: str, way: str, own_pool: bool) -> str:
    """The name of a variant in the pages. Recorded runs of PyTorch keep its cache."""
    if program in TORCH:
        return {"plain": "own-cache" if own_pool else "no-cache"}.get(way, way)
    return {"plain": "own-pool", "ordered": "own-pool-served"}.get(way, f"own-pool-{way}") if own_pool else way


def _experiment(runs: experiments.Experiment) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The machine of a spec's runs, and a row for each program and variant."""
    cells: dict[tuple[str, str, bool, str], list[float]] = {}
    turns: dict[str, list[dict[str, float]]] = {}
    done = runs.select()
    for entry in done:
        program, way = str(entry.options["program"]), str(entry.options.get("way", "plain"))
        own_pool, result = bool(entry.options.get("own-pool")), entry.result
        if program.endswith(IN_TURN):
            turns.setdefault(program, []).append(result["values"])
            continue
        measured = {"us": result["us"]} if "us" in result else {name: result["values"][name] for name in LAUNCHES}
        for name, value in measured.items():
            cells.setdefault((program, way, own_pool, name), []).append(value)
    rows: list[dict[str, Any]] = [
        {"program": program, "pairs": sum(values["pairs"] for values in made)}
        | {key: statistics.median(values[key] for values in made) for key in ("own", "ratio", "low", "high")}
        for program, made in turns.items()
    ]
    for (program, way, own_pool, name), values in cells.items():
        median, low, high = measures.median_interval(values)
        spread = {
            "median": median,
            "min": min(values),
            "max": max(values),
            "runs": len(values),
            "low": low,
            "high": high,
        }
        rows.append({"program": program, "way": way, "own-pool": own_pool, "value": name} | spread)
    machine = {
        "gpu": listed(sorted({entry.meta["machine"]["gpu"] for entry in done})),
        "driver": listed(sorted({entry.meta["provenance"]["driver_release"] for entry in done})),
        "days": dates(entry.meta["started_at"] for entry in done),
    }
    return machine, rows


@group("any-program")
def values() -> Mapping[str, Any]:
    """Median, min, max and number of runs, by program and variant; `gpu`, `driver`, `days`.

    `in-turn` has the ratios of PyTorch's step with served memory to that with its own cache, and `remainder` what
    `any-program-remainder` measured, on a machine of its own.
    """
    made = [_experiment(experiments.results(spec, "gpu")) for spec in SPECS]
    machine, rows = made[0][0], [row for _, some in made for row in some]
    remainder = cells_of(_experiment(experiments.results(REMAINDER, "gpu"))[1])
    return cells_of(rows) | {name: machine[name] for name in ("gpu", "driver", "days")} | {"remainder": remainder}


def cells_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of `values` except for the machine's, of rows of one record."""
    out: dict[str, Any] = {"in-turn": {}}
    for row in rows:
        if row["program"].endswith(IN_TURN):
            keys = ("own", "ratio", "low", "high", "pairs")
            out["in-turn"][row["program"].removesuffix(IN_TURN)] = {key: row[key] for key in keys}
            continue
        variant = _variant(row["program"], row["way"], row.get("own-pool", False))
        if row["value"] in LAUNCHES:
            variant += f"-{row['value']}"
        out.setdefault(row["program"], {})[variant] = {
            key: row[key] for key in ("median", "min", "max", "runs", "low", "high")
        }
    return out


@group("any-program-checks")
def checks() -> Mapping[str, Any]:
    """The spec `any-program-checks`: its `programs` with more than one finished run, their `runs`, and those whose
    results `differ`."""
    printed: dict[tuple[str, str], list[Any]] = {}
    for run in experiments.results(CHECKS, "gpu").select():
        key = run.options["program"], str(run.options.get("of"))
        printed.setdefault(key, []).append(run.result["results"])
    compared = [some for some in printed.values() if len(some) > 1]
    differ = sum(any(one != some[0] for one in some) for some in compared)
    return {"runs": sum(map(len, compared)), "programs": len(compared), "differ": differ}


def _turns(program: str) -> dict[str, dict[experiments.Turn, float]]:
    """Steps of a program, by variant and turn."""
    by_variant: dict[str, dict[experiments.Turn, float]] = {}
    for spec in SPECS:
        for entry in experiments.results(spec, "gpu").select():
            if entry.options["program"] != program:
                continue
            way, own_pool = str(entry.options.get("way", "plain")), bool(entry.options.get("own-pool"))
            by_variant.setdefault(_variant(program, way, own_pool), {})[entry.turn] = entry.result["us"]
    return by_variant


def over(program: str, of: str, to: str) -> Interval:
    """A variant's step over that of another variant of the program, by turn."""
    turns = _turns(program)
    return measures.ratio(turns[of], turns[to])


@group("recorded-step")
def recorded_step() -> Mapping[str, Any]:
    """A recorded step of ResNet-50 in PyTorch over one that is not recorded, and the pairs of runs of one turn."""
    turns = _turns("resnet50")
    pairs = len(turns["record"].keys() & turns["own-cache"].keys())
    return {"over": over("resnet50", "record", "own-cache").value, "pairs": pairs}


@table("any-program")
def times() -> str:
    """Microseconds a step: as it is, recorded, and with its memory served by `caching` in three ways."""
    cells = values()

    def time(program: str, variant: str) -> str:
        cell = cells.get(program, {}).get(variant)
        return f"{cell['median']:,.0f} ({cell['min']:,.0f} to {cell['max']:,.0f})" if cell else ""

    rows = [
        [
            title,
            time(name, "no-cache" if name in TORCH else "plain"),
            # PyTorch's recorded runs keep its cache.
            *("" if name in TORCH and key == "record" else time(name, key) for key in VARIANTS),
            time(name, "own-cache" if name in TORCH else "own-pool"),
        ]
        for name, title in PROGRAMS.items()
        if name in cells
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
