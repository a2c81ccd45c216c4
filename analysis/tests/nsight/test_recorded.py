"""Recorded captures of training steps, and the logs of the same processes."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vramlab_analysis.errors import AnalysisError, read_bytes
from vramlab_analysis.experiments import newest
from vramlab_analysis.nsight import Attribution, attribute, load, names, own_trace
from vramlab_analysis.nsight.__main__ import main
from vramlab_analysis.nsight.own_trace import OwnCall, OwnTrace

ROOT = newest("nsight")
FOLDERS = sorted(folder.name for folder in ROOT.iterdir() if folder.is_dir())
WITH_RANGES = [name for name in FOLDERS if "2048" not in name]


@cache
def recorded(name: str) -> Attribution:
    return attribute(load(ROOT / name))


def test_every_backend_is_there() -> None:
    kinds = {f"{alloc}-sync-{sync}" for alloc in ("naive", "caching", "stream-ordered") for sync in ("never", "step")}
    assert kinds <= set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_capture_and_own_trace_agree(name: str) -> None:
    """Within 10 % by kind of call, where the kind takes 1 % of the span; else within half a percent of the span."""
    rows = own_trace.agree(recorded(name), own_trace.read(ROOT / name))
    assert rows
    for row in rows:
        if row.blocked_ns >= 0.01 * row.span_ns:
            assert abs(row.difference) <= 0.10, row
            assert row.same_work >= 0.90, row
        else:
            assert abs(row.own_ns - row.blocked_ns) <= 0.005 * row.span_ns, row


@pytest.mark.parametrize("name", FOLDERS)
def test_where_both_see_a_wait_it_is_for_the_same_launch(name: str) -> None:
    result, own = recorded(name), own_trace.read(ROOT / name)
    of_own = dict(own_trace.pair(result.capture, own))
    launches = {one.call: one.launch for one in own_trace.attribute(own)}
    for one in result.blocked:
        mine = launches.get(of_own.get(one.call, -1))
        if mine is not None:
            queued_by = result.capture.work[one.work].call
            assert queued_by is not None
            assert of_own[queued_by] == mine


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("naive")])
def test_a_free_waits_and_an_allocation_does_not(name: str) -> None:
    evidence = recorded(name).evidence
    free, alloc = evidence["cuMemFree"], evidence["cuMemAlloc"]
    # Enough frees with work outstanding to tell by.
    assert free.outstanding > free.calls / 4
    assert free.returned_before == 0
    assert alloc.returned_before > 400
    assert (free.waits_for, free.grounds) == (names.DEVICE, "seen")
    assert (alloc.waits_for, alloc.grounds) == (names.NOTHING, "seen")


@pytest.mark.parametrize("name", [name for name in FOLDERS if not name.startswith("naive")])
def test_pools_do_not_wait(name: str) -> None:
    for call, one in recorded(name).evidence.items():
        if one.kind in names.MEMORY_KINDS:
            assert one.waited == 0, call


@pytest.mark.parametrize("name", WITH_RANGES)
def test_ranges_nest_as_promised(name: str) -> None:
    capture = recorded(name).capture
    assert list(capture.threads.values()) == ["trainer"]
    assert len(capture.steps) == 61
    kernels = {work.name for work in capture.work}
    depths: Counter[str] = Counter()
    for one in capture.ranges:
        parts = one.path.split("/")
        depths[one.text.split(" ")[0]] += 1
        assert parts[0] == "epoch 1"
        if len(parts) > 1 and parts[1] != "end of capture":
            assert parts[1].startswith("step ")
        if len(parts) > 3 and parts[2] in ("forward", "backward"):
            assert parts[3].startswith("layer ") or parts[3].startswith(("alloc ", "free ")) or parts[3] in kernels
        if one.text in kernels or one.text.startswith(("alloc ", "free ")):
            assert len(parts) >= 3
    assert depths["forward"] == depths["backward"] == depths["update"] == 61
    assert depths["layer"] == 61 * 8
    # Every launch lies in the range that bears the kernel's name.
    for work in capture.work:
        assert capture.launch_path(work).endswith("/" + work.name)


@pytest.mark.parametrize("name", WITH_RANGES)
def test_own_paths_are_those_of_nvtx(name: str) -> None:
    """But for the ranges of single allocations, which the own trace leaves out."""
    result, own = recorded(name), own_trace.read(ROOT / name)
    for call, other in own_trace.pair(result.capture, own):
        parts = result.capture.calls[call].path.split("/")
        if parts[-1].startswith(("alloc ", "free ")):
            parts.pop()
        assert "/".join(parts) == own.calls[other].path


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_of_the_machine_is_kept(name: str) -> None:
    for file in (ROOT / name).iterdir():
        text = read_bytes(file).decode()
        for word in ("/home", "/root", "/tmp", "/work", "LD_LIBRARY", "hostname", "uuid"):
            assert word not in text, (file, word)


def test_all_tables_of_a_recorded_capture(capsys: Any) -> None:
    assert main([str(ROOT / "naive-sync-never"), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert {"calls", "blocked_calls", "waited_for", "agreement", "gpu_idle", "launch_gaps", "allocator"} <= set(tables)


def own(*calls: tuple[str, int, int, int | None]) -> OwnTrace:
    """Calls as name, start, duration, stream."""
    return OwnTrace(
        [OwnCall(start, took, 0, name, None, None, stream, False, "") for name, start, took, stream in calls]
    )


def test_own_trace_knows_idle_calls_by_logic() -> None:
    trace = own(
        ("kernel_launch", 0, 5, 1), ("mem_free", 10, 100, None), ("mem_free", 120, 4, None),
        ("mem_alloc", 130, 50, None), ("mem_free", 190, 4, None), ("kernel_launch", 200, 5, 1),
        ("mem_free", 210, 54, None),
    )  # fmt: skip
    assert [(one.call, one.launch, one.blocked_ns) for one in own_trace.attribute(trace)] == [(1, 0, 96), (6, 5, 50)]


def test_own_trace_keeps_streams_apart() -> None:
    trace = own(
        ("kernel_launch", 0, 5, 1), ("kernel_launch", 10, 5, 2), ("stream_synchronize", 20, 90, 1),
        ("stream_synchronize", 120, 4, 1), ("mem_free", 130, 70, None), ("mem_free", 210, 6, None),
    )  # fmt: skip
    found = [(one.call, one.launch, one.blocked_ns) for one in own_trace.attribute(trace)]
    assert found == [(2, 0, 86), (4, 1, 64)]


def test_a_record_of_another_run_is_refused(tmp_path: Path) -> None:
    capture = recorded("naive-sync-never").capture
    other = own_trace.read(ROOT / "caching-sync-never")
    with pytest.raises(AnalysisError, match="not of the same run"):
        own_trace.pair(capture, other)
    with pytest.raises(AnalysisError, match=r"driver_calls\.jsonl"):
        own_trace.read(tmp_path)


def test_a_record_is_cut_to_the_captured_steps(tmp_path: Path) -> None:
    lines = [
        {
            "start_ns": at,
            "total_ns": 5,
            "blocked_ns": 0,
            "call": call,
            "addr": addr,
            "bytes": 4096,
            "path": path,
            "ok": True,
        }
        for at, call, addr, path in (
            (0, "mem_alloc", 0x200000, "epoch 1/step 1"),
            (10, "mem_alloc", 0x201000, "epoch 1/step 2"),
            (20, "mem_free", 0x200000, "epoch 1/step 2/update"),
            (30, "mem_free", 0x201000, "epoch 1/step 3"),
            (40, "mem_alloc", 0x201000, "epoch 1/step 4"),
        )
    ]
    (tmp_path / "driver_calls.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"allocator": "naive", "profile_steps": {"first": 2, "last": 3}}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": settings, "blocked_method": "exact"}))
    calls = own_trace.read(tmp_path).calls
    # The page was held before, and is given back by the last free.
    assert [(call.start, call.pages) for call in calls] == [(10, False), (20, False), (30, True)]
    # Steps of one launch share a range.
    for line, path in zip(lines, ("step 1", "steps 2 to 9", "steps 2 to 9", "steps 10 to 17", "step 18"), strict=True):
        line["path"] = f"epoch 1/{path}/graph of 8 steps"
    (tmp_path / "driver_calls.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings["profile_steps"] = {"first": 2, "last": 17}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": settings, "blocked_method": "exact"}))
    assert [call.start for call in own_trace.read(tmp_path).calls] == [10, 20, 30]
    settings["profile_steps"] = {"first": 3, "last": 17}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": settings, "blocked_method": "exact"}))
    with pytest.raises(AnalysisError, match="no step 3"):
        own_trace.read(tmp_path)
    (tmp_path / "driver_calls.jsonl").write_text("{}\n")
    with pytest.raises(AnalysisError, match="line 1"):
        own_trace.read(tmp_path)
