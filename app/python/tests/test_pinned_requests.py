"""The file of a program's requests of pinned memory, and its replay: over a stand-in for CUDA, or on a GPU.

Needs PyTorch with CUDA and a C++ compiler; skipped if one is missing.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import vramlab
from with_torch import SOURCE, python, skip_without_torch

skip_without_torch()
try:
    LIBRARY = vramlab.library_path()
except ImportError as missing:
    pytest.skip(str(missing), allow_module_level=True)

MIB = 1 << 20
BEGIN = """
import ctypes, gc, os, random, sys, threading, torch
MIB = 1 << 20
torch.cuda.init()
ON_STAND_IN = "VRAMLAB_SHIM_DEVICE" in os.environ
def pinned(size):
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
def copy(block):
    return torch.empty(block.shape, dtype=torch.uint8, device="cuda").copy_(block, non_blocking=True)
def hold(events):
    if ON_STAND_IN:
        ctypes.CDLL(None).fake_hold_events(int(events))
    elif not events:
        torch.cuda.synchronize()
def empty():
    gc.collect()
    torch._C._host_emptyCache()
"""


@pytest.fixture
def variables(torch_variables: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a process that the start hook of `vramlab run` records."""
    return torch_variables | {
        "PYTHONPATH": f"{SOURCE}/vramlab/_site:{SOURCE}",
        "VRAMLAB_LIBRARY": str(LIBRARY),
        "VRAMLAB_OUTPUT": str(tmp_path),
        "VRAMLAB_RECORDER": "own",
    }


def record(variables: dict[str, str], script: str, **more: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record of a program's process, and the lines of its requests; none without a file."""
    done = python(variables, "-c", BEGIN + script, **more)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    folder = Path(variables["VRAMLAB_OUTPUT"])
    (process,) = folder.glob("*.process.json")
    summary = json.loads(process.read_text())
    if summary["pinned_history"] is None:
        assert not list(folder.glob("*-host.jsonl"))
        return summary, []
    lines = (folder / summary["pinned_history"]).read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def replay(variables: dict[str, str], summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Its replay under two allocators; skips without the program."""
    program = Path(LIBRARY).with_name("vramlab")
    if not program.is_file():
        pytest.skip(f"{program} is not built")
    file = str(Path(variables["VRAMLAB_OUTPUT"]) / summary["pinned_history"])
    command = [program, "replay", file, "--host", "--json", "--alloc", "host-pytorch,host-exact"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def actions(lines: list[dict[str, Any]]) -> list[str]:
    return [line["action"] for line in lines]


ONE = """
hold(True)
first = pinned(3 * MIB + 1)
copy(first)
copy(first)
del first
second = pinned(3 * MIB + 1)
hold(False)
third = pinned(2 * MIB + 1)
del second, third
empty()
last = pinned(1000)
"""


def test_requests_uses_and_completions_are_written_in_order(variables: dict[str, str]) -> None:
    if "VRAMLAB_SHIM_DEVICE" not in variables:
        pytest.skip("a GPU completes copies when it wants")
    summary, lines = record(variables, ONE)
    expected = ["segment_alloc", "alloc", "record_use", "free_requested"]
    # The second request did not get the first block, whose copy was running; the third one did.
    expected += ["segment_alloc", "alloc", "free_completed", "alloc"]
    expected += ["free_requested", "free_requested", "segment_free", "segment_free", "segment_alloc", "alloc"]
    assert actions(lines) == expected
    first, second, third = (line for line in lines if line["action"] == "alloc" and line["size"] > MIB)
    assert (first["size"], first["addr"]) == (3 * MIB + 1, third["addr"])
    assert second["addr"] != first["addr"]
    assert first["frames"][0]["name"] == "pinned"
    assert lines[0]["allocator_settings"]["release"] == ".".join(summary["torch"].split(".")[:2])
    assert sum("allocator_settings" in line for line in lines) == 1
    assert [line["time_ns"] for line in lines] == sorted(line["time_ns"] for line in lines)
    (deferred,) = (line for line in lines if line.get("deferred"))
    assert deferred["addr"] == first["addr"]
    assert (summary["pinned_bytes"], summary["pinned_requested_bytes"]) == (8 * MIB, 5 * MIB + 2)
    pytorch, _ = replay(variables, summary)
    assert (pytorch["peak_reserved_bytes"], pytorch["differences"], pytorch["contradictions"]) == (8 * MIB, 0, 0)


CHURN = """
draw = random.Random(int(sys.argv[1]))
held, peak = [], 0
for turn in range(600):
    if draw.random() < 0.1:
        hold(draw.random() < 0.6)
    if len(held) < 12 and draw.random() < 0.6:
        held.append(pinned(1 + draw.randrange(1 << draw.randrange(8, 22))))
        peak = max(peak, torch.cuda.host_memory_stats()[KEY])
    elif held:
        block = held.pop(draw.randrange(len(held)))
        for _ in range(draw.choice((0, 1, 2))):
            copy(block)
        del block
    if draw.random() < 0.01:
        empty()
hold(False)
print(peak)
"""
KEY = 'KEY = "allocated_bytes.current" if torch.__version__ >= "2.10" else "reserved_bytes.current"\n'


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_a_replay_pins_what_pytorch_pinned(seed: str, variables: dict[str, str]) -> None:
    done = python(variables, "-c", BEGIN + KEY + CHURN, seed)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    peak = int(done.stdout)
    (process,) = Path(variables["VRAMLAB_OUTPUT"]).glob("*.process.json")
    summary = json.loads(process.read_text())
    pytorch, exact = replay(variables, summary)
    assert pytorch["allocations"] > 200
    assert pytorch["deferred_frees"] > 20
    assert pytorch["peak_reserved_bytes"] == pytorch["recorded_peak_reserved_bytes"] == peak
    assert (pytorch["differences"], pytorch["contradictions"]) == (0, 0)
    assert pytorch["peak_live_bytes"] == summary["pinned_requested_bytes"]
    assert exact["peak_reserved_bytes"] < peak


THREADS = """
def churn(seed):
    draw, held = random.Random(seed), []
    for _ in range(150):
        if len(held) < 4:
            held.append(pinned(1 + draw.randrange(MIB)))
        else:
            copy(held.pop(draw.randrange(4)))
running = [threading.Thread(target=churn, args=(seed,)) for seed in range(6)]
for thread in running:
    thread.start()
for thread in running:
    thread.join()
"""


def test_requests_of_threads_contradict_nothing(variables: dict[str, str]) -> None:
    summary, lines = record(variables, THREADS)
    assert actions(lines).count("alloc") > 300
    pytorch, exact = replay(variables, summary)
    assert pytorch["contradictions"] == exact["contradictions"] == 0
    assert pytorch["allocations"] == actions(lines).count("alloc")
    assert pytorch["peak_live_bytes"] == summary["pinned_requested_bytes"]


SERVED = """
import vramlab.torch
block = pinned(3 * MIB + 1)
copy(block)
del block
pinned(5 * MIB)
empty()
kept = pinned(1000)
"""


def test_requests_of_an_allocator_of_vramlab_have_no_segments(variables: dict[str, str]) -> None:
    summary, lines = record(variables, SERVED, VRAMLAB_HOST_ALLOC="host-exact")
    assert summary["host_allocator"] == "host-exact"
    sizes = [line["size"] for line in lines if line["action"] == "alloc"]
    assert sizes == [3 * MIB + 1, 5 * MIB, 1000]
    emptied = [(line["addr"], line["size"]) for line in lines if line["action"] == "segment_free"]
    assert emptied == [(0, 0)]
    assert "segment_alloc" not in actions(lines)
    assert actions(lines).count("record_use") == actions(lines).count("free_completed") == 1
    pytorch, exact = replay(variables, summary)
    assert pytorch["recorded_peak_reserved_bytes"] is None
    assert pytorch["peak_reserved_bytes"] == 12 * MIB
    assert exact["peak_reserved_bytes"] == summary["pinned_bytes"]


GRAPH = """
block = pinned(3 * MIB)
graph = torch.cuda.CUDAGraph()
target = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
with torch.cuda.graph(graph):
    target.copy_(block, non_blocking=True)
del block
empty()
others = [pinned(3 * MIB) for _ in range(2)]
child = os.fork()
if child == 0:
    del others
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_block_of_a_graph_never_completes_and_a_fork_writes_nothing(variables: dict[str, str]) -> None:
    _, lines = record(variables, GRAPH)
    first = next(line for line in lines if line["action"] == "alloc")
    of_graph = [line for line in lines if line["addr"] == first["addr"]]
    assert actions(of_graph) == ["segment_alloc", "alloc", "record_use", "free_requested"]
    assert of_graph[-1]["deferred"]
    # The child had the parent's two blocks.
    assert actions(lines).count("free_requested") == 1
    assert actions(lines).count("alloc") == 3


def test_a_program_that_pins_nothing_leaves_no_file(variables: dict[str, str]) -> None:
    summary, lines = record(variables, "torch.empty(1000, device='cuda')\nempty()\n")
    assert lines == []
    assert (summary["pinned_history"], summary["pinned_requested_bytes"]) == (None, 0)


UNWRITABLE = """
from pathlib import Path
from vramlab import _record
recording = _record.Recording(Path(sys.argv[1]) / "x.pickle")
recording.watch_pinned(Path(sys.argv[1]) / "missing" / "x-host.jsonl", served=False)
pinned(1000)
recording.write(Path(sys.argv[1]) / "x.pickle", last=True)
pinned(1000)
print(recording.pinned())
"""


def test_a_file_that_cannot_be_written_costs_one_line(variables: dict[str, str], tmp_path: Path) -> None:
    plain = {name: value for name, value in variables.items() if name != "VRAMLAB_OUTPUT"}
    done = python(plain, "-c", BEGIN + UNWRITABLE, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr
    assert done.stderr == f"vramlab: {tmp_path}/missing/x-host.jsonl is not written: No such file or directory\n"


def test_settings_of_pytorch_are_in_the_first_line(variables: dict[str, str]) -> None:
    conf = "pinned_use_cuda_host_register:True,pinned_num_register_threads:4,pinned_use_background_threads:True"
    _, lines = record(variables, "pinned(1000)\n", PYTORCH_CUDA_ALLOC_CONF=conf)
    settings = lines[0]["allocator_settings"]
    assert settings["pinned_num_register_threads"] == "4"
    assert settings["pinned_use_cuda_host_register"] == settings["pinned_use_background_threads"] == "on"
