"""Handles: closed once and after their last call, never copied, with replaceable callbacks."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import vramlab

try:
    vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)

from test_allocator import MIB, SOME, in_a_process, live
from vramlab import allocator as va


@pytest.fixture
def caching() -> Iterator[va.Allocator]:
    with va.Allocator("caching", "sim") as opened:
        yield opened


def work_until_closed(allocator: va.Allocator, ready: threading.Barrier, errors: list[va.Error]) -> None:
    ready.wait(timeout=30)
    try:
        while True:
            allocator.free(allocator.alloc(1000))
            allocator.segments()
    except va.Error as error:
        errors.append(error)


def test_a_close_waits_for_calls_of_other_threads_and_ends_them() -> None:
    for _ in range(50):
        errors: list[va.Error] = []
        ready = threading.Barrier(4)
        with va.Allocator("caching", "sim") as allocator:
            arguments = (allocator, ready, errors)
            threads = [threading.Thread(target=work_until_closed, args=arguments, daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            ready.wait(timeout=30)
        for thread in threads:
            thread.join(timeout=30)
        assert len(errors) == 3
        assert all("closed" in str(error) for error in errors)


def test_a_close_in_a_callback_is_refused(caching: va.Allocator) -> None:
    errors: list[va.Error] = []

    def close(*_: object) -> None:
        with pytest.raises(va.LiveError, match="callback") as caught:
            caching.close()
        errors.append(caught.value)

    caching.on_segment(close)
    block = caching.alloc(MIB)
    assert len(errors) == 1
    caching.free(block)
    assert live(caching) == 0


def test_a_close_while_another_thread_is_in_a_callback_waits(caching: va.Allocator) -> None:
    inside, leave = threading.Event(), threading.Event()
    in_use: list[int] = []

    def wait(*_: object) -> None:
        inside.set()
        assert leave.wait(timeout=30)
        # Its own calls still run.
        in_use.append(caching.trim())

    caching.on_segment(wait)
    worker = threading.Thread(target=lambda: caching.alloc(MIB))
    worker.start()
    assert inside.wait(timeout=30)
    closer = threading.Thread(target=caching.close)
    closer.start()
    closer.join(timeout=0.2)
    assert closer.is_alive()
    # A refused call does not end the wait.
    for _ in range(100):
        with pytest.raises(va.Error, match="closed"):
            caching.stats()
    assert closer.is_alive()
    leave.set()
    for thread in (worker, closer):
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert in_use == [0]
    with pytest.raises(va.Error, match="closed"):
        caching.stats()


def test_handles_are_neither_copied_nor_pickled(caching: va.Allocator) -> None:
    pool = caching.pool()
    pool.alloc(MIB)
    checkpoint = pool.checkpoint()
    for handle in (caching, pool, checkpoint):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(va.Error, match="cannot be copied or pickled"):
                make(handle)
    # A manual copy of the attributes shares the handle.
    twin = va.Allocator.__new__(va.Allocator)
    twin.__dict__.update(caching.__dict__)
    del twin
    assert live(caching) == MIB
    twin = va.Allocator.__new__(va.Allocator)
    twin.__dict__.update(caching.__dict__)
    twin.close()
    with pytest.raises(va.Error, match="closed"):
        caching.alloc(1)


def test_what_is_no_checkpoint_is_refused(caching: va.Allocator) -> None:
    for forged in (5, None, caching.pool()):
        with pytest.raises(va.InvalidError, match="no checkpoint"):
            caching.restore(forged)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in SOME if name != "naive"])
def test_a_restore_that_fails_changes_nothing(name: str) -> None:
    with va.Allocator(name, "sim") as allocator:
        pool = allocator.pool()
        block = pool.alloc(3 * MIB, 1)
        checkpoint = pool.checkpoint()
        allocator.record_stream(block, 2)
        before = allocator.stats(), allocator.segments()
        with pytest.raises(va.LiveError):
            allocator.restore(checkpoint)
        assert (allocator.stats(), allocator.segments()) == before
        assert pool.alloc(3 * MIB, 1) != block
        allocator.free(block)


def test_who_cannot_restore_refuses_the_checkpoint() -> None:
    with va.Allocator("rmm-arena", "sim") as arena:
        assert "checkpoint" not in arena.can()
        with pytest.raises(va.IncapableError):
            arena.pool().checkpoint()


def test_callbacks_take_each_others_place(caching: va.Allocator) -> None:
    told: list[int] = []

    def follow(number: int) -> None:
        def tell(*_: object) -> None:
            told.append(number)
            follow(number + 1)

        caching.on_segment(tell)

    follow(0)
    for _ in range(1000):
        caching.free(caching.alloc(30 * MIB))
        caching.trim()
    assert told == list(range(2000))
    for number in range(100_000):
        caching.on_segment(lambda *_, number=number: told.append(number))
    caching.alloc(30 * MIB)
    assert told[-1] == 99_999


def test_an_allocator_with_a_callback_ends_with_its_last_use() -> None:
    allocator = va.Allocator("caching", "sim")
    allocator.on_segment(lambda *_: None)
    handle = weakref.ref(allocator._handle)
    gc.disable()
    try:
        del allocator
        assert handle() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("closing", [False, True])
def test_a_child_that_is_forked_during_a_call_and_a_close_does_not_hang(closing: bool) -> None:
    done = in_a_process(
        f"""
        import os, threading, time, vramlab
        allocator = vramlab.Allocator("caching", "sim")
        inside, leave = threading.Event(), threading.Event()
        def wait(*_):
            inside.set()
            assert leave.wait(timeout=30)
        allocator.on_segment(wait)
        threads = [threading.Thread(target=lambda: allocator.alloc(1 << 20))]
        threads[0].start()
        assert inside.wait(timeout=30)
        if {closing}:
            threads.append(threading.Thread(target=allocator.close))
            threads[1].start()
            while not allocator._handle._closing:
                time.sleep(0.001)
        child = os.fork()
        if child == 0:
            for call in (lambda: allocator.alloc(1), allocator.close):
                try:
                    call()
                except vramlab.Error as error:
                    assert "spawn" in str(error)
                else:
                    os._exit(3)
            os._exit(7)
        leave.set()
        for thread in threads:
            thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert (done.returncode, done.stdout) == (0, "7\n")
