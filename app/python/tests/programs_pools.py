"""The requirements on private pools, for `programs.py`: of MemPools, graphs and checkpoints."""

from __future__ import annotations

import gc
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import vramlab.torch
from programs_common import ALLOCATOR, MIB, held, program
from torch.cuda import memory
from vramlab import _build


def pools() -> set[tuple[int, int]]:
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} - {(0, 0)}


def inside(tensor: torch.Tensor, segments: list[dict[str, Any]]) -> bool:
    at = tensor.data_ptr()
    return any(one["address"] <= at < one["address"] + one["total_size"] for one in segments)


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
