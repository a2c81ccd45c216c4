"""The requirements on an allocator under PyTorch. `test_torch.py` runs them in a process, on a GPU or a stand-in.

    python programs.py ALLOCATOR [NAME…]

No program fills or reads a tensor, so that no kernel is needed. Each prints a line of JSON: its name and its result.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vramlab.torch
from torch.cuda import memory
from vramlab import _build

MIB = 1 << 20
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a program for the command line."""
    PROGRAMS[run.__name__] = run
    return run


def held(size: int) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=torch.uint8)


def pools() -> set[tuple[int, int]]:
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} - {(0, 0)}


def inside(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    at = tensor.data_ptr()
    return any(one["address"] <= at < one["address"] + one["total_size"] for one in segments)


@program
def name() -> None:
    assert torch.cuda.get_allocator_backend() == f"vramlab:{vramlab.torch.allocator()}"
    vramlab.torch.use(ALLOCATOR)
    try:
        vramlab.torch.use("naive" if ALLOCATOR != "naive" else "caching")
    except vramlab.Error as error:
        assert "already" in str(error)
    else:
        raise AssertionError("a second allocator was taken")


@program
def statistics() -> None:
    torch.cuda.empty_cache()
    before, requested = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.current"]
    tensor = held(3 * MIB)
    assert torch.cuda.memory_allocated() >= before + 3 * MIB
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == requested + 3 * MIB
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() >= before + 3 * MIB
    del tensor
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == before
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert "CUDA memory summary" in torch.cuda.memory_summary()
    torch.cuda.mem_get_info()


@program
def no_bytes() -> None:
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert torch.cuda.caching_allocator_alloc(0) == 0


@program
def out_of_memory() -> None:
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *told: seen.append(told))
    before = torch.cuda.memory_stats()["num_ooms"]
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        assert abs(torch.cuda.get_per_process_memory_fraction() - 0.05) < 1e-9
        kept = held(1 << 30)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            held(40 << 30)
            raise AssertionError("no error")
        assert [(device, size) for device, size, _, _ in seen] == [(0, 40 << 30)]
        assert seen[0][2] < torch.cuda.get_device_properties(0).total_memory * 0.051
        assert torch.cuda.memory_stats()["num_ooms"] == before + 1
        # Smaller requests still succeed.
        held(MIB)
        del kept
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    try:
        held(1 << 59)
    except torch.cuda.OutOfMemoryError as error:
        assert "Tried to allocate 536870912.00 GiB. GPU 0 has a total capacity of" in str(error)
        assert "vramlab: " in str(error)
    try:
        torch.empty(1 << 61, device="cuda", dtype=torch.uint8)
    except torch.cuda.OutOfMemoryError as error:
        assert "more than 1EB" in str(error)
    torch.cuda.empty_cache()


@program
def a_limit_of_the_user() -> None:
    total = torch.cuda.mem_get_info()[1]
    vramlab.torch.set_limit(2 << 30)
    try:
        torch.cuda.set_per_process_memory_fraction(1.0)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            held(3 << 30)
            raise AssertionError("the program's fraction lifted the user's limit")
    finally:
        vramlab.torch.set_limit(None)
    held(total // 10)
    torch.cuda.empty_cache()


def _history(**more: Any) -> list[dict[str, Any]]:
    before = held(1000)
    memory._record_memory_history(max_entries=10_000, stacks="python", **more)
    try:
        kept = held(MIB)
        gone = held(30 * MIB)
        del gone, before
        used = held(2 * MIB)
        used.record_stream(torch.cuda.Stream())
        del used
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        snapshot = memory._snapshot()
        again = memory._snapshot()["device_traces"][0]
    finally:
        memory._record_memory_history(enabled=None)
    assert memory._snapshot()["device_traces"][0] == []
    frames = [
        [frame["name"] for frame in block.get("frames", [])]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["address"] == kept.data_ptr()
    ]
    assert [names[:2] for names in frames] == [["held", "_history"]], frames
    assert "snapshot" in [event["action"] for event in again]
    events: list[dict[str, Any]] = snapshot["device_traces"][0]
    return events


@program
def history() -> list[str]:
    events = _history()
    actions = [event["action"] for event in events]
    assert "snapshot" not in actions
    assert actions.count("alloc") == 3, actions
    # Each free was requested and completed, once, in that order.
    for address in {event["addr"] for event in events if event["action"] == "free_requested"}:
        of_block = [event["action"] for event in events if event["addr"] == address and "free" in event["action"]]
        of_block = [action for action in of_block if not action.startswith("segment")]
        assert of_block == ["free_requested", "free_completed"] * (len(of_block) // 2), of_block
    assert sorted(event["size"] for event in events if event["action"] == "free_completed") == [1000, 2 * MIB, 30 * MIB]
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)
    assert all(event["frames"] for event in events if event["action"] == "alloc")
    assert {event["compile_context"] for event in events} == {"N/A"}
    return actions


@program
def history_without_what_is_skipped() -> None:
    events = _history(skip_actions=["free_requested", "segment_alloc", "segment_map"])
    actions = {event["action"] for event in events}
    assert not actions & {"free_requested", "segment_alloc", "segment_map"}
    assert {"alloc", "free_completed"} <= actions


@program
def history_in_a_ring() -> None:
    memory._record_memory_history(max_entries=10, stacks="python")
    sizes = [1000 + number for number in range(50)]
    for size in sizes:
        held(size)
    events = memory._snapshot()["device_traces"][0]
    memory._record_memory_history(enabled=None)
    assert len(events) == 10
    assert [event["size"] for event in events if event["action"] == "alloc"] == sizes[-3:]
    assert events[-1]["action"] == "free_completed"
    assert events[-1]["size"] == sizes[-1]


@program
def frames_of_live_blocks_alone() -> None:
    torch.cuda.empty_cache()
    memory._record_memory_history(context="state", stacks="python")
    try:
        kept, gone = held(3 * MIB), held(3 * MIB)
        assert "frames_of_live" in json.dumps(memory._snapshot()["segments"])
        del kept, gone
        snapshot = memory._snapshot()
        assert len(snapshot["device_traces"][0]) >= 6
        assert "frames_of_live" not in json.dumps(snapshot)
    finally:
        memory._record_memory_history(enabled=None)


@program
def frames_of_blocks_that_outlive_their_recording() -> None:
    def names(tensor: torch.Tensor) -> list[list[str]]:
        blocks = [block for segment in memory._snapshot()["segments"] for block in segment["blocks"]]
        here = [block for block in blocks if block["address"] == tensor.data_ptr() and "active" in block["state"]]
        return [[frame["name"] for frame in block.get("frames", [])][:1] for block in here]

    memory._record_memory_history(stacks="python")
    kept = held(5 * MIB)
    memory._record_memory_history(enabled=None)
    other = held(5 * MIB)
    assert (names(kept), names(other)) == ([["held"]], [[]])
    # The next block at this address was allocated while the history was off.
    address = kept.data_ptr()
    del kept
    kept = held(5 * MIB)
    assert (kept.data_ptr(), names(kept)) == (address, [[]])


@program
def history_on_two_threads() -> None:
    memory._record_memory_history(max_entries=100_000, stacks="python")
    _threads()
    snapshot = memory._snapshot()
    memory._record_memory_history(enabled=None)
    for trace in snapshot["device_traces"]:
        live: dict[int, int] = {}
        for event in trace:
            if event["action"] == "alloc":
                assert event["addr"] not in live, "two owners of one block"
                live[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                live.pop(event["addr"], None)


def _threads() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.device(number % torch.cuda.device_count()), torch.cuda.stream(torch.cuda.Stream()):
                kept: list[torch.Tensor] = []
                for step in range(300):
                    kept.append(held(step * 7919 % 300_000 + 1))
                    if len(kept) > 20:
                        kept.pop(step * 31 % 20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@program
def threads() -> None:
    before = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    _threads()
    gc.collect()
    assert [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())] == before


@program
def mempool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = held(5 * MIB)
        assert pool.use_count() == 2
    outside = held(5 * MIB)
    assert inside(tensor, pool.snapshot())
    assert not inside(outside, pool.snapshot())
    assert pool.use_count() == 1
    del tensor
    before = torch.cuda.memory_reserved()
    del pool
    gc.collect()
    assert torch.cuda.memory_reserved() < before
    assert not pools()


@program
def mempool_of_last_resort() -> None:
    torch.cuda.empty_cache()
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        held(100 * MIB)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    try:
        tensor = held(90 * MIB)
        assert inside(tensor, pool.snapshot())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@program
def mempool_that_does_not_split() -> None:
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        first, second = held(1000), held(3 * MIB)
        third = held(1000)
        segments = {segment["address"]: len(segment["blocks"]) for segment in pool.snapshot()}
    # Each starts a CUDA allocation that has no other block.
    assert segments == {tensor.data_ptr(): 1 for tensor in (first, second, third)}, segments
    of_pool, at = tuple(pool.id), third.data_ptr()
    assert of_pool in pools()
    del third
    with torch.cuda.use_mem_pool(pool):
        assert held(2000).data_ptr() == at, "what is free serves again, as a whole"
    del first, second, pool
    gc.collect()
    assert of_pool not in pools()


@program
def mempool_of_another_allocator() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    other = "rmm-pool" if ALLOCATOR != "rmm-pool" else "caching"
    pool = vramlab.torch.MemPool(other)
    with pool:
        tensor = held(MIB)
    assert torch.cuda.memory_allocated() == before + MIB
    assert pool.stats()["allocator"] == other
    assert pool.stats()["stats"]["allocated_bytes.all.current"] == MIB
    assert inside(tensor, pool.snapshot())
    assert not inside(held(MIB), pool.snapshot())
    # A tensor may outlive its pool.
    del pool
    gc.collect()
    assert torch.cuda.memory_allocated() == before + MIB
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    assert not pools()
    for wrong in ("rmm-pol", "rmm-pool:what=1"):
        try:
            vramlab.torch.MemPool(wrong)
        except vramlab.Error as error:
            assert "rmm-pool" in str(error)
        else:
            raise AssertionError(wrong)


# No code reads its memory, so it need not be a GPU's.
OF_THE_PROGRAM = """
#include <cstdlib>
extern "C" void* take(size_t bytes, int, void*) {
    const size_t page = 2 << 20;
    return std::aligned_alloc(page, (bytes + page - 1) / page * page);
}
extern "C" void give_back(void* memory, size_t, int, void*) { std::free(memory); }
"""


@program
def mempools_with_an_allocator_of_the_program() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "of_the_program.cpp", Path(folder) / "of_the_program.so"
        source.write_text(OF_THE_PROGRAM)
        subprocess.run([_build.find_compiler() or "", "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
        allocator = memory.CUDAPluggableAllocator(str(built), "take", "give_back").allocator()
        torch.cuda.empty_cache()
        other, pool = torch.cuda.MemPool(allocator), torch.cuda.MemPool(allocator, use_on_oom=True)
        total, before = torch.cuda.mem_get_info()[1], torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 81 * MIB) / total)
        try:
            with torch.cuda.use_mem_pool(other):
                first = held(40 * MIB)
            with torch.cuda.use_mem_pool(pool):
                second = held(40 * MIB)
            at = second.data_ptr()
            assert torch.cuda.memory_allocated() == before + 80 * MIB
            runs_out(30 * MIB)
            del first, second
            # The free memory of the last-resort pool serves the request, the other pool's does not.
            third = held(30 * MIB)
            assert third.data_ptr() == at
            runs_out(30 * MIB)
            with torch.cuda.use_mem_pool(pool):
                runs_out(30 * MIB)
            del third
            uses = pool.use_count()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert uses == 1
        with torch.cuda.use_mem_pool(pool):
            held(90 * MIB)
        del other, pool
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == before
        assert not pools()


def runs_out(size: int) -> None:
    try:
        held(size)
    except torch.OutOfMemoryError:
        return
    raise AssertionError(f"there was room for {size} bytes")


@program
def graphs() -> None:
    torch.cuda.synchronize()
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first.capture_begin()
        kept = held(MIB)
        used = held(300)
        used.record_stream(other)
        del used
        more = held(300)
        first.capture_end()
        second.capture_begin(pool=first.pool())
        again = held(MIB)
        second.capture_end()
    assert len(pools()) == 1
    assert held(300).data_ptr() != more.data_ptr()
    del kept, more, again
    assert len(pools()) == 1
    first.reset()
    second.reset()
    torch.cuda.empty_cache()
    assert not pools()


@program
def checkpoints() -> None:
    pool, device = torch.cuda.graph_pool_handle(), torch.cuda.current_device()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    kept = held(2 * MIB)
    state = torch._C._cuda_getCheckpointState(device, pool)
    gone = held(3 * MIB)
    torch._C._cuda_endAllocateToPool(device, pool)
    at, more = kept.data_ptr(), gone.data_ptr()
    storages = [tensor.untyped_storage()._cdata for tensor in (kept, gone)]
    assert all(torch._C._has_Standard_Deleter(storage) for storage in storages)
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, {at, more})
    torch._C._cuda_setCheckpointPoolState(device, state, storages, [])
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, {at})
    assert not torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    # The block is live, but no tensor owns it.
    del kept, gone
    torch.cuda.caching_allocator_delete(at)
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    torch._C._cuda_releasePool(device, pool)
    torch.cuda.empty_cache()
    assert not pools()


@program
def a_second_free() -> None:
    address = torch.cuda.caching_allocator_alloc(1000)
    torch.cuda.caching_allocator_delete(address)
    for wrong in (address, address + 512, 0xBAD00):
        try:
            torch.cuda.caching_allocator_delete(wrong)
        except RuntimeError as error:
            assert f"{wrong:#x}" in str(error)
        else:
            raise AssertionError(hex(wrong))


@program
def without_a_cache() -> None:
    def requested() -> int:
        return int(torch.cuda.memory_stats()["requested_bytes.all.allocated"])

    kept = torch.cuda.caching_allocator_alloc(1000)
    before, held_before = requested(), torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_enable(False)
    try:
        tensor, address = held(MIB), torch.cuda.caching_allocator_alloc(MIB)
        assert address not in (0, tensor.data_ptr())
        assert torch.cuda.caching_allocator_alloc(0) == 0
        assert (requested(), torch.cuda.memory_allocated()) == (before, held_before)
        # Foreign memory is freed by cudaFree, and a block of the allocator by the allocator.
        torch.cuda.caching_allocator_delete(address)
        torch.cuda.caching_allocator_delete(kept)
        assert torch.cuda.memory_allocated() < held_before
    finally:
        torch.cuda.caching_allocator_enable(True)
    del tensor
    torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(MIB))
    assert requested() == before + MIB


@program
def devices() -> None:
    if torch.cuda.device_count() < 2:
        return
    before = [torch.cuda.memory_allocated(index) for index in (0, 1)]
    with torch.cuda.device(1):
        there = held(MIB)
    here = held(2 * MIB)
    assert [torch.cuda.memory_allocated(index) for index in (0, 1)] == [before[0] + 2 * MIB, before[1] + MIB]
    # Frees do not depend on the thread's current device.
    del there
    with torch.cuda.device(1):
        del here
    assert [torch.cuda.memory_allocated(index) for index in (0, 1)] == before
    assert set(vramlab.torch.stats()) == {"0", "1"}


@program
def own_statistics() -> None:
    vramlab.torch.latency()
    held(1000)
    vramlab.torch.latency(False)
    told = vramlab.torch.stats(torch.cuda.current_device())
    assert told["allocator"] == ALLOCATOR.partition(":")[0]
    assert told["stats"]["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert {row["operation"] for row in told["latency"]} == {"allocate", "deallocate"}
    assert json.loads(json.dumps(told)) == told
    expandable = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert (told["pages"] is not None) == expandable
    assert not expandable or (told["pages"]["file_descriptors"] and told["pages"]["granularity"] == 2 * MIB)


@program
def profiler() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        tensor = held(4 * MIB)
        del tensor
    used = [event.self_device_memory_usage for event in told.key_averages()]
    assert sorted(used) == [-4 * MIB, 4 * MIB], used


@program
def shared_with_another_process() -> None:
    tensor = held(5 * MIB)
    told = tensor.untyped_storage()._share_cuda_()
    handle, offset = told[1], told[3]
    if not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]:
        assert handle[:2] == b"\x02c"
        assert offset >= 0
        return
    assert handle[:2] in (b"\x02e", b"\x02v")
    process, _, page, count = struct.unpack_from("<iiQQ", handle, 2)
    assert process == os.getpid()
    # Only the pages that contain the tensor, with a descriptor each.
    assert 0 <= offset < page
    assert count == -(-(offset + 5 * MIB) // page)
    descriptors = struct.unpack_from(f"<{count}i", handle, 26)
    assert len(handle) == 26 + 4 * count
    for descriptor in descriptors:
        os.fstat(descriptor)
    # The same descriptors the next time, and for a tensor in the same page.
    assert tensor.untyped_storage()._share_cuda_()[1] == handle


@program
def a_dump() -> None:
    memory._record_memory_history(max_entries=1000, stacks="python")
    kept = [held(size) for size in (1000, 3 * MIB)]
    target = os.environ.get("DUMP") or Path(tempfile.mkdtemp()) / "snapshot.pickle"
    memory._dump_snapshot(str(target))
    memory._record_memory_history(enabled=None)
    assert Path(target).stat().st_size > 1000
    assert len(kept) == 2


def main() -> None:
    torch.cuda.init()
    for called, run in PROGRAMS.items():
        if len(sys.argv) > 2 and called not in sys.argv[2:]:
            continue
        failed = None
        try:
            run()
        except BaseException:
            failed = traceback.format_exc()
        gc.collect()
        print(json.dumps({"name": called, "failed": failed}), flush=True)


if __name__ == "__main__":
    ALLOCATOR = sys.argv[1]
    vramlab.torch.use(ALLOCATOR)
    main()
