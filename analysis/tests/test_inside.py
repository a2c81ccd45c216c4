"""Runs inside real programs: the sessions that count, and the base of comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_experiment
from vramlab_analysis import inside
from vramlab_analysis.errors import AnalysisError


def machine(build: str, host: str = "a") -> dict[str, Any]:
    facts = {"gpu": "NVIDIA H100", "driver": "580.1\n580.1", "torch": "2.11.0", "at": "2026-11-25T00:00:00Z"}
    return {"kind": "machine", "build": build, "provenance": {"host_hash": host}, **facts}


def run(part: str, arm: str, repeat: int, **told: Any) -> dict[str, Any]:
    limit = f" at {told['over_active']}" if "over_active" in told else ""
    return {"id": f"{part} gpt2 {arm}{limit} #{repeat}", "part": part, "program": "gpt2", "arm": arm, "repeat": repeat,
            "status": "ok", **told}  # fmt: skip


def test_an_arm_is_compared_with_native_of_its_own_session() -> None:
    old = [run("timed", arm, repeat, ms=ms) for repeat in (0, 1) for arm, ms in (("native", 10.0), ("caching", 11.0))]
    new = [run("timed", arm, repeat, ms=ms) for repeat in (0, 1) for arm, ms in (("native", 20.0), ("remap", 30.0))]
    runs = inside.joined([machine("one"), *old, machine("two"), *new])
    assert [one["ms"] for one in runs.of("timed", arm="native")] == [20.0, 20.0]
    # A ratio over the newest native would be 0.55.
    caching, remap = (inside.ratio(runs, "timed", "gpt2", arm) for arm in ("caching", "remap"))
    assert caching is not None
    assert caching[0] == pytest.approx(1.1)
    assert remap is not None
    assert remap[0] == pytest.approx(1.5)
    assert inside.driver(runs.machines[0]) == "580.1"


def test_session_spans_calls_and_its_last_run_counts() -> None:
    runs = inside.joined([
        machine("one"), run("timed", "native", 0, ms=10.0), machine("one"),
        run("timed", "native", 0, ms=12.0), run("timed", "native", 1, ms=13.0), machine("one", host="b"),
        run("empty", "native", 0, ns=[1.0]),
    ])  # fmt: skip
    assert [one["ms"] for one in runs.of("timed")] == [12.0, 13.0]
    assert len({one["session"] for one in runs.runs}) == 2


def test_machines_of_one_build_are_joined_and_each_compares_with_itself() -> None:
    within = {"over_active": 1.1, "limit": 110, "stats": {}}
    lines = []
    # The second machine is half as fast. The third has no native.
    for host, ms in (("a", 10.0), ("b", 20.0), ("c", 99.0)):
        lines += [machine("one", host)]
        lines += [run(part, "native", 0, ms=ms, device_ms=[ms] * 4, stats={}) for part in ("timed", "curve")]
        times = [3 * ms, ms, ms, ms]
        lines += [run("timed", "remap", 0, ms=1.1 * ms), run("curve", "remap", 0, ms=ms, device_ms=times, **within)]
    lines = [one for one in lines if one.get("ms") != 99.0 or one["arm"] == "remap"]
    runs = inside.joined(lines)
    assert len(runs.of("timed", arm="remap")) == 3
    assert inside.ratio(runs, "timed", "gpt2", "remap") == pytest.approx((1.1, 1.1, 1.1))
    assert inside.over_unlimited(runs, "gpt2", "remap") == {1.1: 1.0}
    there = inside.within(runs, "gpt2", "remap", 1.1)
    assert (there.runs, there.first, there.settled, there.mean) == (2, [3.0], 1.0, 1.5)
    assert (there.most, there.longest) == (1.5, 3.0)
    assert inside.slowest_step(runs, "gpt2", "remap") == 3.0


def test_run_beyond_its_limit_is_left_out_of_the_curve() -> None:
    held = {"stats": {"reserved_bytes.all.peak": 110}}
    lines = [run("curve", "native", 0, ms=10.0, stats={})]
    lines += [run("curve", "remap", 0, over_active=1.1, limit=110, ms=11.0, **held)]
    lines += [run("curve", "stream-ordered", 0, over_active=1.0, limit=100, ms=10.0, **held)]
    lines += [run("curve", "remap", 0, over_active=1.0, limit=100, status="oom", stats={})]
    runs = inside.joined([machine("one"), *lines])
    assert inside.curve(runs, "gpt2", "remap") == [inside.Point(1.0, None), inside.Point(1.1, 11.0)]
    assert inside.over_unlimited(runs, "gpt2", "remap") == {1.1: 1.1}
    assert inside.curve(runs, "gpt2", "stream-ordered") == []


def test_first_steps_count_in_the_mean_and_not_in_the_settled_step() -> None:
    lines = [run("curve", "native", 0, ms=10.0, device_ms=[12.0, 10.0, 10.0, 10.0], stats={})]
    some = {"over_active": 1.01, "limit": 101, "ms": 10.0, "stats": {}}
    lines += [run("curve", "remap", repeat, device_ms=[20.0, 30.0, 10.0, 10.0], **some) for repeat in (0, 1)]
    runs = inside.joined([machine("one"), *lines])
    there = inside.within(runs, "gpt2", "remap", 1.01)
    assert (there.steps, there.runs, there.first, there.settled) == (4, 2, [2.0, 3.0], 1.0)
    assert there.mean == pytest.approx(70 / 42)
    with pytest.raises(AnalysisError, match="no steps"):
        inside.within(runs, "gpt2", "remap", 1.1)
    lines += [run("curve", "remap", 2, device_ms=[10.0], **some)]
    runs = inside.joined([machine("one"), *lines])
    with pytest.raises(AnalysisError, match="different numbers of steps"):
        inside.within(runs, "gpt2", "remap", 1.01)


def test_a_limit_in_which_one_of_several_runs_had_no_memory_is_not_enough() -> None:
    within = {"over_active": 1.0, "limit": 100, "stats": {}}
    lines = [run("curve", "remap", repeat, ms=10.0 + repeat, **{**within, "over_active": 1.1}) for repeat in range(3)]
    lines += [run("curve", "remap", 0, ms=10.0, **within), run("curve", "remap", 1, status="oom", **within)]
    runs = inside.joined([machine("one"), *lines])
    assert inside.curve(runs, "gpt2", "remap") == [inside.Point(1.0, None), inside.Point(1.1, 11.0)]


def test_a_build_with_changed_sources_is_called_dirty() -> None:
    commit = "0123456789abcdef"
    facts = machine(commit)
    assert inside.build(facts | {"provenance": {"git_commit": commit, "git_dirty": True}}) == "01234567-dirty"
    # The provenance is of other sources than the build.
    assert inside.build(facts | {"provenance": {"git_commit": "f" * 16, "git_dirty": True}}) == "01234567"
    assert inside.build({"kind": "machine"}) == "unknown"


def test_an_experiment_has_its_runs_and_machines(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "inside-steps", [], name="inside-steps")
    planned = [("gpt2", "native", 0, "done"), ("varying", "remap", 1, "done"), ("gpt2", "bfc", 0, "failed")]
    for number, (program, arm, repeat, status) in enumerate(planned):
        path = folder / "runs" / f"{number:02}"
        path.mkdir(parents=True)
        meta = {"schema_version": 1, "id": path.name, "arm": "main", "program": "inside", "repeat": repeat,
                "status": status, "error": "no luck", "started_at": f"2026-12-01T00:00:0{number}Z",
                "options": {"program": program, "alloc": arm}, "provenance": machine("one")["provenance"]}  # fmt: skip
        (path / "run.json").write_text(json.dumps(meta))
        if status == "done":
            (path / "result.json").write_text(
                json.dumps({"gpu": "NVIDIA H100", "torch": "2.11", "oom": None, "ms": 5.0})
            )
    runs = inside.load(folder)
    assert [(one["part"], one["id"], one["status"]) for one in runs.runs] == [
        ("timed", "timed gpt2 native #0", "ok"),
        ("passes", "passes varying remap #1", "ok"),
        ("timed", "timed gpt2 bfc #0", "failed"),
    ]
    assert len(runs.machines) == 1
    assert {one["session"][0] for one in runs.runs} == {"NVIDIA H100"}


def test_a_limit_of_an_experiment_is_a_point_of_a_curve(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "inside-limits", [], name="inside-limits")
    for number, (limit, oom) in enumerate(((1.2, None), (1.0, "out of memory"))):
        path = folder / "runs" / f"{number:02}"
        path.mkdir(parents=True)
        meta = {"schema_version": 1, "id": path.name, "arm": "main", "program": "inside", "repeat": 0, "status": "done",
                "options": {"program": "gpt2", "alloc": "remap", "limit-over-active": limit},
                "started_at": "2026-12-01T00:00:00Z", "provenance": {}}  # fmt: skip
        (path / "run.json").write_text(json.dumps(meta))
        result: dict[str, Any] = {
            "gpu": "NVIDIA H100",
            "torch": "2.11",
            "oom": oom,
            "ms": 5.0,
            "limit": 100,
            "stats": {},
        }
        (path / "result.json").write_text(json.dumps(result))
    runs = inside.load(folder)
    assert inside.curve(runs, "gpt2", "remap") == [inside.Point(1.0, None), inside.Point(1.2, 5.0)]
