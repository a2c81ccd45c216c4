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
import sys
import traceback

import programs_history  # noqa: F401  (registers its programs)
import programs_pools  # noqa: F401  (registers its programs)
import torch
import vramlab.torch
from programs_common import ALLOCATOR, MIB, PROGRAMS, allocate_on_threads, held, program


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


@program
def threads() -> None:
    before = [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]
    allocate_on_threads()
    gc.collect()
    assert [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())] == before


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
    vramlab.torch.use(ALLOCATOR)
    main()
