"""Costs of pinned memory, as `experiments calibrate --only-host` writes them."""

from __future__ import annotations

import math
from typing import Any

from vramlab_analysis.pages.host import GIB, Costs, size

MIB = 2**20


def document(**more: Any) -> dict[str, Any]:
    alloc = {"way": "alloc", "samples": 3}
    copy = {"direction": "to_device", "samples": 3}
    return {
        "clock": "monotonic",
        "device": {"name": "NVIDIA H200"},
        "pins": [
            alloc | {"bytes": MIB, "pin_ns": 900, "release_ns": 100},
            alloc | {"bytes": GIB // 2, "pin_ns": 200_000_000, "release_ns": 50_000_000},
            {
                "way": "register",
                "threads": 4,
                "samples": 3,
                "bytes": GIB // 2,
                "touch_ns": 30_000_000,
                "pin_ns": 20_000_000,
            },
        ],
        "copies": [
            copy | {"memory": "pageable", "bytes": MIB, "p50_ns": 150},
            copy | {"memory": "alloc", "bytes": MIB, "p50_ns": 50},
            copy | {"memory": "pageable", "bytes": 4 * MIB, "p50_ns": 50},
            copy | {"memory": "alloc", "bytes": 4 * MIB, "p50_ns": 50},
        ],
        "pool": [{"allocator": "host-exact", "bytes": MIB, "samples": 3, "p50_ns": 7}],
    } | more


def test_times_to_pin_are_of_a_gib_and_with_touching() -> None:
    costs = Costs(document())
    assert costs.pins() == {("alloc", 0): 0.4, ("register", 4): 0.1}
    assert (costs.machine, costs.simulated) == ("NVIDIA H200", False)
    simulated = Costs(document(clock="virtual", device={"name": "NVIDIA H200 (simulated)"}))
    assert (simulated.machine, simulated.simulated) == ("simulated H200", True)


def test_pinning_pays_after_the_copies_that_save_its_cost() -> None:
    costs = Costs(document())
    assert costs.anew_ns(MIB) == 1000
    assert costs.anew_ns(4 * MIB) == 4000, "in proportion to the nearest size"
    assert costs.pays_after(MIB) == 10
    assert math.isnan(costs.pays_after(4 * MIB)), "a pinned copy that is not faster never pays"
    assert costs.pool_ns() == {MIB: 7}


def test_sizes_have_the_largest_unit() -> None:
    assert [size(count) for count in (100, 4096, 5 * MIB, GIB)] == ["100 bytes", "4 KiB", "5 MiB", "1 GiB"]
