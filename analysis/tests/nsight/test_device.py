"""The device's idle time, gaps between kernels, memory by place, pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nsight.exports import OTHER_THREAD, THREAD, Export, training
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight import allocator, attribute, device, load, timeline


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "capture.sqlite")


def test_idle_time_goes_to_what_the_host_did(export: Export) -> None:
    export.kernel("a", (0, 5), (10, 100))
    export.call("cuMemFree_v2", 50, 130)
    export.call("cuMemAlloc_v2", 140, 200)
    export.call("cuMemAlloc_v2", 150, 160, thread=OTHER_THREAD)  # not of the thread that launches next
    export.insert("PROFILER_OVERHEAD", start=205, end=215, globalTid=THREAD)
    export.kernel("b", (240, 245), (250, 300))
    capture = load(export.done())
    (gap,) = device.gpu_idle(capture)
    assert (gap.start, gap.end) == (100, 250)
    expected = {"mem_free": 30, "mem_alloc": 60, device.PROFILER: 10, device.HOST_CODE: 40, device.ARRIVING: 10}
    assert gap.parts == expected
    assert sum(gap.parts.values()) == gap.duration
    assert gap.cause == "mem_alloc"
    assert device.idle_by_cause([gap])[0].cause == "mem_alloc"


def test_streams_are_merged(export: Export) -> None:
    export.kernel("a", (0, 1), (10, 100), stream=7)
    export.kernel("b", (2, 3), (50, 200), stream=8)
    export.kernel("c", (4, 5), (210, 300), stream=7)
    capture = load(export.done())
    assert [(gap.start, gap.end, gap.parts) for gap in device.gpu_idle(capture)] == [(200, 210, {device.ARRIVING: 10})]
    assert device.busy_ns(capture) == 190 + 90


def test_gaps_and_latencies_are_of_a_stream(export: Export) -> None:
    export.kernel("a", (0, 1), (10, 100), stream=7)
    export.kernel("b", (2, 3), (50, 200), stream=8)
    export.kernel("a", (40, 45), (110, 120), stream=7)
    rows = {row.name: row for row in device.launch_gaps(load(export.done()))}
    assert (rows["a"].count, rows["a"].total_ns, rows["a"].median_gap_ns, rows["a"].behind) == (2, 100, 10, 1)
    assert rows["a"].median_latency_ns == (10 + 70) // 2
    assert rows["b"].median_gap_ns is None


def test_memory_by_place(tmp_path: Path) -> None:
    places = {place.path: place for place in allocator.by_place(attribute(load(training(tmp_path / "x.sqlite"))))}
    place = places["epoch/step/forward/layer 1"]
    assert place.operations == 25
    assert place.operations_ns == 25 * 170
    assert place.marks == {"driver_free": 25}
    assert place.calls == {"cuMemAlloc": 25, "cuMemFree": 50}
    assert place.blocked_ns == 25 * 156


def test_a_window_of_one_step(tmp_path: Path) -> None:
    shown = timeline.window(attribute(load(training(tmp_path / "x.sqlite"))), (3, 3))
    assert shown.title == "step 3"
    assert shown.length == 900
    assert timeline.caption(shown) == "step 3: 0.9 µs, 0.16 µs of them waiting inside driver calls"
    assert [[bar.text for bar in lane] for lane in shown.ranges] == [
        ["epoch 1"], ["step 3"], ["forward"], ["layer 1"], ["relu", "free 4 KiB"]
    ]  # fmt: skip
    assert [(bar.text, bar.waited) for bar in shown.calls] == [
        ("cuLaunchKernel", 0), ("cuMemAlloc", 0), ("cuMemFree", 156), ("cuMemFree", 0)
    ]  # fmt: skip
    assert [(bar.start, bar.end, bar.group) for bar in shown.work["stream 7"]] == [(20, 200, "forward")]
    assert shown.waits == [(200, 206, 2)]


def test_steps_that_are_not_there_are_refused(tmp_path: Path) -> None:
    result = attribute(load(training(tmp_path / "x.sqlite")))
    with pytest.raises(AnalysisError, match="holds 25 steps"):
        timeline.window(result, (25, 26))
    with pytest.raises(AnalysisError, match="A\\.\\.B"):
        timeline.parse_steps("3-4")
    assert timeline.parse_steps("3..4") == (3, 4)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_the_same_each_time(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    result = attribute(load(training(tmp_path / "x.sqlite")))
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        timeline.save(timeline.draw(result, (2, 3), title="two steps"), file)
        timeline.save(timeline.draw_windows([timeline.window(result, (2, 2))] * 2, ["", "again"]), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(files[0].read_bytes()) > 5000
