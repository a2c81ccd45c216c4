"""The tables of registered memory and of PyTorch programs of two ranks, from records of their programs."""

from __future__ import annotations

from typing import Any

from vramlab_analysis.pages.registration import communicator_table, registration_table, torch_rows, verdict


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
    assert rows[2] == "| `nccl` | yes | refused | - | - | 900, 800 | - | - | - |"


def test_memory_grows_with_communicators() -> None:
    memory = [{"count": 1, "device_bytes": 300 * 2**20}, {"count": 8, "device_bytes": 2**30, "counted_bytes": 2**29}]
    rows = communicator_table({"communicators": {"memory": memory}}).splitlines()
    assert rows[2:] == ["| 1 | 300 | not counted |", "| 8 | 1,024 | 512 |"]


def test_programs_are_compared_with_native() -> None:
    def result(reserved: int, digest: str) -> dict[str, Any]:
        ranks = [{"peak_reserved": reserved, "peak_active": 2**30, "ms": ms} for ms in (40.0, 50.0)]
        return {"losses_sha256": digest, "of_ranks": ranks}

    rows = torch_rows([
        ({"program": "fsdp_gpt2", "alloc": "native"}, result(2**31, "a")),
        ({"program": "fsdp_gpt2", "alloc": "remap"}, result(2**30, "a")),
        ({"program": "fsdp_gpt2", "alloc": "gmlake"}, result(2**30, "b")),
        ({"program": "fsdp_moe", "alloc": "native"}, {"oom": "out of memory"}),
    ])  # fmt: skip
    assert [row[-1] for row in rows] == ["differ", "equal", "equal", "out of memory"]
    assert rows[1][2:5] == ["2,048", "2.000", "50.0"]
