"""The table of PyTorch programs of two ranks, from results of its spec."""

from __future__ import annotations

from typing import Any

from vramlab_analysis.pages.sharded import cells, published, torch_rows


def _result(reserved: int, digest: str, ms: float) -> dict[str, Any]:
    ranks = [{"peak_reserved": reserved, "peak_active": 2**30, "ms": time} for time in (ms - 1, ms)]
    return {"losses_sha256": digest, "of_ranks": ranks}


def _run(alloc: str, repeat: int, result: dict[str, Any], program: str = "fsdp_gpt2") -> tuple[Any, int, Any]:
    return {"program": program, "alloc": alloc}, repeat, result


def test_steps_are_compared_in_the_same_repeat() -> None:
    found = cells([
        _run("native", 0, _result(2**31, "a", 10.0)),
        _run("native", 1, _result(2**31, "a", 100.0)),
        _run("remap", 0, _result(2**30, "a", 11.0)),
        _run("gmlake", 1, _result(2**30, "b", 110.0)),
        _run("native", 0, {"oom": "out of memory"}, "fsdp_moe"),
    ])  # fmt: skip
    once = {"median": 1.1, "least": 1.1, "most": 1.1, "pairs": 1}
    assert found["fsdp_gpt2"]["remap"]["over"] == {"native": once}
    assert found["fsdp_gpt2"]["gmlake"]["over"] == {"native": once}, "not over the other repeat"
    rows = torch_rows(found)
    assert rows[1] == ["`fsdp_gpt2`", "`remap`", "1024, 1024", "1.000, 1.000", "11.0", "1.10", "-", "equal"]
    assert [row[-1] for row in rows] == ["equal", "equal", "differ", "out of memory"]
    assert rows[0][3] == "2.000, 2.000"


def test_papers_are_related_to_live_memory_where_they_report_it() -> None:
    first, second = published().splitlines()[2:4]
    assert first.endswith("| 1.52 | 1.31 | 1.02 |")
    assert second.endswith("not reported |")
