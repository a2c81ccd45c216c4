"""The recorder with the real PyTorch, on a GPU or over a stand-in for CUDA: see `with_torch`."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import vramlab
from with_torch import HERE, SOURCE, compile_beside_torch, python, skip_without_torch

skip_without_torch()

ALLOCATORS = ["", "caching", "remap"]


@pytest.fixture
def variables(torch_variables: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return torch_variables | {"VRAMLAB_RECORDER": "own", "OUT": str(tmp_path)}


def under(allocator: str) -> dict[str, str]:
    """The variables that select an allocator for a program; skips if there is no library."""
    if not allocator:
        return {}
    try:
        return {"VRAMLAB_ALLOC": allocator, "VRAMLAB_LIBRARY": str(vramlab.library_path())}
    except ImportError as missing:
        pytest.skip(str(missing))


BEGIN = """import os, torch, vramlab
if os.environ.get("VRAMLAB_ALLOC"):
    import vramlab.torch
    vramlab.torch.use(os.environ["VRAMLAB_ALLOC"])
held = lambda size, device=0: torch.empty(size, device=f"cuda:{device}", dtype=torch.uint8)
"""


def run(variables: dict[str, str], script: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return python(variables, "-c", BEGIN + script, cwd=cwd, **more)


def read(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_programs_that_exceptions_leave_end_as_without_a_recorder(
    allocator: str, variables: dict[str, str], tmp_path: Path
) -> None:
    more = under(allocator)
    if allocator:
        variables = variables | {"PYTHONPATH": f"{SOURCE}/vramlab/_site:{SOURCE}"}
    plain = python(variables, "interrupted.py", **more)
    recorded = python(variables, "interrupted.py", str(tmp_path / "x.pickle"), **more)
    assert recorded.returncode == plain.returncode == 0, recorded.stderr
    assert recorded.stdout == plain.stdout
    assert "Error" not in plain.stdout
    assert len(read(tmp_path / "x.pickle")["device_traces"][0]) > 300


# PyTorch's own history records the same program simultaneously.
BESIDE = """
torch.cuda.init()
torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=1_000_000)
def serve(size):
    kept = [held(size) for _ in range(3)]
    return kept[1]
with vramlab.record("own.pickle"):
    kept = []
    for size in (1, 511, 3000, 1 << 20, 11 << 20, 33 << 20):
        kept.append((lambda size: serve(size))(size))
        side = torch.cuda.Stream()
        kept[-1].record_stream(side)
        with torch.cuda.stream(side):
            kept.append(held(size))
        del kept[0]
    torch.cuda.empty_cache()
    torch.cuda.memory._dump_snapshot("theirs.pickle")
"""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_events_and_frames_are_those_of_pytorchs_history(
    allocator: str, variables: dict[str, str], tmp_path: Path
) -> None:
    done = run(variables, BESIDE, tmp_path, **under(allocator))
    assert done.returncode == 0, done.stderr
    own, theirs = (read(tmp_path / f"{name}.pickle") for name in ("own", "theirs"))

    def events(snapshot: Any) -> list[Any]:
        listed = [event for event in snapshot["device_traces"][0] if event["action"] != "snapshot"]
        return [(event["action"], event["addr"], event["size"], event["stream"]) for event in listed]

    assert events(own) == events(theirs)
    assert {event[0] for event in events(own)} >= {"alloc", "free_requested", "free_completed"}

    def frames(snapshot: Any) -> list[Any]:
        # PyTorch's calls of empty_cache have no frames unless frees have them.
        listed = [event for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
        return [[(one["filename"], one["line"], one["name"]) for one in event["frames"]] for event in listed]

    assert frames(own) == frames(theirs)
    assert not any(event.get("frames") for event in own["device_traces"][0] if event["action"].startswith("free"))
    assert own["allocator_settings"] == theirs["allocator_settings"]
    times = [event["time_us"] for event in own["device_traces"][0]]
    assert times == sorted(times)


CAPTIONS = """
torch.cuda.init()
with vramlab.record("x.pickle"):
    with torch.profiler.record_function("l\\u00e4dt"):
        first = held(5000)
    second = held(3 << 20, device=1)
"""


def test_ranges_and_each_gpu_are_recorded(variables: dict[str, str], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    # Some of these characters are line breaks.
    folder = tmp_path / "a\u2028b\nc.d"
    folder.mkdir()
    done = run(variables, CAPTIONS, folder)
    assert done.returncode == 0, done.stderr
    first, second = read(folder / "x.pickle"), read(folder / "x.gpu1.pickle")
    stages = [(one["name"], one["stage"]) for one in first["external_annotations"]]
    assert stages == [("lädt", "START"), ("lädt", "END")]
    assert [len(trace) for trace in first["device_traces"]] == [2]
    assert [len(trace) for trace in second["device_traces"]] == [0, 2]
    assert {segment["device"] for segment in second["segments"]} == {1}


def test_frames_are_for_blocks_of_a_size_or_none(variables: dict[str, str], tmp_path: Path) -> None:
    for options, count in [("frames_from=1 << 20", 1), ("frames='none'", 0), ("frames='all'", 2)]:
        script = f"torch.cuda.init()\nwith vramlab.record('x.pickle', {options}):\n    held(999), held(1 << 20)\n"
        done = run(variables, script, tmp_path)
        assert done.returncode == 0, done.stderr
        events = read(tmp_path / "x.pickle")["device_traces"][0]
        allocations = [event for event in events if event["action"] == "alloc"]
        assert len(allocations) == 2
        assert sum("frames" in event for event in allocations) == count


ENDLESS = """
import time
vramlab.record("x.pickle").__enter__()
torch.cuda.init()
print("began", flush=True)
kept = [held(5000) for _ in range(100)]
time.sleep(600)
"""


def test_what_was_recorded_before_a_kill_is_there(variables: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import torch, vramlab\nheld = lambda n: torch.empty(n, device='cuda')\n" + ENDLESS,
    ]
    with subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        file = tmp_path / "x.pickle"
        for _ in range(600):
            if file.exists() and file.stat().st_size > 2000:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    raw = file.read_bytes()
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        pickle.loads(raw)
    assert raw.count(b"h\x0f") + raw.count(b"q\x0f") > 10  # the word `alloc`
    assert file.stat().st_mode & 0o777 == 0o600


FULL = """
torch.cuda.init()
try:
    with vramlab.record("/dev/full"):
        kept = [held(5000) for _ in range(20)]
except OSError as error:
    print(error.strerror)
with vramlab.record("after.pickle"):
    held(10)
print(len(kept))
"""


def test_a_full_disk_ends_the_recording_and_not_the_program(variables: dict[str, str], tmp_path: Path) -> None:
    done = run(variables, FULL, tmp_path)
    assert (done.returncode, done.stdout) == (0, "No space left on device\n20\n"), done.stderr
    assert len(read(tmp_path / "after.pickle")["device_traces"][0]) > 0


TWICE = """
import threading
torch.cuda.init()
with vramlab.record("outer.pickle"):
    held(1000)
    with vramlab.record("inner.pickle"):
        held(2000)
    threads = [threading.Thread(target=lambda: [held(3000) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    child = os.fork()
    if child == 0:
        # Leaves the blocks by an exception, as it does in the parent.
        raise SystemExit(0)
    os.waitpid(child, 0)
    held(4000)
"""


def test_threads_forks_and_a_recording_in_another(variables: dict[str, str], tmp_path: Path) -> None:
    done = run(variables, TWICE, tmp_path, VRAMLAB_RECORDER="")
    assert done.returncode == 0, done.stderr
    assert "this process is recorded already" in done.stderr
    sizes = [event["size"] for event in read(tmp_path / "outer.pickle")["device_traces"][0]]
    assert {1000, 2000, 4000} <= set(sizes)
    assert sizes.count(3000) == 3 * 4000
    assert 2000 in [event["size"] for event in read(tmp_path / "inner.pickle")["device_traces"][0]]


LOCKED = """
import ctypes, sys, threading
torch.cuda.init()
held(10)
# Calls of CDLL release Python's lock, those of PyDLL keep it.
def allocate():
    ctypes.CDLL(sys.argv[1]).allocate_when_told()
with vramlab.record("x.pickle"):
    thread = threading.Thread(target=allocate)
    thread.start()
    print(ctypes.PyDLL(sys.argv[1]).tell_and_wait(30))
    thread.join()
"""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_frames_are_read_without_pythons_lock(allocator: str, variables: dict[str, str], tmp_path: Path) -> None:
    library = tmp_path / "locked.so"
    compile_beside_torch(HERE / "locked.cpp", library)
    script = tmp_path / "script.py"
    script.write_text(BEGIN + LOCKED)
    done = python(variables, str(script), str(library), cwd=tmp_path, **under(allocator))
    assert done.stdout == "1\n", done.stderr
    (event,) = [one for one in read(tmp_path / "x.pickle")["device_traces"][0] if one["action"] == "alloc"]
    assert "allocate" in [frame["name"] for frame in event["frames"]]


LONG = """
import resource
torch.cuda.init()
kept = [held(1 << 20)]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with vramlab.record("x.pickle"):
    held(1000)
    before = peak()
    for _ in range(100_000):
        held(1000)
    print(peak() - before)
"""


def test_the_hosts_memory_does_not_grow_with_the_events(variables: dict[str, str], tmp_path: Path) -> None:
    done = run(variables, LONG, tmp_path)
    assert done.returncode == 0, done.stderr
    # Much less than the size of the file.
    assert int(done.stdout) < 8_000
    assert len(read(tmp_path / "x.pickle")["device_traces"][0]) >= 300_000


def test_the_processes_of_a_run_leave_whole_recordings(variables: dict[str, str], tmp_path: Path) -> None:
    script = "import torch\nkept = torch.empty(5000, device='cuda')\n"
    script += "import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\nmore = torch.empty(9000, device='cuda')\n"
    more = {"PYTHONPATH": f"{SOURCE}/vramlab/_site:{SOURCE}", "VRAMLAB_OUTPUT": str(tmp_path), "VRAMLAB_RUN": "r"}
    done = python(variables, "-c", script, cwd=HERE, **more)
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.process.json")]
    files = {snapshot["why"]: tmp_path / snapshot["file"] for snapshot in record["snapshots"]}
    assert list(files) == ["signal", "exit"]
    early, late = (read(files[why])["device_traces"][0] for why in ("signal", "exit"))
    assert late[: len(early)] == early
    assert [event["size"] for event in late if event["action"] == "alloc"] == [20_000, 36_000]


PINNED = """
import torch
torch.cuda.init()
blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (3 << 20, (5 << 20) + 1)]
del blocks
torch.empty(1000, dtype=torch.uint8, pin_memory=True)
"""


@pytest.mark.parametrize("host", ["", "host-exact"])
def test_the_record_has_what_was_requested_of_pinned_memory(
    host: str, variables: dict[str, str], tmp_path: Path
) -> None:
    more = {"PYTHONPATH": f"{SOURCE}/vramlab/_site:{SOURCE}", "VRAMLAB_OUTPUT": str(tmp_path), "VRAMLAB_RUN": "r"}
    if host:
        try:
            more |= {"VRAMLAB_HOST_ALLOC": host, "VRAMLAB_LIBRARY": str(vramlab.library_path())}
        except ImportError as missing:
            pytest.skip(str(missing))
    done = python(variables, "-c", PINNED, **more)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    (file,) = tmp_path.glob("*.process.json")
    record = json.loads(file.read_text())
    assert record["host_allocator"] == (host or None)
    mib = 1 << 20
    assert record["pinned_requested_bytes"] == 8 * mib + 1
    # PyTorch rounds to powers of two, and pins 1 KiB for the last.
    assert record["pinned_bytes"] == (8 * mib + 4096 if host else 12 * mib + 1024)
