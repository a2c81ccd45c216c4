"""The requirements on an allocator of pinned host memory under PyTorch, on a GPU or a stand-in: see `test_pinned.py`.

    python pinned_programs.py ALLOCATOR [NAME…]

Each program prints a line of JSON: its name, and why it failed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import vramlab.torch

MIB = 1 << 20
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a program for the command line."""
    PROGRAMS[run.__name__] = run
    return run


def needs_gpu(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same, for a program whose copies copy."""
    if "VRAMLAB_SHIM_DEVICE" not in os.environ:
        PROGRAMS[run.__name__] = run
    return run


def pinned(bytes_: int) -> torch.Tensor:
    return torch.empty(bytes_, dtype=torch.uint8, pin_memory=True)


def active() -> int:
    """Blocks of the allocator that the program holds or that copies use."""
    return of_all() - NATIVE


def of_all() -> int:
    """The same with blocks of PyTorch's own allocator."""
    stats = torch.cuda.host_memory_stats()
    return int(stats["active_requests.current"] if "active_requests.current" in stats else stats["allocation.current"])


def reserved() -> int:
    return int(vramlab.torch.host_stats()["reserved_bytes"]["current"])


def empty() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._host_emptyCache()


def copy(tensor: torch.Tensor, device: str = "cuda") -> torch.Tensor:
    """A copy that the host does not wait for."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor, non_blocking=True)


@program
def names() -> None:
    assert vramlab.torch.host_allocator() == ALLOCATOR
    assert vramlab.torch.allocator() is None
    assert torch.cuda.get_allocator_backend() == "native"
    vramlab.torch.use(host=ALLOCATOR)
    try:
        vramlab.torch.use(host="host-rmm-pool")
    except vramlab.Error as error:
        assert "already" in str(error), error
    else:
        raise AssertionError("a second allocator was taken")
    assert vramlab.torch.host_stats()["allocator"] == ALLOCATOR


@program
def sizes() -> None:
    empty()
    before = vramlab.torch.host_stats()["requested_bytes"]["current"]
    blocks = [pinned(3 * MIB + 1), pinned(5 * MIB)]
    assert vramlab.torch.host_stats()["requested_bytes"]["current"] == before + 8 * MIB + 1
    exact = ALLOCATOR == "host-exact"
    assert reserved() == (8 * MIB + 4096 if exact else 12 * MIB), reserved()
    for number, block in enumerate(blocks):
        block.fill_(number)
    assert [int(block.sum()) for block in blocks] == [0, 5 * MIB]
    del blocks[0]
    torch.cuda.reset_peak_host_memory_stats()
    peaks = vramlab.torch.host_stats()["requested_bytes"]
    assert peaks["peak"] == peaks["current"] == before + 5 * MIB
    del blocks, block
    empty()
    assert reserved() == 0
    assert active() == 0


@program
def statistics() -> None:
    block = pinned(MIB)
    stats = torch.cuda.host_memory_stats()
    assert set(stats) == OF_PYTORCH
    assert stats["num_host_alloc"] >= 1
    assert stats["host_alloc_time.count"] == stats["num_host_alloc"]
    assert stats["host_alloc_time.max"] >= stats["host_alloc_time.min"] >= 0
    torch.cuda.reset_accumulated_host_memory_stats()
    later = torch.cuda.host_memory_stats()
    assert later["host_alloc_time.total"] == later["num_host_alloc"] == later["allocated_bytes.allocated"] == 0
    assert later["allocated_bytes.current"] == stats["allocated_bytes.current"]
    del block


@program
def a_block_is_used_again() -> None:
    first = pinned(2 * MIB)
    address = first.data_ptr()
    del first
    assert pinned(2 * MIB).data_ptr() == address


@program
def no_bytes() -> None:
    assert pinned(0).data_ptr() == 0
    assert torch.empty(0).pin_memory().numel() == 0


@program
def too_much() -> None:
    try:
        pinned(1 << 50)
    except RuntimeError as error:
        assert str(error).startswith("vramlab: pinned memory: "), error
    else:
        raise AssertionError("a petabyte was pinned")
    pinned(1000)


@program
def a_copy_keeps_its_block() -> None:
    empty()
    block = pinned(MIB)
    del block
    assert active() == 0
    for device in ("cuda:0", "cuda:1")[: torch.cuda.device_count()]:
        for use in (lambda block: block, lambda block: block[5:], view_of_an_address):
            block = pinned(MIB)
            used = use(block)
            copy(used, device)
            del used, block
            # The event is asked for by the next call.
            assert active() == 1, (device, use)
            empty()
            assert active() == 0


def view_of_an_address(block: torch.Tensor) -> torch.Tensor:
    """Part of a block, by a tensor that PyTorch's allocator did not make."""
    return torch.frombuffer((ctypes.c_uint8 * 1000).from_address(block.data_ptr() + 64), dtype=torch.uint8)


@program
def a_block_of_pytorchs_own_allocator() -> None:
    copy(BEFORE)
    assert BEFORE.data_ptr() != 0


@program
def memory_that_is_not_pinned() -> None:
    before = active()
    copy(torch.empty(MIB, dtype=torch.uint8))
    assert active() == before


@program
def a_graph_keeps_its_blocks() -> None:
    empty()
    graph = torch.cuda.CUDAGraph()
    target = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    kept = pinned(3 * MIB)
    with torch.cuda.graph(graph):
        inside = pinned(2 * MIB)
        target.copy_(inside[:MIB], non_blocking=True)
        target.copy_(kept[:MIB], non_blocking=True)
    addresses = {inside.data_ptr(), kept.data_ptr()}
    del inside, kept
    others = [pinned(size * MIB) for size in (2, 3, 2, 3)]
    assert not addresses & {block.data_ptr() for block in others}
    torch._C._host_emptyCache()
    assert active() == 2 + len(others)
    graph.reset()
    del graph, others
    pinned(MIB)
    empty()
    assert active() == 0
    assert reserved() == 0


@program
def threads() -> None:
    empty()
    wrong: list[str] = []

    def churn(seed: int) -> None:
        number = seed
        held: list[torch.Tensor] = []
        for _ in range(200):
            number = (number * 1103515245 + 12345) % (1 << 31)
            if len(held) < 4:
                held.append(pinned(1 + number % (1 << (10 + number % 11))).fill_(seed))
                continue
            block = held.pop(number % 4)
            if not bool((block == seed).all()):
                wrong.append(f"thread {seed}")
            if number % 2:
                copy(block)

    running = [threading.Thread(target=churn, args=(seed,)) for seed in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong, wrong
    empty()
    assert active() == 0
    assert reserved() == 0


@program
def loaders() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data = torch.arange(64 * 1000, dtype=torch.float32).reshape(64, 1000)
    before = vramlab.torch.host_stats()["requests"]
    total = 0.0
    for (batch,) in DataLoader(TensorDataset(data), batch_size=8, num_workers=2, pin_memory=True):
        copy(batch)
        total += float(batch.double().sum())
    assert total == float(data.double().sum())
    assert vramlab.torch.host_stats()["requests"] >= before + 8


@program
def forks() -> None:
    block = pinned(MIB)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del block
            gc.collect()
            pinned(MIB)
        except RuntimeError as error:
            code = 5 if "forked" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    block.fill_(1)


def slow_stream(device: str) -> torch.cuda.Stream:
    """A stream with some milliseconds of work."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
    return stream


def devices() -> list[str]:
    return [f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))]


def synchronize() -> None:
    for device in devices():
        torch.cuda.synchronize(device)


@needs_gpu
def pinned_memory_is_pinned() -> None:
    assert pinned(1000).is_pinned()
    assert torch.arange(1000).pin_memory().is_pinned()
    assert int(torch.arange(1000).pin_memory().to("cuda", non_blocking=True).sum()) == 499_500


@needs_gpu
def slow_uploads_read_what_was_there() -> None:
    number, wrong, waiting = 1, 0, []
    for turn in range(150):
        number = (number * 1103515245 + 12345) % (1 << 31)
        device = devices()[turn % len(devices())]
        block = pinned(1 + number % (4 * MIB)).fill_(turn)
        with torch.cuda.stream(slow_stream(device)):
            # Interior addresses, too.
            part = block if turn % 3 else block[block.numel() // 2 :]
            waiting.append((turn, part.to(device, non_blocking=True)))
        # The block is free for the host's next request, and its copy waits.
        del block, part
        if len(waiting) == 16:
            synchronize()
            wrong += sum(not bool((copied == value).all()) for value, copied in waiting)
            waiting = []
    assert wrong == 0, wrong


@needs_gpu
def slow_downloads_write_nothing_of_others() -> None:
    number, wrong = 1, 0
    for turn in range(100):
        number = (number * 1103515245 + 12345) % (1 << 31)
        device = devices()[turn % len(devices())]
        source = torch.full((1 + number % MIB,), 255, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(slow_stream(device)):
            pinned(source.numel()).copy_(source, non_blocking=True)
        # The target is freed while the copy into it waits.
        others = [pinned(source.numel()).fill_(turn) for _ in range(3)]
        torch.cuda.synchronize(device)
        wrong += sum(not bool((block == turn).all()) for block in others)
    assert wrong == 0, wrong


@needs_gpu
def slow_copies_of_threads() -> None:
    wrong: list[int] = []

    def churn(seed: int) -> None:
        for turn in range(30):
            value = (31 * seed + turn) % 251
            block = pinned(1000 * (1 + (seed * turn) % 700)).fill_(value)
            stream = slow_stream("cuda:0")
            with torch.cuda.stream(stream):
                copied = block.to("cuda:0", non_blocking=True)
                del block
                equal = (copied == value).all()
            stream.synchronize()
            if not bool(equal):
                wrong.append(seed)

    running = [threading.Thread(target=churn, args=(seed,)) for seed in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong, wrong


@needs_gpu
def a_graph_reads_its_block_at_each_launch() -> None:
    target = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block = pinned(2 * MIB)
        target.copy_(block, non_blocking=True)
    address = block.data_ptr()
    block.fill_(3)
    del block
    for turn in range(20):
        others = [pinned(2 * MIB).fill_(100 + turn) for _ in range(2)]
        assert address not in {other.data_ptr() for other in others}
        graph.replay()
        torch.cuda.synchronize()
        assert bool((target == 3).all())
        torch._C._host_emptyCache()


@needs_gpu
def an_empty_cache_during_copies() -> None:
    for turn in range(10):
        block = pinned(MIB).fill_(turn)
        with torch.cuda.stream(slow_stream("cuda:0")):
            copied = block.to("cuda:0", non_blocking=True)
        del block
        torch._C._host_emptyCache()
        torch.cuda.synchronize()
        assert bool((copied == turn).all())


if __name__ == "__main__":
    ALLOCATOR = sys.argv[1]
    # Before the allocator is there.
    BEFORE = pinned(MIB)
    torch.cuda.init()
    OF_PYTORCH = set(torch.cuda.host_memory_stats())
    NATIVE = of_all()
    vramlab.torch.use(host=ALLOCATOR)
    chosen = sys.argv[2:] or list(PROGRAMS)
    for name in chosen:
        failed = None
        try:
            PROGRAMS[name]()
        except BaseException:
            failed = traceback.format_exc()
        print(json.dumps({"name": name, "failed": failed}), flush=True)
    # Blocks that live to the end of the process.
    LEFT = [pinned(MIB), copy(pinned(MIB))]
