"""Agreement of simulated with measured step times, in cells to which nothing was fitted."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import newest, results
from vramlab_analysis.measures import train_pace
from vramlab_analysis.pages.registry import markdown
from vramlab_analysis.records import Run
from vramlab_analysis.repository import root

# A simulated time is right within this share of the measured time, as for `experiments fidelity`.
TOLERANCE = 0.15
# The simulated ratio of two allocators is right within this share.
RATIO_TOLERANCE = 0.10
# `fit-program` fits the program's own time to the steps of this spec.
FIT = "agreement-fit"
# The spec whose cells chose the size of the L2 cache, on an earlier host.
FIDELITY = "fidelity"
# Other specs with runs of the same networks on both devices.
OTHERS = (
    "caching-vs-stream-ordered",
    "initialisation",
    "iris",
    "latency",
    "memory",
    "synchronise",
    "when-allocations-stop",
    "where-time-goes",
    "width",
)


# Held-out cells that were measured on the machine and in the session of their profile.
SESSIONS = ("agreement", "agreement-again")


class Agreement(NamedTuple):
    """Agreement of simulated step times with measured ones."""

    cells: int
    # The share of them within `TOLERANCE`.
    within: float
    # The error of the worst cell as a share of the measured time, and the cell's name.
    worst: float
    worst_of: str
    # Pairs of allocators in the same network, and the share of them whose ratio is within `RATIO_TOLERANCE`.
    pairs: int
    pairs_within: float
    # The largest error of the ratio of two allocators in the same network, as a factor.
    contrast: float


class Repeats(NamedTuple):
    """Agreement of measured runs of one network among themselves: the limit for any model."""

    runs: int
    # The share of them within `TOLERANCE` of the median of the others.
    within: float


class Passes(NamedTuple):
    """Agreement of the ratio of two allocators between passes of a session, and with the simulated one."""

    # Ratios of one pass, and the share of them within `RATIO_TOLERANCE` of the ratio of the other passes' medians.
    ratios: int
    within: float
    # Pairs whose simulated ratio is off by more than `RATIO_TOLERANCE`; of these, those between two passes' ratios.
    off: int
    between: int


def network(run: Run) -> tuple[Any, ...]:
    """Settings that make two runs do the same work. The data count, because the sizes of resident tensors determine
    where the driver places a small block."""
    keys = (
        "allocator", "hidden", "layers", "batch", "sync", "loader", "init", "latency", "trace", "dataset", "gemm",
    )  # fmt: skip
    return (
        *(run.settings.get(key) for key in keys),
        json.dumps(run.settings.get("allocator_settings"), sort_keys=True),
    )


def pace(run: Run) -> float | None:
    """`train_pace`; for a run of one epoch without the excess time of its first step. The program starts in that step,
    and other runs leave their first epoch out."""
    value = train_pace(run)
    if value is None or run.epochs.height > 1 or not run.has_steps or "host_ns" not in run.steps.columns:
        return value
    times = run.steps["host_ns"].diff().drop_nulls()
    if not len(times):
        return value
    beyond = float(times[0]) - float(times.median())  # type: ignore[arg-type]
    return value - max(0.0, beyond) / 1e3 / float(run.epochs["steps"][0])


def paces(spec: str, device: str) -> dict[tuple[Any, ...], list[float]]:
    """Microseconds of a training step in each run of a spec, by network."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for entry in results(spec, device).select(program="trainer"):
        value = pace(entry.record)
        if value is not None:
            found.setdefault(network(entry.record), []).append(value)
    return found


def off(spec: str) -> dict[tuple[Any, ...], float]:
    """Simulated over measured time of a step in the networks of a spec that ran on both devices and were not fitted."""
    measured, made = paces(spec, "gpu"), paces(spec, "sim")
    # Allocator, width, layers and batch: with another loader or other data it is still the fitted network.
    fitted = {key[:4] for key in paces(FIT, "gpu")}
    both = [key for key in measured if key in made and key[:4] not in fitted]
    return {key: statistics.median(made[key]) / statistics.median(measured[key]) for key in both}


def in_session(spec: str) -> bool:
    """Whether a spec was simulated with the profile of the session in which it was measured."""
    profile = results(spec, "gpu").directories[0].parent / "profile.json"
    simulated = results(spec, "sim").document.get("profile_sha256")
    return profile.is_file() and simulated == hashlib.sha256(profile.read_bytes()).hexdigest()


def others(*, session: bool) -> list[str]:
    """The other specs that were measured in their profile's session, or those that were not."""
    return [spec for spec in OTHERS if in_session(spec) is session]


def held_out(*specs: str) -> Agreement:
    """The agreement in the cells of specs that nothing was fitted to."""
    return agreement((spec, off(spec)) for spec in specs)


def agreement(of_specs: Iterable[tuple[str, dict[tuple[Any, ...], float]]]) -> Agreement:
    """The agreement in cells of specs: simulated over measured time of a step, by network."""
    errors: list[tuple[float, str]] = []
    ratios: list[float] = []
    for spec, cells in of_specs:
        errors += [(value - 1, f"`{spec}`, `{key[0]}`, width {key[1]}") for key, value in cells.items()]
        # Networks that differ only in the allocator and its settings.
        alike = [(a, b) for a, b in combinations(cells, 2) if a[1:-1] == b[1:-1]]
        ratios += [factor(cells[a], cells[b]) for a, b in alike]
    worst, of = max(errors, key=lambda error: abs(error[0]))
    within = sum(abs(value) <= TOLERANCE for value, _ in errors) / len(errors)
    right = sum(ratio <= 1 + RATIO_TOLERANCE for ratio in ratios) / len(ratios)
    return Agreement(len(errors), within, worst, of, len(ratios), right, max(ratios))


def repeats(*specs: str) -> Repeats:
    """Agreement of measured runs with the median of the others. Initial weights do not distinguish networks here."""
    runs: dict[tuple[Any, ...], list[float]] = {}
    for spec in specs:
        for key, values in paces(spec, "gpu").items():
            runs.setdefault((*key[:6], *key[7:]), []).extend(values)
    errors = [
        statistics.median(values[:at] + values[at + 1 :]) / value - 1
        for values in runs.values()
        if len(values) > 1
        for at, value in enumerate(values)
    ]
    return Repeats(len(errors), share([abs(value) <= TOLERANCE for value in errors]))


def share(right: list[bool]) -> float:
    """The share of `True`; NaN of nothing."""
    return sum(right) / len(right) if right else math.nan


def factor(a: float, b: float) -> float:
    """The factor by which two values differ."""
    return max(a / b, b / a)


def passes(*specs: str) -> Passes:
    """Ratios of two allocators in a network, pass by pass over the cells of specs; one pass alone does not count."""
    right: list[bool] = []
    beyond: list[bool] = []
    for measured, made, one, other in pairs(specs):
        first, second = measured[one], measured[other]
        if len(first) < 2:
            continue
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        for at, ratio in enumerate(ratios):
            rest = [statistics.median(values[:at] + values[at + 1 :]) for values in (first, second)]
            right.append(factor(ratio, rest[0] / rest[1]) <= 1 + RATIO_TOLERANCE)
        ratio = statistics.median(made[one]) / statistics.median(made[other])
        if factor(ratio, statistics.median(first) / statistics.median(second)) > 1 + RATIO_TOLERANCE:
            beyond.append(min(ratios) <= ratio <= max(ratios))
    return Passes(len(right), share(right), len(beyond), sum(beyond))


def pairs(specs: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    """Measured and simulated times of each spec, and two networks that differ only in the allocator."""
    for spec in specs:
        measured, made = paces(spec, "gpu"), paces(spec, "sim")
        for a, b in combinations(off(spec), 2):
            if a[1:-1] == b[1:-1]:
                yield measured, made, a, b


def own_code() -> dict[str, Any]:
    """Microseconds a step that an allocator takes more than `caching` in a session's narrowest network, `measured`,
    `simulated` and `by_calls`: by the time of its calls. The simulator leaves out an allocator's own code."""
    spec = SESSIONS[0]
    both = [paces(spec, device) for device in ("gpu", "sim")]
    width = min(key[1] for key in both[0] if key[0] == "tlsf")
    cells = {key[0]: key for key in both[0] if key[1] == width}
    run = results(spec, "sim").select(program="trainer", alloc="caching", hidden=width)[0].record
    # Requests of the validation are counted with the steps'.
    requests = run.summary["allocator_stats"]["allocation.all.allocated"] / float(run.epochs["steps"].sum())
    rows = read_json(newest("bench-family.json"))["rows"]
    calls = {
        row["allocator"]: row["median"] / 1e3 for row in rows if (row["case"], row["threads"]) == ("history/mlp", 1)
    }
    values: dict[str, Any] = {"width": width}
    for name in ("pytorch", "tlsf"):
        measured, made = (statistics.median(of[cells[name]]) - statistics.median(of[cells["caching"]]) for of in both)
        more = (calls[name] - calls["caching"]) * requests
        values[name] = {"measured": measured, "simulated": made, "by_calls": more}
    return values


def values() -> dict[str, Any]:
    """The agreement in cells of their profile's session, `session`, and in those of other hosts, `elsewhere`."""
    return {
        "tolerance": TOLERANCE,
        "ratio_tolerance": RATIO_TOLERANCE,
        "session": held_out(*SESSIONS, *others(session=True))._asdict(),
        "elsewhere": held_out(*others(session=False))._asdict(),
    }


class Kind(NamedTuple):
    """Cells of one kind: a row of the table."""

    title: str
    specs: list[str]
    # Whether the profile was measured in the same session.
    session: bool


def kinds() -> Iterator[Kind]:
    """The rows of the table."""
    for specs in ([FIDELITY], others(session=True), others(session=False)):
        if specs:
            here = in_session(specs[0])
            name = f"`{specs[0]}`" if len(specs) == 1 else f"{len(specs)} other specs"
            where = "" if here else ", on other hosts than the profile"
            yield Kind(f"{name}, an {results(specs[0], 'gpu').machine}{where}", specs, here)
    for spec in SESSIONS:
        yield Kind(f"`{spec}`, an {results(spec, 'gpu').machine}", [spec], session=True)


def percent(share: float) -> str:
    """A share as a whole percentage; a dash for NaN."""
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"


def table() -> str:
    """Simulated against measured step times by kind of cell, and the agreement of measured runs among themselves."""
    head = ["simulated and measured, no step time fitted", "cells", f"steps within {100 * TOLERANCE:.0f} %", "worst"]
    head += ["measured runs within", f"ratios of two allocators within {100 * RATIO_TOLERANCE:.0f} %"]
    head += ["measured ratios of one pass within", "ratios off, between two passes"]
    body = []
    for kind in kinds():
        right = held_out(*kind.specs)
        # Hosts that changed between the runs made no passes.
        ratios = passes(*kind.specs) if kind.session else None
        body.append([
            kind.title, str(right.cells), percent(right.within),
            f"{100 * right.worst:+.0f} % ({right.worst_of})",
            percent(repeats(*kind.specs).within), f"{percent(right.pairs_within)} of {right.pairs}",
            percent(ratios.within) if ratios else "–", f"{ratios.between} of {ratios.off}" if ratios else "–",
        ])  # fmt: skip
    return markdown(head, body)


def profile() -> dict[str, Any]:
    """The built-in profile of the simulated GPU, which `experiments calibrate` measured."""
    document: dict[str, Any] = read_json(root() / "allocators/device/src/profiles/h200.json")
    return document
