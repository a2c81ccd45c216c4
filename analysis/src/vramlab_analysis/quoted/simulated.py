"""How far the simulated GPU is from a real one, outside of what it was fitted to."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import machine, newest, results
from vramlab_analysis.measures import train_pace
from vramlab_analysis.records import Run
from vramlab_analysis.repository import root

# Within this share of the measured time a simulated one counts as right, as for `experiments fidelity`.
TOLERANCE = 0.15
# Within this share the simulated ratio of two allocators counts as right.
RATIO_TOLERANCE = 0.10
MIB = 2**20
# The table's first column.
TITLE = "simulated beside measured, no step time fitted"
# From the steps of this spec `fit-program` takes the program's own time.
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


# Held-out cells that were measured on the machine and in the session of their profile. The simulator was changed after
# those of the first were looked at. What is simulated of the second is by the changed one.
SESSIONS = ("agreement", "agreement-again")


class Agreement(NamedTuple):
    """How far simulated step times are from measured ones."""

    cells: int
    # The share of them within `TOLERANCE`.
    within: float
    # The cell that is furthest off, as a share of the measured time, and what it is.
    worst: float
    worst_of: str
    # Pairs of allocators in the same network, and the share of them whose ratio is within `RATIO_TOLERANCE`.
    pairs: int
    pairs_within: float
    # The most by which the ratio of two allocators in the same network is off, as a factor.
    contrast: float


class Repeats(NamedTuple):
    """How far measured runs of one network are from each other: what no model can do better than."""

    runs: int
    # The share of them within `TOLERANCE` of the median of the others.
    within: float


class Passes(NamedTuple):
    """How far the ratio of two allocators in a session is its own from pass to pass, and the simulated one from it."""

    # Ratios of one pass, and the share of them within `RATIO_TOLERANCE` of that of the other passes' medians.
    ratios: int
    within: float
    # Pairs whose simulated ratio is off by more than `RATIO_TOLERANCE`, and those of them between two passes' ratios.
    off: int
    between: int


def network(run: Run) -> tuple[Any, ...]:
    """What makes two runs do the same work: the data too, because the sizes of what stays in memory decide where the
    driver has room for a small block."""
    keys = (
        "allocator", "hidden", "layers", "batch", "sync", "loader", "init", "latency", "trace", "dataset", "gemm",
    )  # fmt: skip
    return (
        *(run.settings.get(key) for key in keys),
        json.dumps(run.settings.get("allocator_settings"), sort_keys=True),
    )


def pace(run: Run) -> float | None:
    """`train_pace`; of a run of one epoch without what its first step took beyond a usual one. The program starts in
    that step, and other runs leave their first epoch out."""
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
    told: dict[tuple[Any, ...], list[float]] = {}
    for entry in results(spec, device).select(program="trainer"):
        value = pace(entry.record)
        if value is not None:
            told.setdefault(network(entry.record), []).append(value)
    return told


def off(spec: str, simulated: str = "sim") -> dict[tuple[Any, ...], float]:
    """Simulated over measured time of a step in the networks of a spec that ran on both devices and were not fitted."""
    measured, made = paces(spec, "gpu"), paces(spec, simulated)
    # Allocator, width, layers and batch: at another loader or with other data it is still the network that was fitted.
    fitted = {key[:4] for key in paces(FIT, "gpu")}
    both = [key for key in measured if key in made and key[:4] not in fitted]
    return {key: statistics.median(made[key]) / statistics.median(measured[key]) for key in both}


def in_session(spec: str) -> bool:
    """Whether a spec was simulated by the profile of the session in which it was measured, which lies beside it."""
    there = results(spec, "gpu").directories[0].parent / "profile.json"
    simulated = results(spec, "sim").document.get("profile_sha256")
    return there.is_file() and simulated == hashlib.sha256(there.read_bytes()).hexdigest()


def others(*, session: bool) -> list[str]:
    """Those of the other specs that are of their profile's session, or those that are not."""
    return [spec for spec in OTHERS if in_session(spec) is session]


def held_out(*specs: str, simulated: str = "sim") -> Agreement:
    """The agreement in the cells of specs that nothing was fitted to."""
    return agreement((spec, off(spec, simulated)) for spec in specs)


def agreement(of_specs: Iterable[tuple[str, dict[tuple[Any, ...], float]]]) -> Agreement:
    """The agreement in cells of specs: simulated over measured time of a step, by network."""
    apart: list[tuple[float, str]] = []
    ratios: list[float] = []
    for spec, cells in of_specs:
        apart += [(value - 1, f"`{spec}`, `{key[0]}`, width {key[1]}") for key, value in cells.items()]
        # The same network but for the allocator and its settings.
        alike = [(one, other) for one, other in combinations(cells, 2) if one[1:-1] == other[1:-1]]
        ratios += [factor(cells[one], cells[other]) for one, other in alike]
    worst, of = max(apart, key=lambda one: abs(one[0]))
    within = sum(abs(value) <= TOLERANCE for value, _ in apart) / len(apart)
    right = sum(ratio <= 1 + RATIO_TOLERANCE for ratio in ratios) / len(ratios)
    return Agreement(len(apart), within, worst, of, len(ratios), right, max(ratios))


def repeats(*specs: str) -> Repeats:
    """How well measured runs tell each other. How weights are drawn changes their values alone, so it does not tell
    networks apart here."""
    runs: dict[tuple[Any, ...], list[float]] = {}
    for spec in specs:
        for key, values in paces(spec, "gpu").items():
            runs.setdefault((*key[:6], *key[7:]), []).extend(values)
    apart = [
        statistics.median(values[:at] + values[at + 1 :]) / value - 1
        for values in runs.values()
        if len(values) > 1
        for at, value in enumerate(values)
    ]
    return Repeats(len(apart), sum(abs(value) <= TOLERANCE for value in apart) / len(apart))


def factor(one: float, other: float) -> float:
    """By which factor two figures differ."""
    return max(one / other, other / one)


def passes(*specs: str, simulated: str = "sim") -> Passes:
    """What passes over the cells of specs say of the ratios of two allocators in a network; one pass says nothing."""
    told: list[bool] = []
    beyond: list[bool] = []
    for measured, made, one, other in pairs(specs, simulated):
        first, second = measured[one], measured[other]
        if len(first) < 2:
            continue
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        for at, ratio in enumerate(ratios):
            rest = [statistics.median(values[:at] + values[at + 1 :]) for values in (first, second)]
            told.append(factor(ratio, rest[0] / rest[1]) <= 1 + RATIO_TOLERANCE)
        ratio = statistics.median(made[one]) / statistics.median(made[other])
        if factor(ratio, statistics.median(first) / statistics.median(second)) > 1 + RATIO_TOLERANCE:
            beyond.append(min(ratios) <= ratio <= max(ratios))
    return Passes(len(told), sum(told) / len(told), len(beyond), sum(beyond))


def pairs(specs: Iterable[str], simulated: str) -> Iterator[tuple[Any, ...]]:
    """What was measured and simulated of each spec, with two networks that differ in the allocator and its settings."""
    for spec in specs:
        measured, made = paces(spec, "gpu"), paces(spec, simulated)
        for one, other in combinations(off(spec, simulated), 2):
            if one[1:-1] == other[1:-1]:
                yield measured, made, one, other


def short() -> str:
    """The README's sentence."""
    told = held_out(*SESSIONS, *others(session=True))
    elsewhere = ""
    if far := others(session=False):
        there = held_out(*far)
        elsewhere = f", of {there.cells} on other hosts {100 * there.within:.0f} % (worst {100 * there.worst:+.0f} %)"
    return (
        f"The simulated GPU is fitted to one. Of {told.cells} step times that were not fitted to "
        f"{100 * told.within:.0f} % are within {100 * TOLERANCE:.0f} % (each in its profile's session; worst "
        f"{100 * told.worst:+.0f} %){elsewhere}, and {100 * told.pairs_within:.0f} % of {told.pairs} ratios of "
        f"allocators within {100 * RATIO_TOLERANCE:.0f} %."
    )


def own_code(spec: str = SESSIONS[0], simulated: str = "resim") -> str:
    """What allocators' own code takes the host, which the simulator leaves out, in a session's narrowest network with
    `tlsf`."""
    measured, made = paces(spec, "gpu"), paces(spec, simulated)
    width = min(key[1] for key in measured if key[0] == "tlsf")
    cells = {key[0]: key for key in measured if key[1] == width}
    runs = results(spec, simulated).select(program="trainer", alloc="caching", hidden=width)
    stats, epochs = runs[0].record.summary["allocator_stats"], runs[0].record.epochs
    # Requests of the validation are counted with the steps'.
    requests = stats["allocation.all.allocated"] / float(epochs["steps"].sum())
    bench = read_json(newest("bench-family.json"))
    calls = {
        row["allocator"]: row["median"] / 1e3
        for row in bench["rows"]
        if row["case"] == "history/mlp" and row["threads"] == 1
    }
    gpu, said = machine(bench["device"]["name"]), []
    for name in ("pytorch", "tlsf"):
        more = [statistics.median(of[cells[name]]) - statistics.median(of[cells["caching"]]) for of in (measured, made)]
        said.append(
            f"`{name}` takes {more[0]:.0f} us a step more than `caching` at width {width}, simulated {more[1]:.0f}, "
            f"and by the time of its calls on an {gpu} {(calls[name] - calls['caching']) * requests:.0f}"
        )
    return f"- The simulator leaves out what an allocator's own code takes the host: {'; '.join(said)}."


def row(title: str, told: Agreement, runs: Repeats, ratios: Passes | None = None) -> str:
    """A line of the table."""
    cells = [
        title,
        str(told.cells),
        f"{100 * told.within:.0f} %",
        f"{100 * told.worst:+.0f} % ({told.worst_of})",
        f"{100 * runs.within:.0f} %",
        f"{100 * told.pairs_within:.0f} % of {told.pairs}",
        f"{100 * ratios.within:.0f} %" if ratios else "–",
        f"{ratios.between} of {ratios.off}" if ratios else "–",
    ]
    return f"| {' | '.join(cells)} |"


class Kind(NamedTuple):
    """Cells of one kind: a row of the table."""

    title: str
    specs: list[str]
    # What the labels of its simulated runs end in.
    simulated: str
    # Whether the profile is of the session in which they were measured.
    session: bool


def kinds() -> Iterator[Kind]:
    """The rows of the table."""
    for specs in ([FIDELITY], others(session=True), others(session=False)):
        if specs:
            here = in_session(specs[0])
            name = f"`{specs[0]}`" if len(specs) == 1 else f"{len(specs)} other specs"
            where = "" if here else ", on another host than the profile"
            yield Kind(f"{name}, an {results(specs[0], 'gpu').machine}{where}", specs, "sim", here)
    first, second = SESSIONS
    yield Kind(f"`{first}`, an {results(first, 'gpu').machine}", [first], "sim", session=True)
    yield Kind(f"`{first}`, as the simulator is now", [first], "resim", session=True)
    yield Kind(f"`{second}`, another", [second], "sim", session=True)


def table() -> str:
    """How far the simulated GPU is off, and how far measured runs are from each other."""
    heads = [
        *[TITLE, "cells", f"steps within {100 * TOLERANCE:.0f} %", "worst", "runs that tell each other"],
        f"ratios of two allocators within {100 * RATIO_TOLERANCE:.0f} %",
        *["ratios of one pass that tell the others'", "ratios off that lie between two passes"],
    ]
    rows = [f"| {' | '.join(heads)} |", "|---|--:|--:|---|--:|--:|--:|--:|"]
    for one in kinds():
        # Hosts that changed between the runs made no passes.
        told = passes(*one.specs, simulated=one.simulated) if one.session else None
        rows.append(row(one.title, held_out(*one.specs, simulated=one.simulated), repeats(*one.specs), told))
    return "\n".join(rows)


def sentence() -> str:
    """What the agreement of the simulated GPU rests on."""
    return (
        "- Simulated times are fitted: kernels to timings, the program's own time a call to cells of the narrowest "
        f"network, and the size of the L2 cache was chosen on cells of `{FIDELITY}`, on another host. The table has "
        "cells to which nothing else was fitted; where a row says nothing of hosts, the profile was calibrated and "
        "fitted in the session in which its cells were measured. Kernels are timed by themselves, in shapes that "
        f"networks of the first rows have; those of `{SESSIONS[0]}` and `{SESSIONS[1]}` have others, so they are the "
        f"stricter test. The simulator learnt from `{SESSIONS[0]}` before "
        f"`{SESSIONS[1]}` was looked at, whose host was uneven. A run tells the others where it is within "
        f"{100 * TOLERANCE:.0f} % of their median, and a ratio of one pass over the cells where it is within "
        f"{100 * RATIO_TOLERANCE:.0f} % of theirs."
    )


def profile() -> dict[str, Any]:
    """The built-in profile of the simulated GPU, which `experiments calibrate` measured."""
    told: dict[str, Any] = read_json(root() / "allocators/device/src/profiles/h200.json")
    return told


def pages() -> str:
    """What the driver's calls for plain memory cost."""
    plain = profile()["plain"]
    page = plain["page_bytes"] / MIB
    return (
        f"- **Most `cuMemAlloc` are cheap:** the driver packs blocks below {page:.0f} MiB into {page:.0f} MiB pages. "
        f"{plain['alloc_in_page_ns'] / 1e3:.1f} us in a page that is held already, {plain['alloc_ns'][0][1] / 1e3:.0f} "
        f"us for a new page, and {plain['free_ns'][0][1] / 1e3:.0f} us for the free that empties it."
    )


def pool() -> str:
    """What the driver's pool costs."""
    told = profile()["pool"]
    return (
        f"- **The driver's pool costs time on the device too,** {told['stream_ns'] / 1e3:.1f} us in the stream for "
        "the frees between two kernels. It takes memory from the device in granules of "
        f"{told['granule_bytes'] / MIB:.0f} MiB ({told['grow_ns_per_granule'] / 1e3:.0f} us) and gives them back "
        f"({told['release_ns_per_granule'] / 1e3:.0f} us)."
    )


def source() -> str:
    """Where the profile is from."""
    return (
        f"What the driver's calls cost here is `experiments calibrate`'s ({profile()['source']}); the built-in profile "
        "[`h200.json`](../allocators/device/src/profiles/h200.json) holds it all."
    )
