"""Attribution of waits, on captures made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nsight.exports import NEW, OLD, OTHER_THREAD, THREAD, Export, training
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight import Attribution, allocator, attribute, device, load, names, timeline


def waits(path: Path) -> list[tuple[object, ...]]:
    rows = attribute(load(path)).rows()
    return [(row["call"], row["waited_for"], row["waited_ns"]) for row in rows]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "capture.sqlite")


@pytest.mark.parametrize(
    ("name", "base", "kind", "scope"),
    [
        ("cuMemFree_v2", "cuMemFree", "mem_free", names.DEVICE),
        ("cudaFree_v3020", "cudaFree", "mem_free", names.DEVICE),
        ("cuMemAlloc_v2", "cuMemAlloc", "mem_alloc", names.NOTHING),
        ("cudaMalloc_v3020", "cudaMalloc", "mem_alloc", names.NOTHING),
        ("cuMemAllocFromPoolAsync_ptsz", "cuMemAllocFromPoolAsync", "mem_alloc_async", names.NOTHING),
        ("cudaFreeAsync_v11020", "cudaFreeAsync", "mem_free_async", names.NOTHING),
        ("cuLaunchKernel_ptsz", "cuLaunchKernel", "kernel_launch", names.ROOM),
        ("cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC", "kernel_launch", names.ROOM),
        ("cudaStreamSynchronize_v3020", "cudaStreamSynchronize", "stream_synchronize", names.STREAM),
        ("cuCtxSynchronize", "cuCtxSynchronize", "device_synchronize", names.DEVICE),
        ("cudaDeviceSynchronize_v3020", "cudaDeviceSynchronize", "device_synchronize", names.DEVICE),
        ("cuMemcpyDtoH_v2", "cuMemcpyDtoH", "copy_to_host", names.OWN),
        ("cuMemcpyDtoHAsync_v2_ptsz", "cuMemcpyDtoHAsync", "copy_to_host", names.NOTHING),
        ("cudaMemcpy_v3020", "cudaMemcpy", "copy", names.OWN),
        ("cuFuncGetAttribute", "cuFuncGetAttribute", "cuFuncGetAttribute", names.NOTHING),
    ],
)
def test_calls_of_both_apis_have_one_name(name: str, base: str, kind: str, scope: str) -> None:
    assert (names.base_name(name), names.kind(name), names.scope(name)) == (base, kind, scope)


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_free_waits_for_the_kernel_queued_before_it(tmp_path: Path, version: str) -> None:
    result = attribute(load(training(tmp_path / "x.sqlite", version)))
    assert len(result.blocked) == 25
    row = result.row(result.blocked[3])
    assert row["call"] == "cuMemFree"
    assert row["bytes"] == 4096
    assert (row["waited_ns"], row["blocked_ns"]) == (150, 156)
    assert row["waited_for"] == "relu"
    assert row["path"] == "epoch 1/step 4/forward/layer 1/free 4 KiB"
    assert row["launch_path"] == "epoch 1/step 4/forward/layer 1/relu"
    assert row["launched_ns"] == 3000
    free, alloc = result.evidence["cuMemFree"], result.evidence["cuMemAlloc"]
    assert (free.calls, free.outstanding, free.returned_before, free.waits_for) == (50, 25, 0, names.DEVICE)
    assert (free.idle_calls, free.idle_cost_ns) == (25, 4)
    assert (alloc.outstanding, alloc.returned_before, alloc.waits_for, alloc.grounds) == (25, 25, names.NOTHING, "seen")


def test_observation_outweighs_documentation(export: Export) -> None:
    for at in range(0, 25_000, 1000):
        export.kernel("k", (at, at + 5), (at + 10, at + 500))
        export.call("cuMemFree_v2", at + 20, at + 30)  # returns while the kernel runs
        export.call("cuOddCall", at + 40, at + 510)  # never returns before it ended
    result = attribute(load(export.done()))
    assert result.evidence["cuMemFree"].waits_for == names.NOTHING
    assert result.evidence["cuOddCall"].waits_for == names.DEVICE
    assert {row["call"] for row in result.rows()} == {"cuOddCall"}


def test_a_wait_for_one_stream_is_not_one_for_another(export: Export) -> None:
    export.kernel("long", (0, 5), (10, 900), stream=7)
    export.kernel("short", (6, 9), (12, 100), stream=8)
    export.sync(export.call("cuStreamSynchronize", 20, 110), 3, stream=8)
    assert waits(export.done()) == [("cuStreamSynchronize", "short", 80)]


def test_without_records_of_synchronising_a_stream_is_the_device(export: Export) -> None:
    export.kernel("k", (0, 5), (10, 100))
    export.call("cudaStreamSynchronize_v3020", 20, 110)
    capture = load(export.done())
    assert any("one for the device" in note or "taken for one" in note for note in capture.notes)
    assert [row["waited_ns"] for row in attribute(capture).rows()] == [80]


def test_an_event_used_again_is_two_events(tmp_path: Path) -> None:
    export = Export(tmp_path / "new.sqlite", NEW)
    export.kernel("first", (0, 2), (5, 100))
    export.record(export.call("cuEventRecord", 3, 4), 7, event=1, use=10)
    export.kernel("second", (5, 7), (100, 400))
    export.record(export.call("cuEventRecord", 8, 9), 7, event=1, use=11)
    export.sync(export.call("cuEventSynchronize", 20, 105), 1, event=1, use=10)
    assert waits(export.done()) == [("cuEventSynchronize", "first", 80)]


def test_a_device_wait_reaches_every_stream(export: Export) -> None:
    export.kernel("a", (0, 5), (10, 300), stream=7)
    export.kernel("b", (6, 9), (12, 100), stream=8, thread=OTHER_THREAD)
    export.call("cuCtxSynchronize", 20, 310)
    assert waits(export.done()) == [("cuCtxSynchronize", "a", 280)]


def test_copies_wait_for_themselves_when_the_host_must_have_them(export: Export) -> None:
    export.copy("cudaMemcpy_v3020", (0, 100), (20, 90))
    export.copy("cuMemcpyDtoHAsync_v2", (200, 300), (220, 290), host=0)
    export.copy("cuMemcpyDtoHAsync_v2", (400, 410), (404, 408), host=1)
    path = export.done()
    assert attribute(load(path)).evidence["cuMemcpyDtoHAsync"].waits_for == names.OWN
    assert waits(path) == [
        ("cudaMemcpy", "copy device to host", 90),
        ("cuMemcpyDtoHAsync", "copy device to host", 90),
    ]


def test_news_that_is_under_way_holds_a_call_up(export: Export) -> None:
    export.kernel("k", (0, 5), (10, 48))
    export.call("cuMemFree_v2", 50, 60)  # the kernel is over, but no wait has seen it
    export.call("cuMemFree_v2", 70, 74)
    result = attribute(load(export.done()))
    assert [(one.waited_ns, one.blocked_ns) for one in result.blocked] == [(0, 6)]


def test_a_long_return_is_work_of_the_call_itself(export: Export) -> None:
    for at, back in ((0, 6), (1000, 6), (2000, 60)):
        export.kernel("k", (at, at + 5), (at + 10, at + 100))
        export.call("cuMemFree_v2", at + 50, at + 100 + back)
        export.call("cuMemFree_v2", at + 300, at + 304)
    result = attribute(load(export.done()))
    assert [one.blocked_ns for one in result.blocked] == [52, 52, 52]
    assert [one.return_ns for one in result.blocked] == [6, 6, 60]


def test_a_launch_waits_when_the_queue_is_full(export: Export) -> None:
    for place in range(1010):
        launch = (place * 4, place * 4 + 3)
        if place == 1005:
            launch = (4020, 5500)
        elif place > 1005:
            launch = (5500 + place, 5503 + place)
        export.kernel("k", launch, (5000 + place * 100, 5090 + place * 100))
    # At 4020 all 1,005 are outstanding; those that ended inside the call are the kernels at 5000 to 5490.
    result = attribute(load(export.done()))
    assert [(one.waited_ns, one.return_ns) for one in result.blocked] == [(5490 - 4020, 10)]
    assert result.evidence["cuLaunchKernel"].waited == 1


def test_processes_do_not_mix(export: Export) -> None:
    export.kernel("k", (0, 5), (10, 100))
    export.call("cuCtxSynchronize", 20, 110, thread=(99 << 24) | 5)
    assert waits(export.done()) == []


def test_ranges_of_threads_do_not_mix(export: Export) -> None:
    export.range("mine", 0, 1000)
    export.range("theirs", 0, 1000, thread=OTHER_THREAD)
    export.insert(
        "NVTX_EVENTS",
        start=0,
        end=1000,
        eventType=60,
        text="process",
        globalTid=OTHER_THREAD,
        endGlobalTid=OTHER_THREAD,
    )
    export.call("cuCtxSynchronize", 20, 110)
    export.call("cuCtxSynchronize", 20, 110, thread=OTHER_THREAD)
    assert sorted(call.path for call in load(export.done()).calls) == ["mine", "theirs"]


def test_names_of_threads_and_streams(export: Export) -> None:
    export.nvtx(39, 0, "trainer")
    export.nvtx(99, 0, "compute", uint64Value=7)
    export.nvtx(99, 0, "some handle", uint64Value=0x55D0_1234_5678)
    export.kernel("k", (0, 1), (2, 3), stream=7)
    capture = load(export.done())
    assert list(capture.threads.values()) == ["trainer"]
    assert capture.streams == {7: "compute"}


def test_names_of_streams_may_have_a_table(export: Export) -> None:
    export.insert("TARGET_INFO_NVTX_CUDA_STREAM", name="compute", deviceId=0, contextId=1, streamId=13)
    export.kernel("k", (0, 1), (2, 3), stream=13)
    assert load(export.done()).streams == {13: "compute"}


def test_time_of_each_kind_adds_up(tmp_path: Path) -> None:
    result: Attribution = attribute(load(training(tmp_path / "x.sqlite")))
    for name, one in result.evidence.items():
        mine = [blocked for blocked in result.blocked if result.capture.calls[blocked.call].name == name]
        assert one.waited == len(mine)
        assert one.blocked_ns == sum(blocked.blocked_ns for blocked in mine)
        assert one.blocked_ns <= one.total_ns


# The device's idle time, gaps between kernels, memory by place, pictures.


def test_idle_time_is_attributed_to_host_activity(export: Export) -> None:
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
    with pytest.raises(AnalysisError, match="has 25 steps"):
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
