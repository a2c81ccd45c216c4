"""Recorded captures of training steps, the logs of the same processes, and their pictures."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from vramlab_analysis import captures, driver_trace, repository
from vramlab_analysis.captures import Capture
from vramlab_analysis.driver_trace import OwnCall, OwnTrace
from vramlab_analysis.errors import AnalysisError, read_bytes
from vramlab_analysis.experiments import newest
from vramlab_analysis.plots import timeline

ROOT = newest("nsight")
FOLDERS = sorted(folder.name for folder in ROOT.iterdir() if folder.is_dir())
WITH_RANGES = [name for name in FOLDERS if "2048" not in name]


def recorded(name: str) -> Capture:
    if not (repository.built("vramlab") or shutil.which("vramlab")):
        pytest.skip("the program vramlab is not built")
    return captures.load(ROOT / name)


def test_every_backend_is_there() -> None:
    kinds = {f"{alloc}-sync-{sync}" for alloc in ("naive", "caching", "stream-ordered") for sync in ("never", "step")}
    assert kinds <= set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_capture_and_driver_trace_agree(name: str) -> None:
    """Within 10 % by kind of call, where the kind takes 1 % of the span; else within half a percent of the span."""
    rows = driver_trace.agree(recorded(name), driver_trace.read(ROOT / name))
    assert rows
    for row in rows:
        if row.blocked_ns >= 0.01 * row.span_ns:
            assert abs(row.difference) <= 0.10, row
            assert row.same_work >= 0.90, row
        else:
            assert abs(row.own_ns - row.blocked_ns) <= 0.005 * row.span_ns, row


@pytest.mark.parametrize("name", FOLDERS)
def test_where_both_record_a_wait_it_is_for_the_same_launch(name: str) -> None:
    capture, own = recorded(name), driver_trace.read(ROOT / name)
    of_own = dict(driver_trace.pair(capture, own))
    launches = {one.call: one.launch for one in driver_trace.attribute(own)}
    for index, call in enumerate(capture.calls):
        launch = launches.get(of_own.get(index, -1))
        if launch is not None and call["waited_for"] is not None:
            assert of_own[capture.work[call["waited_for"]]["call"]] == launch


@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("naive")])
def test_a_free_waits_and_an_allocation_does_not(name: str) -> None:
    rows = {row["call"]: row for row in recorded(name).table("calls")}
    free, alloc = rows["cuMemFree"], rows["cuMemAlloc"]
    # Enough frees with work outstanding to judge by.
    assert free["outstanding"] > free["count"] / 4
    assert free["returned_before"] == 0
    assert alloc["returned_before"] > 400
    assert (free["waits_for"], free["grounds"]) == ("device", "seen")
    assert (alloc["waits_for"], alloc["grounds"]) == ("nothing", "seen")


@pytest.mark.parametrize("name", [name for name in FOLDERS if not name.startswith("naive")])
def test_pools_do_not_wait(name: str) -> None:
    for row in recorded(name).table("calls"):
        if row["kind"].startswith(("mem_", "host_", "pool_")):
            assert row["waited"] == 0, row


@pytest.mark.parametrize("name", WITH_RANGES)
def test_ranges_of_the_trainer_nest(name: str) -> None:
    capture = recorded(name)
    assert list(capture.document["rows"]["threads"].values()) == ["trainer"]
    assert len(capture.steps) == capture.document["steps"] == 61
    kernels = {work["name"] for work in capture.work}
    counts = Counter(row["text"].split(" ")[0] for row in capture.ranges)
    assert counts["forward"] == counts["backward"] == counts["update"] == 61
    assert counts["layer"] == 61 * 8
    for row, path in zip(capture.ranges, capture.paths, strict=True):
        parts = path.split("/")
        assert parts[0] == "epoch 1"
        assert len(parts) < 2 or parts[1].startswith(("step ", "end of capture"))
        if len(parts) > 3 and parts[2] in ("forward", "backward"):
            assert parts[3].startswith(("layer ", "alloc ", "free ")) or parts[3] in kernels
        if row["text"] in kernels or row["text"].startswith(("alloc ", "free ")):
            assert len(parts) >= 3
    # Every launch is in the range that has the kernel's name.
    assert all(capture.launch_path(work).endswith("/" + work["name"]) for work in capture.work)


@pytest.mark.parametrize("name", WITH_RANGES)
def test_paths_of_the_log_are_those_of_nvtx(name: str) -> None:
    """Except the ranges of single allocations, which the log leaves out."""
    capture, own = recorded(name), driver_trace.read(ROOT / name)
    for call, other in driver_trace.pair(capture, own):
        parts = capture.path_of(capture.calls[call]).split("/")
        if parts[-1].startswith(("alloc ", "free ")):
            parts.pop()
        assert "/".join(parts) == own.calls[other].path


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_of_the_machine_is_kept(name: str) -> None:
    for file in (ROOT / name).iterdir():
        text = read_bytes(file).decode()
        for word in ("/home", "/root", "/tmp", "/work", "LD_LIBRARY", "hostname", "uuid"):
            assert word not in text, (file, word)


def own(*calls: tuple[str, int, int, int | None]) -> OwnTrace:
    """Calls as name, start, duration, stream."""
    return OwnTrace(
        [OwnCall(start, took, 0, name, None, None, stream, False, "") for name, start, took, stream in calls]
    )


def test_driver_trace_knows_idle_calls_by_logic() -> None:
    trace = own(
        ("kernel_launch", 0, 5, 1), ("mem_free", 10, 100, None), ("mem_free", 120, 4, None),
        ("mem_alloc", 130, 50, None), ("mem_free", 190, 4, None), ("kernel_launch", 200, 5, 1),
        ("mem_free", 210, 54, None),
    )  # fmt: skip
    assert [(one.call, one.launch, one.blocked_ns) for one in driver_trace.attribute(trace)] == [(1, 0, 96), (6, 5, 50)]


def test_driver_trace_keeps_streams_apart() -> None:
    trace = own(
        ("kernel_launch", 0, 5, 1), ("kernel_launch", 10, 5, 2), ("stream_synchronize", 20, 90, 1),
        ("stream_synchronize", 120, 4, 1), ("mem_free", 130, 70, None), ("mem_free", 210, 6, None),
    )  # fmt: skip
    found = [(one.call, one.launch, one.blocked_ns) for one in driver_trace.attribute(trace)]
    assert found == [(2, 0, 86), (4, 1, 64)]


def test_a_record_of_another_run_is_refused(tmp_path: Path) -> None:
    capture = recorded("naive-sync-never")
    other = driver_trace.read(ROOT / "caching-sync-never")
    with pytest.raises(AnalysisError, match="not of the same run"):
        driver_trace.pair(capture, other)
    with pytest.raises(AnalysisError, match=r"driver_calls\.jsonl"):
        driver_trace.read(tmp_path)


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
    calls = driver_trace.read(tmp_path).calls
    # The page was held before, and is given back by the last free.
    assert [(call.start, call.pages) for call in calls] == [(10, False), (20, False), (30, True)]
    # Steps of one launch share a range.
    for line, path in zip(lines, ("step 1", "steps 2 to 9", "steps 2 to 9", "steps 10 to 17", "step 18"), strict=True):
        line["path"] = f"epoch 1/{path}/graph of 8 steps"
    (tmp_path / "driver_calls.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings["profile_steps"] = {"first": 2, "last": 17}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": settings, "blocked_method": "exact"}))
    assert [call.start for call in driver_trace.read(tmp_path).calls] == [10, 20, 30]
    settings["profile_steps"] = {"first": 3, "last": 17}
    (tmp_path / "summary.json").write_text(json.dumps({"settings": settings, "blocked_method": "exact"}))
    with pytest.raises(AnalysisError, match="no step 3"):
        driver_trace.read(tmp_path)
    (tmp_path / "driver_calls.jsonl").write_text("{}\n")
    with pytest.raises(AnalysisError, match="line 1"):
        driver_trace.read(tmp_path)


def small() -> Capture:
    """A step in which a free waits for a kernel, between two others of other lengths."""

    def row(start: int, length: int, **others: object) -> dict[str, object]:
        return {"start_ns": start, "duration_ns": length, **others}

    calls = [
        row(110, 10, call="cuLaunchKernel", kind="kernel_launch", range=3, waited_for=None),
        row(150, 160, call="cuMemFree", kind="mem_free", range=2, waited_for=0, waited_ns=150, blocked_ns=156),
        row(1300, 5, call="cuMemFree", kind="mem_free", range=None, waited_for=None),
    ]
    work = [row(120, 180, name="relu", stream=7, call=0)]
    ranges = [
        row(0, 50, text="step 1", level=0, parent=None),
        row(100, 900, text="step 2", level=0, parent=None),
        row(100, 400, text="forward", level=1, parent=1),
        row(100, 30, text="relu", level=2, parent=2),
        row(1100, 5000, text="step 3", level=0, parent=None),
    ]
    rows = {"calls": calls, "work": work, "ranges": ranges, "streams": {"7": "compute"}, "threads": {}}
    return Capture("small", {"span_ns": 6100, "rows": rows})


def test_a_picture_shows_the_step_of_median_duration() -> None:
    shown = timeline.window(small())
    assert (shown.title, shown.length) == ("step 2", 900)
    assert timeline.caption(shown) == "step 2: 0.9 µs, 0.16 µs of them waiting inside driver calls"
    assert [[bar.text for bar in lane] for lane in shown.ranges] == [["step 2"], ["forward"], ["relu"]]
    assert [(bar.text, bar.waited) for bar in shown.calls] == [("cuLaunchKernel", 0), ("cuMemFree", 156)]
    assert [(bar.start, bar.end, bar.group) for bar in shown.work["compute"]] == [(20, 200, "forward")]
    assert shown.waits == [(200, 206)]
    figure = timeline.draw_windows([shown] * 2, ["", "again"])
    assert [axes.get_title("left") for axes in figure.axes] == [timeline.caption(shown), "again"]


def test_the_log_of_a_run_may_be_beside_the_tables(tmp_path: Path) -> None:
    (tmp_path / "capture.json").write_text('{"schema_version": 1}')
    line = {"start_ns": 1, "total_ns": 2, "blocked_ns": 0, "call": "mem_free", "path": ""}
    (tmp_path / "driver_calls.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"settings": {}, "blocked_method": "exact"}))
    assert [call.start for call in driver_trace.read(tmp_path).calls] == [1]


def test_without_the_program_one_line_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "built", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AnalysisError, match=r"^captures are read by .* cargo build [^\n]*$"):
        captures.load(tmp_path / "x.sqlite")


def test_the_refusal_of_the_program_is_one_line(tmp_path: Path) -> None:
    recorded("naive-sync-never")
    with pytest.raises(AnalysisError, match=r"x\.sqlite: [^\n]*$"):
        captures.load(tmp_path / "x.sqlite")
