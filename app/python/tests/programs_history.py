"""The requirements on PyTorch's recording of memory, for `programs.py`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from programs_common import MIB, allocate_on_threads, held, program
from torch.cuda import memory


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
    allocate_on_threads()
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


@program
def a_dump() -> None:
    memory._record_memory_history(max_entries=1000, stacks="python")
    kept = [held(size) for size in (1000, 3 * MIB)]
    target = os.environ.get("DUMP") or Path(tempfile.mkdtemp()) / "snapshot.pickle"
    memory._dump_snapshot(str(target))
    memory._record_memory_history(enabled=None)
    assert Path(target).stat().st_size > 1000
    assert len(kept) == 2
