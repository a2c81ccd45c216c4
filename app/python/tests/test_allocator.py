"""The Python allocators on the simulated device: every function of the library."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

import vramlab  # noqa: E402

try:
    vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from vramlab import allocator as va  # noqa: E402

MIB = 1 << 20
# One allocator per family: PyTorch's rules, VramLab's own, one driver call per request, and another project's.
SOME = ["caching", "pytorch-expandable", "remap", "naive", "bfc"]


@pytest.fixture
def caching() -> Iterator[va.Allocator]:
    with va.Allocator("caching", "sim") as opened:
        yield opened


def live(allocator: va.Allocator) -> int:
    return allocator.stats()["allocated_bytes.all.current"]


@pytest.mark.parametrize("name", SOME)
def test_blocks_come_and_go(name: str) -> None:
    with va.Allocator(name, "sim") as allocator:
        blocks = [allocator.alloc(size, stream) for size in (1, 512, 3 * MIB, 40 * MIB) for stream in (0, 5)]
        assert len(set(blocks)) == len(blocks)
        assert all(block % 256 == 0 for block in blocks)
        assert allocator.stats()["requested_bytes.all.current"] == 2 * (1 + 512 + 43 * MIB)
        for block in blocks:
            allocator.free(block)
        assert live(allocator) == 0
        allocator.trim()
        assert allocator.stats()["reserved_bytes.all.current"] == 0


def test_no_bytes_need_no_free(caching: va.Allocator) -> None:
    assert caching.alloc(0) == 0
    caching.free(0)
    caching.record_stream(0, 3)
    assert caching.stats()["allocation.all.allocated"] == 0


def test_a_freed_block_is_reused_on_its_stream_and_no_other(caching: va.Allocator) -> None:
    block = caching.alloc(MIB, 1)
    caching.free(block)
    other = caching.alloc(MIB, 2)
    assert other != block
    assert caching.alloc(MIB, 1) == block


def test_a_recorded_stream_keeps_a_block(caching: va.Allocator) -> None:
    block = caching.alloc(MIB, 1)
    caching.record_stream(block, 2)
    caching.free(block)
    assert caching.stats()["active_bytes.all.current"] == MIB
    caching.trim()
    assert caching.stats()["active_bytes.all.current"] == 0
    # Recording the block's own stream has no effect.
    block = caching.alloc(MIB, 1)
    caching.record_stream(block, 1)
    caching.free(block)
    assert caching.stats()["active_bytes.all.current"] == 0


def test_a_stream_that_is_gone_holds_no_block(caching: va.Allocator) -> None:
    block = caching.alloc(MIB, 1)
    caching.record_stream(block, 2)
    caching.free(block)
    assert caching.stats()["active_bytes.all.current"] == MIB
    caching.stream_gone(2)
    caching.trim()
    assert caching.stats()["active_bytes.all.current"] == 0


def test_a_stream_that_is_gone_holds_no_block_that_is_freed_later(caching: va.Allocator) -> None:
    block = caching.alloc(MIB, 1)
    caching.record_stream(block, 2)
    caching.stream_gone(2)
    caching.free(block)


@pytest.mark.parametrize("name", SOME)
def test_what_is_no_live_block_is_refused_with_its_address(name: str) -> None:
    with va.Allocator(name, "sim") as allocator, va.Allocator(name, "sim:2") as other:
        block = allocator.alloc(MIB)
        theirs = other.alloc(64 * MIB)
        for address in (block + 256, 0xBAD0000):
            for refused in (allocator.free, lambda at: allocator.record_stream(at, 3)):
                with pytest.raises(va.ForeignError, match=f"{address:#x}"):
                    refused(address)
        allocator.free(block)
        with pytest.raises(va.ForeignError, match=f"{block:#x}"):
            allocator.free(block)
        assert live(allocator) == 0
        # Simulated devices return equal addresses: only an address that this device has not allocated is detected.
        if theirs != block:
            with pytest.raises(va.ForeignError):
                allocator.free(theirs)
        other.free(theirs)


def test_numbers_that_c_would_cut_are_refused(caching: va.Allocator) -> None:
    for refused in (caching.alloc, caching.free, caching.trim, caching.set_limit):
        for number in (-1, 2**64):
            with pytest.raises(va.InvalidError, match=str(number)):
                refused(number)
    with pytest.raises(va.InvalidError):
        caching.alloc(2**63)
    assert live(caching) == 0


@pytest.mark.parametrize("name", ["caching", "pytorch", "pytorch-expandable", "naive", "tlsf"])
def test_a_limit_holds_and_can_be_lifted(name: str) -> None:
    with va.Allocator(name, "sim", limit=64 * MIB) as allocator:
        kept = allocator.alloc(30 * MIB)
        with pytest.raises(va.OutOfMemoryError, match="out of memory") as caught:
            allocator.alloc(40 * MIB)
        assert isinstance(caught.value, MemoryError)
        assert allocator.stats()["num_ooms"] == 1
        allocator.set_limit(None)
        more = allocator.alloc(40 * MIB)
        allocator.set_limit(80 * MIB)
        with pytest.raises(va.OutOfMemoryError):
            allocator.alloc(40 * MIB)
        # The previous state is unchanged.
        allocator.free(kept)
        allocator.free(more)
        assert live(allocator) == 0


def test_the_devices_memory_is_the_last_limit() -> None:
    with va.Allocator("caching", "sim") as allocator:
        free, total = allocator.memory()
        assert 0 < free <= total
        with pytest.raises(va.OutOfMemoryError):
            allocator.alloc(total)
        block = allocator.alloc(free // 2)
        assert allocator.memory()[0] <= free - free // 2
        allocator.free(block)


@pytest.mark.parametrize("name", sorted(va.allocators()))
def test_a_limit_that_is_set_is_held_by_all(name: str) -> None:
    if name == "plan":
        pytest.skip("wants a file")
    # Not a multiple of any granularity.
    limit = 613 * MIB + 12345
    with va.Allocator(name, "sim", limit=limit) as allocator:
        held: list[int] = []
        for step in range(300):
            try:
                held.append(allocator.alloc(step * 7919 * 4096 % (30 * MIB) + 1, step % 3))
            except va.OutOfMemoryError:
                allocator.free(held.pop(step % len(held)))
            assert allocator.stats()["reserved_bytes.all.current"] <= limit


def test_devices_are_independent() -> None:
    with va.Allocator("caching", "sim:1") as one, va.Allocator("caching", "sim:2") as two:
        total = one.memory()[1]
        held = [one.alloc(total * 9 // 10), two.alloc(total * 9 // 10)]
        with pytest.raises(va.OutOfMemoryError):
            two.alloc(total // 5)
        one.free(held[0])
        two.free(held[1])


def test_allocators_on_one_device_share_its_memory() -> None:
    with va.Allocator("caching", "sim") as one, va.Allocator("pytorch", "sim") as two:
        total = one.memory()[1]
        one.free(one.alloc(total * 9 // 10))
        with pytest.raises(va.OutOfMemoryError):
            two.alloc(total // 5)
        one.trim()
        two.free(two.alloc(total // 5))


def test_a_private_pool_keeps_its_memory(caching: va.Allocator) -> None:
    with caching.pool() as pool:
        inside = pool.alloc(MIB)
        caching.free(inside)
        assert caching.alloc(MIB) != inside
        assert pool.alloc(MIB) == inside
        assert {segment["pool"] for segment in caching.segments()} == {0, pool.number}
        caching.free(inside)
    with pytest.raises(va.Error):
        pool.alloc(MIB)
    assert pool.trim() == 2 * MIB
    assert {segment["pool"] for segment in caching.segments()} == {0}
    with pytest.raises(va.Error):
        pool.release()


def test_a_pool_goes_back_to_a_checkpoint(caching: va.Allocator) -> None:
    pool = caching.pool()
    kept = pool.alloc(3 * MIB, 4)
    checkpoint = pool.checkpoint()
    more = [pool.alloc(size, 4) for size in (100, 2 * MIB)]
    outside = caching.alloc(MIB)
    freed, created = caching.restore(checkpoint)
    assert sorted(freed) == sorted([kept, *more])
    assert created == [(kept, 3 * MIB, 4)]
    with pytest.raises(va.ForeignError):
        caching.free(more[0])
    caching.free(outside)
    caching.free(kept)
    assert live(caching) == 0


def test_who_cannot_says_so() -> None:
    with va.Allocator("naive", "sim") as naive:
        assert naive.can() == {"snapshot"}
        with pytest.raises(va.IncapableError, match="private pools"):
            naive.pool()
    with va.Allocator("caching", "sim") as caching:
        assert {"pools", "checkpoint", "snapshot", "follows_pytorch"} <= caching.can()
    with va.Allocator("pytorch-expandable", "sim") as expandable:
        assert "expand" in expandable.can()
        with pytest.raises(va.IncapableError):
            expandable.base(expandable.alloc(MIB))


def test_the_segment_around_an_address(caching: va.Allocator) -> None:
    first, second = caching.alloc(1000), caching.alloc(1000)
    assert caching.base(first) == caching.base(second) == (first, 2 * MIB)
    assert caching.base(second + 7) == (first, 2 * MIB)
    with pytest.raises(va.ForeignError):
        caching.base(first + 2 * MIB)


def test_segments_are_told_as_they_come_and_go() -> None:
    with va.Allocator("caching", "sim") as allocator:
        told: list[tuple[str, int, int, int]] = []
        allocator.on_segment(lambda *event: told.append(event))
        block = allocator.alloc(30 * MIB, 9)
        assert told == [("alloc", block, 30 * MIB, 9)]
        allocator.free(block)
        allocator.trim()
        assert told[1:] == [("free", block, 30 * MIB, 9)]
        allocator.on_segment(None)
        allocator.alloc(MIB)
        assert len(told) == 2
    with va.Allocator("pytorch-expandable", "sim") as expandable:
        actions: list[str] = []
        expandable.on_segment(lambda action, *_: actions.append(action))
        expandable.free(expandable.alloc(30 * MIB))
        expandable.trim()
        assert set(actions) == {"map", "unmap"}


def test_a_callback_may_call_the_allocator(caching: va.Allocator) -> None:
    seen: list[int] = []
    caching.on_segment(lambda *_: seen.append(caching.stats()["segment.all.current"]))
    caching.alloc(MIB)
    assert seen == [1]


def test_statistics_are_pytorchs_and_start_again(caching: va.Allocator) -> None:
    block = caching.alloc(3 * MIB)
    caching.free(block)
    stats = caching.stats()
    assert stats["allocated_bytes.all.peak"] == 3 * MIB
    assert stats["allocation.large_pool.allocated"] == 1
    assert stats["num_device_alloc"] == 1
    caching.reset_peaks()
    assert caching.stats()["allocated_bytes.all.peak"] == 0
    caching.reset_accumulated()
    assert caching.stats()["allocation.all.allocated"] == 0
    assert caching.stats()["reserved_bytes.all.current"] == 20 * MIB


def test_snapshots_are_pytorchs(caching: va.Allocator, tmp_path: Path) -> None:
    block = caching.alloc(1000, 3)
    caching.snapshot(tmp_path / "held.pickle")
    caching.snapshot(tmp_path / "held.json")
    as_pickle: Any = pickle.loads((tmp_path / "held.pickle").read_bytes())
    # JSON has no tuples.
    assert json.loads(json.dumps(as_pickle["segments"])) == json.loads((tmp_path / "held.json").read_text())["segments"]
    (segment,) = as_pickle["segments"]
    assert (segment["address"], segment["total_size"], segment["stream"]) == (block, 2 * MIB, 3)
    assert [one["state"] for one in segment["blocks"]] == ["active_allocated", "inactive"]
    (walked,) = caching.segments()
    assert walked["blocks"][0] == {"address": block, "bytes": 1024, "requested": 1000, "state": "active_allocated"}
    with pytest.raises(va.FileError):
        caching.snapshot(tmp_path / "no" / "folder.pickle")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held.json", "held.pickle"]


def test_trace_latency_and_calls(caching: va.Allocator, tmp_path: Path) -> None:
    caching.free(caching.alloc(5 * MIB))
    assert caching.latencies() == []
    caching.trace()
    caching.latency()
    block = caching.alloc(700, 2)
    caching.free(block)
    caching.write_trace(tmp_path / "trace.jsonl")
    events = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(event["action"], event["addr"], event["size"]) for event in events] == [
        ("alloc", block, 700),
        ("free_requested", block, 700),
    ]
    rows = caching.latencies()
    assert {(row["operation"], row["count"]) for row in rows} == {("allocate", 1), ("deallocate", 1)}
    assert all(row["min_ns"] <= row["p50_ns"] <= row["max_ns"] for row in rows)
    caching.trace(False)
    caching.latency(False)
    caching.free(caching.alloc(700))
    caching.write_trace(tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").read_text() == ""
    assert caching.latencies() == rows
    assert caching.calls()["mem_alloc"]["count"] == caching.stats()["num_device_alloc"] == 3


def test_settings_are_read_back() -> None:
    with va.Allocator("caching:max_split_size=64M", "sim", retry_fit_after_sync=True) as allocator:
        assert allocator.name == "caching:max_split_size=64M,retry_fit_after_sync=on"
        assert allocator.settings()["max_split_size"] == 64 * MIB
        assert allocator.settings()["retry_fit_after_sync"] is True
    every = va.allocators()
    assert {"caching", "remap", "rmm-pool"} <= set(every)
    assert every["caching"]["settings"]["max_split_size"] == "none"


@pytest.mark.parametrize(
    ("name", "device", "error", "words"),
    [
        ("cachin", "sim", va.UnknownError, "did you mean 'caching'"),
        ("caching:max_split_siz=1", "sim", va.UnknownError, "max_split_size"),
        ("caching:max_split_size=small", "sim", va.UnknownError, "bytes"),
        ("caching", "simm", va.UnknownError, "sim"),
        ("caching", "sim:/no/such/profile.json", va.UnknownError, "/no/such/profile.json"),
        ("caching", "cuda:63", va.NoDeviceError, "."),
    ],
)
def test_bad_input_is_one_line(name: str, device: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        va.Allocator(name, device)
    assert "\n" not in str(caught.value)


def test_after_the_close_every_call_is_an_error(tmp_path: Path) -> None:
    allocator = va.Allocator("caching", "sim")
    block = allocator.alloc(MIB)
    allocator.close()
    allocator.close()
    for call in (lambda: allocator.alloc(1), lambda: allocator.free(block), allocator.stats, allocator.pool):
        with pytest.raises(va.Error, match="closed"):
            call()
    assert "closed" in repr(allocator)


def test_threads_with_streams_of_their_own_and_of_one() -> None:
    errors: list[BaseException] = []
    with va.Allocator("caching", "sim") as allocator:
        told: list[int] = []
        allocator.on_segment(lambda action, address, size, stream: told.append(size if action == "alloc" else -size))

        def work(number: int) -> None:
            try:
                held: list[int] = []
                for step in range(600):
                    held.append(allocator.alloc(step * 7919 % 300_000 + 1, number % 4))
                    if step % 5 == 0:
                        allocator.record_stream(held[-1], 9)
                    if len(held) > 20:
                        allocator.free(held.pop(step * 31 % 20))
                    if step % 200 == 0:
                        allocator.stats()
                        allocator.segments()
                for block in held:
                    allocator.free(block)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert live(allocator) == 0
        allocator.trim()
        assert sum(told) == allocator.stats()["reserved_bytes.all.current"] == 0


def in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


def test_a_forked_child_is_told_and_ends_well() -> None:
    done = in_a_process(
        """
        import os, vramlab
        from vramlab.allocator import ForkedError
        allocator = vramlab.Allocator("caching", "sim")
        block = allocator.alloc(1000)
        child = os.fork()
        if child == 0:
            for call in (lambda: allocator.alloc(1), lambda: allocator.free(block), allocator.stats,
                         lambda: vramlab.Allocator("caching", "sim")):
                try:
                    call()
                except ForkedError as error:
                    assert "spawn" in str(error)
                else:
                    os._exit(3)
            raise SystemExit(7)
        _, status = os.waitpid(child, 0)
        allocator.free(block)
        print(os.waitstatus_to_exitcode(status))
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "import os; os._exit(0)", "del allocator"])
def test_a_program_ends_with_blocks_held(ending: str) -> None:
    done = in_a_process(
        f"""
        import threading, vramlab
        allocator = vramlab.Allocator("caching", "sim")
        block = allocator.alloc(1000)
        allocator.on_segment(lambda *event: None)
        threading.Thread(target=lambda: allocator.alloc(1 << 25)).start()
        {ending}
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
