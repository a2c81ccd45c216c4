"""The tables of registered memory and of communicators, from records of `experiments register`."""

from __future__ import annotations

from typing import Any

from vramlab_analysis.pages.registration import communicator_table, registration_table, verdict


def _time(operation: str, mode: str, launch: str, ns: int, size: int = 2**28) -> dict[str, Any]:
    return {"operation": operation, "mode": mode, "launch": launch, "bytes": size, "p50_ns": ns}


def _kind(name: str, registered: bool, **more: Any) -> dict[str, Any]:
    results = [
        {"mode": "register", "registered": registered, "correct": True, "call_ns": 1},
        {"mode": "window", "registered": False, "error": "invalid usage", "call_ns": 1},
    ]
    times = [
        _time("all-reduce", "none", "eager", 900_000),
        _time("all-reduce", "register", "eager", 800_000),
        _time("all-reduce", "none", "eager", 1, size=4096),
    ]
    return {"kind": name, "measurement": {"registrations": results, "times": times}} | more


def test_a_kind_is_registered_accepted_refused_or_not_measured() -> None:
    assert verdict(_kind("nccl", True), "register") == "yes"
    assert verdict(_kind("pool", False), "register") == "accepted, not registered"
    assert verdict(_kind("pool", False), "window") == "refused"
    assert verdict({"kind": "pinned", "error": "no further result within 60 s"}, "register").startswith("no further")
    wrong = _kind("nccl", True)
    wrong["measurement"]["registrations"][0]["correct"] = False
    assert verdict(wrong, "register") == "wrong sums"


def test_times_are_of_the_largest_collectives() -> None:
    rows = registration_table({"kinds": [_kind("nccl", True)]}).splitlines()
    assert rows[2] == "| `nccl` | yes | refused | 256 | - | - | 900, 800 | - | - | - |"


def test_memory_grows_with_communicators() -> None:
    memory = [{"count": 1, "device_bytes": 300 * 2**20}, {"count": 8, "device_bytes": 2**30, "counted_bytes": 2**29}]
    rows = communicator_table({"communicators": {"memory": memory}}).splitlines()
    assert rows[2:] == ["| 1 | 300 | not counted |", "| 8 | 1,024 | 512 |"]
