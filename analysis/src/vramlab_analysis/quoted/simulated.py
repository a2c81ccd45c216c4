"""How far the simulated GPU is from a real one, outside of what it was fitted to."""

from __future__ import annotations

import json
import statistics
from itertools import product
from typing import Any, NamedTuple

from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import results
from vramlab_analysis.measures import train_pace
from vramlab_analysis.records import Run
from vramlab_analysis.repository import root

# Within this share of the measured time a simulated one counts as right, as for `experiments fidelity`.
TOLERANCE = 0.15
MIB = 2**20
# Specs with runs of the same networks on both devices, besides `fidelity`, of which a part was fitted.
UNFITTED = (
    "caching-vs-stream-ordered",
    "initialisation",
    "iris",
    "latency",
    "loss-against-pytorch",
    "memory",
    "synchronise",
    "when-allocations-stop",
    "where-time-goes",
    "width",
)


class Agreement(NamedTuple):
    """How far simulated step times are from measured ones."""

    cells: int
    # The share of them within `TOLERANCE`.
    within: float
    # The cell that is furthest off, as a share of the measured time, and what it is.
    worst: float
    worst_of: str
    # The most by which the ratio of two allocators in the same network is off, as a factor.
    contrast: float


def _network(run: Run) -> tuple[Any, ...]:
    """What makes two runs do the same work on two devices."""
    keys = ("allocator", "hidden", "layers", "batch", "sync", "loader", "init", "latency", "trace")
    return (
        *(run.settings.get(key) for key in keys),
        json.dumps(run.settings.get("allocator_settings"), sort_keys=True),
    )


def unfitted() -> Agreement:
    """The agreement in cells that nothing was fitted to."""
    apart: list[tuple[float, str]] = []
    contrast = 1.0
    for spec in UNFITTED:
        medians: dict[str, dict[tuple[Any, ...], float]] = {}
        for device in ("h200", "sim"):
            paces: dict[tuple[Any, ...], list[float]] = {}
            for entry in results(spec, device).select(program="trainer"):
                pace = train_pace(entry.record)
                if pace is not None:
                    paces.setdefault(_network(entry.record), []).append(pace)
            medians[device] = {key: statistics.median(values) for key, values in paces.items()}
        off = {key: medians["sim"][key] / value for key, value in medians["h200"].items() if key in medians["sim"]}
        apart += [(value - 1, f"`{spec}`, `{key[0]}`, width {key[1]}") for key, value in off.items()]
        for one, other in product(off, off):
            # The same network but for the allocator and its settings.
            if one[1:-1] == other[1:-1]:
                contrast = max(contrast, off[one] / off[other])
    worst, of = max(apart, key=lambda one: abs(one[0]))
    within = sum(abs(value) <= TOLERANCE for value, _ in apart) / len(apart)
    return Agreement(len(apart), within, worst, of, contrast)


def short() -> str:
    """The README's sentence."""
    told = unfitted()
    return (
        f"The simulated GPU is fitted to one. Of {told.cells} step times that nothing was fitted to, "
        f"{100 * told.within:.0f} % are within {100 * TOLERANCE:.0f} %; the worst is {100 * told.worst:+.0f} % off "
        f"({told.worst_of})."
    )


def sentence() -> str:
    """What the agreement of the simulated GPU rests on."""
    told = unfitted()
    return (
        "- Simulated times are fitted: kernels to timings, the program's own time a call to cells of the narrowest "
        "network, and the size of the L2 cache was chosen on cells that `experiments fidelity` reports. Of "
        f"{told.cells} cells of other specs, which nothing was fitted to, {100 * told.within:.0f} % are within "
        f"{100 * TOLERANCE:.0f} %; the worst is {100 * told.worst:+.0f} % off ({told.worst_of}), and the ratio of two "
        f"allocators in one of them is off by up to {told.contrast:.1f} times. So an epoch of the network above says "
        "nothing of it: it was fitted on."
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
        f"each operation. It takes memory from the device in granules of {told['granule_bytes'] / MIB:.0f} MiB "
        f"({told['grow_ns_per_granule'] / 1e3:.0f} us) and gives them back ({told['release_ns_per_granule'] / 1e3:.0f} "
        "us)."
    )


def source() -> str:
    """Where the profile is from."""
    return (
        f"What the driver's calls cost here is `experiments calibrate`'s ({profile()['source']}); the built-in profile "
        "[`h200.json`](../allocators/device/src/profiles/h200.json) holds it all."
    )
