"""Runs inside real programs: the sessions that count, and the base of comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vramlab_analysis import inside
from vramlab_analysis.errors import AnalysisError


def machine(build: str, host: str = "a") -> dict[str, Any]:
    facts = {"gpu": "NVIDIA H100", "driver": "580.1\n580.1", "torch": "2.11.0", "at": "2026-11-25T00:00:00Z"}
    return {"kind": "machine", "build": build, "provenance": {"host_hash": host}, **facts}


def run(part: str, arm: str, repeat: int, **told: Any) -> dict[str, Any]:
    limit = f" at {told['over_active']}" if "over_active" in told else ""
    return {"id": f"{part} gpt2 {arm}{limit} #{repeat}", "part": part, "program": "gpt2", "arm": arm, "repeat": repeat,
            "status": "ok", **told}  # fmt: skip


def file(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_arm_is_compared_with_native_of_its_own_session(tmp_path: Path) -> None:
    old = [run("timed", arm, repeat, ms=ms) for repeat in (0, 1) for arm, ms in (("native", 10.0), ("caching", 11.0))]
    new = [run("timed", arm, repeat, ms=ms) for repeat in (0, 1) for arm, ms in (("native", 20.0), ("remap", 30.0))]
    runs = inside.load(
        file(tmp_path / "a.jsonl", machine("one"), *old), file(tmp_path / "b.jsonl", machine("two"), *new)
    )
    assert [one["ms"] for one in runs.of("timed", arm="native")] == [20.0, 20.0]
    # A ratio over the newest native would be 0.55.
    caching, remap = (inside.ratio(runs, "timed", "gpt2", arm) for arm in ("caching", "remap"))
    assert caching is not None
    assert caching[0] == pytest.approx(1.1)
    assert remap is not None
    assert remap[0] == pytest.approx(1.5)
    assert inside.driver(runs.machines[0]) == "580.1"


def test_session_spans_calls_and_its_last_run_counts(tmp_path: Path) -> None:
    one = file(
        tmp_path / "a.jsonl", machine("one"), run("timed", "native", 0, ms=10.0), machine("one"),
        run("timed", "native", 0, ms=12.0), run("timed", "native", 1, ms=13.0), machine("one", host="b"),
        run("empty", "native", 0, ns=[1.0]),
    )  # fmt: skip
    runs = inside.load(one)
    assert [one["ms"] for one in runs.of("timed")] == [12.0, 13.0]
    assert len({one["session"] for one in runs.runs}) == 2


def test_run_beyond_its_limit_is_left_out_of_the_curve(tmp_path: Path) -> None:
    held = {"stats": {"reserved_bytes.all.peak": 110}}
    lines = [run("curve", "native", 0, ms=10.0, stats={})]
    lines += [run("curve", "remap", 0, over_active=1.1, limit=110, ms=11.0, **held)]
    lines += [run("curve", "stream-ordered", 0, over_active=1.0, limit=100, ms=10.0, **held)]
    lines += [run("curve", "remap", 0, over_active=1.0, limit=100, status="oom", stats={})]
    runs = inside.load(file(tmp_path / "a.jsonl", machine("one"), *lines))
    assert inside.curve(runs, "gpt2", "remap") == [inside.Point(1.0, None), inside.Point(1.1, 11.0)]
    assert inside.over_unlimited(runs, "gpt2", "remap") == {1.1: 1.1}
    assert inside.curve(runs, "gpt2", "stream-ordered") == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path / "a.jsonl", {"kind": "machine"}, {"id": "of something else"})
    with pytest.raises(AnalysisError, match=r"a\.jsonl: line 2"):
        inside.load(path)
