"""The resource for RMM, over a stand-in that calls it as RMM does, on the simulated device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import vramlab

try:
    vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)

import vramlab.rmm

MIB = 1 << 20


class Stream:
    """A stream as RMM passes it to a callback."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CallbackMemoryResource:
    """Stores the callbacks."""

    def __init__(self, allocate: Callable[[int, Stream], int], deallocate: Callable[[int, int, Stream], None]) -> None:
        self.allocate = allocate
        self.deallocate = deallocate


@pytest.fixture
def resource(monkeypatch: pytest.MonkeyPatch) -> Any:
    rmm = ModuleType("rmm")
    rmm.mr = ModuleType("rmm.mr")  # type: ignore[attr-defined]
    rmm.mr.CallbackMemoryResource = CallbackMemoryResource
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    made = vramlab.rmm.resource("caching", "sim", limit=64 * MIB)
    yield made
    made.vramlab.close()


def held(resource: Any) -> int:
    return int(resource.vramlab.stats()["active_bytes.all.current"])


@pytest.mark.parametrize("handle", [0, 5])
def test_blocks_come_and_go(resource: Any, handle: int) -> None:
    stream = Stream(handle)
    addresses = [resource.allocate(size, stream) for size in (1000, MIB, 0)]
    assert addresses[2] == 0
    assert held(resource) == 1024 + MIB
    for address in addresses:
        resource.deallocate(address, 1000, stream)
    assert held(resource) == 0


def test_a_free_on_another_stream_waits_for_that(resource: Any) -> None:
    address = resource.allocate(MIB, Stream(5))
    resource.deallocate(address, MIB, Stream(7))
    assert held(resource) == MIB
    assert resource.vramlab.trim() > 0
    assert held(resource) == 0


def test_out_of_memory_is_an_error_of_memory(resource: Any) -> None:
    # RMM converts a MemoryError to bad_alloc, and the others to runtime_error.
    with pytest.raises(MemoryError, match="limit"):
        resource.allocate(100 * MIB, Stream(0))


def test_a_free_in_a_forked_child_leaves_the_block_to_the_parent(resource: Any) -> None:
    address = resource.allocate(MIB, Stream(5))
    child = os.fork()
    if child == 0:
        try:
            resource.deallocate(address, MIB, Stream(5))
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held(resource) == MIB
    resource.deallocate(address, MIB, Stream(5))
    assert held(resource) == 0


def test_a_free_behind_the_end_of_the_allocator_does_nothing(resource: Any) -> None:
    address = resource.allocate(MIB, Stream(0))
    resource.vramlab.close()
    resource.deallocate(address, MIB, Stream(0))
