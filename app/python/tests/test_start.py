"""The start hook `vramlab._start` in a process, over a stand-in for PyTorch."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import FAKE, HISTORY, PACKAGE, Place

USES_CUDA = "import torch\ntorch.cuda.init()\n"


def wait_for(place: Place, pattern: str) -> Path:
    """Waits for a file that matches a pattern and returns the first one."""
    for _ in range(1000):
        if found := sorted(place.out.glob(pattern)):
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no {pattern} came: {place.files()}")


def test_a_process_without_torch_is_left_alone(place: Place) -> None:
    out, err = place.run(
        "import sys, signal\nprint(sorted(m for m in sys.modules if 'torch' in m), signal.getsignal(10))"
    )
    assert (out, err) == ("[] 0\n", "")
    assert place.files() == []


def test_torch_without_cuda_leaves_no_file_and_cuda_is_not_begun(place: Place) -> None:
    place.run("import torch")
    assert place.files() == []
    assert place.calls() == []


def test_the_history_begins_with_cuda_and_a_snapshot_comes_at_the_end(place: Place) -> None:
    out, err = place.run(USES_CUDA + "print('as ever')", FAKE_SNAPSHOT=str(HISTORY), VRAMLAB_EVENTS="1234")
    assert (out, err) == ("as ever\n", "")
    history, begun, ended = place.calls()
    assert begun == ["init"]
    # Threads that exit after Python would wait for it to gather frames.
    assert ended[:2] == ["history", None]
    assert history == ["history", "all", {"context": "alloc", "stacks": "python", "max_entries": 1234}]
    assert place.files() == ["pid.pickle", "pid.process.json"]
    record = place.record()
    assert (record["state"], record["rank"], record["run"]) == ("ended", None, "a-run")
    assert [one["why"] for one in record["snapshots"]] == ["exit"]
    (gpu,) = record["devices"]
    assert gpu["stats"]["reserved_bytes.all.peak"] == 300 << 20
    with (place.out / record["snapshots"][0]["file"]).open("rb") as file:
        assert pickle.load(file)["device_traces"]


def test_pinned_memory_is_recorded_where_pytorch_can(place: Place) -> None:
    newer = """
import torch
before = torch.cuda.memory._record_memory_history
def record(enabled="all", record_pinned_host_memory=False, **options):
    before(enabled, pinned=record_pinned_host_memory, **options)
torch.cuda.memory._record_memory_history = record
torch.cuda.init()
"""
    place.run(newer)
    assert place.calls("history")[0][2]["pinned"] is True
    assert place.record()["pinned_bytes"] == 64 << 20


@pytest.mark.parametrize(("frames", "context"), [("none", None), ("alloc", "alloc")])
def test_frames_are_as_asked_for(place: Place, frames: str, context: str | None) -> None:
    place.run(USES_CUDA, VRAMLAB_FRAMES=frames)
    assert place.calls("history")[0][2]["context"] == context


def test_an_out_of_memory_leaves_snapshots_of_the_first_ones(place: Place) -> None:
    script = """
for _ in range(5):
    try:
        torch.cuda.run_out_of_memory()
    except torch.cuda.OutOfMemoryError:
        pass
torch.cuda.run_out_of_memory()
"""
    _, err = place.run(USES_CUDA + script, code=1)
    assert "CUDA out of memory" in err
    assert place.files() == [*(f"pid.out-of-memory-{n}.pickle" for n in (1, 2, 3)), "pid.pickle", "pid.process.json"]
    assert place.record()["devices"][0]["stats"]["num_ooms"] == 6


def test_a_signal_asks_for_a_snapshot_and_the_programs_own_handler_is_called(place: Place) -> None:
    script = (
        USES_CUDA
        + """
import signal, time
told = []
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
assert signal.signal(signal.SIGUSR1, lambda *_: told.append(1)) == signal.SIG_DFL
assert callable(signal.getsignal(signal.SIGUSR1))
while not told:
    time.sleep(0.01)
print(told)
"""
    )
    process = place.start(script)
    wait_for(place, "*.process.json")
    # The recording's handler runs before the program's, whichever is set first.
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "[1]\n", "")
    assert place.files() == ["pid.pickle", "pid.process.json", "pid.signal-1.pickle"]


def test_a_handler_from_before_is_kept(place: Place) -> None:
    script = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("theirs", flush=True))
import torch
os.kill(os.getpid(), signal.SIGUSR1)
torch.cuda.init()
os.kill(os.getpid(), signal.SIGUSR1)
"""
    assert place.run(script)[0] == "theirs\ntheirs\n"
    # Without CUDA nothing is recorded.
    assert place.files() == ["pid.pickle", "pid.process.json", "pid.signal-1.pickle"]


def test_a_snapshot_comes_every_so_often(place: Place) -> None:
    process = place.start(USES_CUDA + "import time\ntime.sleep(60)", VRAMLAB_EVERY="0.05")
    wait_for(place, "*.every-2.pickle")
    process.kill()
    process.communicate()
    left = [name for name in place.files() if not name.endswith((".pickle", ".process.json", ".partial"))]
    assert left == []
    for path in place.out.glob("*.pickle"):
        with path.open("rb") as file:
            assert pickle.load(file)["segments"] == []
    assert place.record()["state"] == "running"


def test_each_rank_has_its_own_files(place: Place) -> None:
    place.run(USES_CUDA, RANK="3", LOCAL_RANK="1")
    assert place.files() == ["rank3-pid.pickle", "rank3-pid.process.json"]
    assert place.record()["rank"] == 3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_are_recorded_where_they_use_cuda(place: Place, method: str) -> None:
    script = f"""
import multiprocessing
def work(uses):
    import torch
    if uses:
        torch.cuda.init()
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    for uses in (True, False):
        child = context.Process(target=work, args=(uses,))
        child.start()
        child.join()
        assert child.exitcode == 0
    import torch
"""
    _, err = place.run(script)
    assert err == ""
    assert place.files() == ["pid.pickle", "pid.process.json"]
    assert place.record()["state"] == "ended"


def test_a_fork_after_cuda_was_used_writes_nothing_in_its_parents_name(place: Place) -> None:
    script = (
        USES_CUDA
        + """
import os, sys, signal
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    sys.exit(0)
os.waitpid(child, 0)
print(os.getpid())
"""
    )
    out, _ = place.run(script)
    assert place.files() == ["pid.pickle", "pid.process.json"]
    assert str(place.record()["pid"]) == out.strip()


def test_steps_of_the_optimizer_that_steps_most_are_timed(place: Place) -> None:
    script = (
        USES_CUDA
        + """
often, seldom = torch.optim.Optimizer(), torch.optim.Optimizer()
for at in range(6):
    often.step()
    if at % 3 == 0:
        seldom.step()
"""
    )
    place.run(script, VRAMLAB_STEPS="1")
    times = place.record()["step_ns"]
    assert len(times) == 5
    assert min(times) >= 1_000_000
    for record in place.out.iterdir():
        record.unlink()
    place.run(script)
    assert place.record()["step_ns"] == []


def test_a_limit_is_set_on_the_gpu_of_the_process_alone(place: Place) -> None:
    limit = 20 << 30
    place.run(USES_CUDA + "torch.cuda.set_device(1)", VRAMLAB_LIMIT=str(limit))
    assert place.calls("fraction") == [["fraction", 0.25, 0], ["fraction", 0.25, 1]]
    (place.folder / "calls").unlink()
    place.run("import torch\ntorch.cuda.set_device(1)", VRAMLAB_LIMIT=str(limit), LOCAL_RANK="1", RANK="1")
    assert place.calls("fraction") == [["fraction", 0.25, 1]]
    (place.folder / "calls").unlink()
    # The limit applies to the first selected GPU, without creating a context on another one.
    place.run("import torch\ntorch.cuda.set_device(1)", VRAMLAB_LIMIT=str(limit))
    assert place.calls("fraction") == [["fraction", 0.25, 1]]


def test_what_cannot_be_written_is_said_and_the_program_goes_on(place: Place) -> None:
    out, err = place.run(USES_CUDA + "print('on')", VRAMLAB_OUTPUT=str(place.folder / "gone"))
    assert out == "on\n"
    assert "vramlab: " in err
    assert "gone" in err
    out, err = place.run(USES_CUDA + "print('on')", FAKE_SNAPSHOT_FAILS="1")
    assert out == "on\n"
    assert "pickle is not written: RuntimeError: no snapshot today" in err
    assert place.files() == ["pid.process.json"]


def test_an_allocator_that_cannot_be_had_ends_the_program(place: Place) -> None:
    # No shim can be compiled for the stand-in.
    out, err = place.run("import torch\nprint('ran')", code=2, VRAMLAB_ALLOC="caching")
    assert out == ""
    assert err.startswith("vramlab: caching cannot be put under PyTorch: ")
    assert len(err.splitlines()) == 1


def test_the_users_own_sitecustomize_runs_too(place: Place) -> None:
    own = place.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")
    path = os.pathsep.join([str(PACKAGE / "_site"), str(own), str(FAKE)])
    script = "import sys, sitecustomize\nprint(sys.theirs == sitecustomize.__file__)\n"
    script += "print([p for p in sys.path if p.endswith('_site')])\n" + USES_CUDA
    out, err = place.run(script, PYTHONPATH=path)
    assert (out, err) == ("True\n[]\n", "")
    assert place.files() == ["pid.pickle", "pid.process.json"]


def test_the_import_of_torch_is_as_without(place: Place) -> None:
    script = """
import sys, importlib
spec = importlib.util.find_spec("torch")
import torch
loader = torch.__spec__.loader
print(type(loader).__name__, torch.__loader__ is loader, "exec_module" in vars(loader))
print([f for f in sys.meta_path if "vramlab" in type(f).__module__])
"""
    out, _ = place.run("import importlib.util\n" + script)
    assert out == "SourceFileLoader True False\n[]\n"


def test_a_torch_that_cannot_be_imported_says_so_itself(place: Place) -> None:
    broken = place.folder / "broken"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch/__init__.py").write_text("raise ImportError('libcudart is gone')\n")
    path = os.pathsep.join([str(PACKAGE / "_site"), str(broken)])
    script = "try:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
    script += "try:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
    out, err = place.run(script, PYTHONPATH=path)
    assert (out, err) == ("libcudart is gone\n" * 2, "")


def installed(folder: Path, *, package: bool = True, pth: bool = True) -> Path:
    """A directory like `site-packages`, with all or some of the package's files."""
    folder.mkdir()
    if package:
        shutil.copytree(PACKAGE, folder / "vramlab", ignore=shutil.ignore_patterns("__pycache__"))
    if pth:
        shutil.copy(PACKAGE.parents[1] / "vramlab.pth", folder)
    return folder


def loaded(site: Path, **variables: str) -> tuple[str, str]:
    """The modules and finders of vramlab in a process that reads a directory's .pth files, and its stderr."""
    script = f"""
import site, sys
before = list(sys.meta_path)
site.addsitedir({str(site)!r})
names = sorted(name for name in sys.modules if name.startswith("vramlab"))
print(*names, *(type(finder).__name__ for finder in sys.meta_path if finder not in before))
"""
    others = {key: value for key, value in os.environ.items() if not key.startswith(("VRAMLAB_", "PYTHON"))}
    # Other installed copies of vramlab must not be read.
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, env=others | variables, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("variables", [{}, {"VRAMLAB_ALLOC": ""}, {"VRAMLAB_LIBRARY": "/no/library"}])
def test_the_pth_loads_nothing_unless_a_variable_asks_for_it(tmp_path: Path, variables: dict[str, str]) -> None:
    assert loaded(installed(tmp_path / "site"), **variables) == ("", "")


@pytest.mark.parametrize("variable", ["VRAMLAB_ALLOC", "VRAMLAB_HOST_ALLOC", "VRAMLAB_OUTPUT"])
def test_the_pth_watches_for_torch_where_a_variable_asks_for_it(tmp_path: Path, variable: str) -> None:
    assert loaded(installed(tmp_path / "site"), **{variable: "x"}) == ("vramlab vramlab._start _AfterImport", "")


def test_a_half_removed_package_is_silent(tmp_path: Path) -> None:
    asks = {"VRAMLAB_ALLOC": "caching"}
    assert loaded(installed(tmp_path / "pth", package=False), **asks) == ("", "")
    assert loaded(installed(tmp_path / "package", pth=False), **asks) == ("", "")
    # pip keeps a directory into which a program wrote its own files.
    rest = installed(tmp_path / "rest", package=False)
    (rest / "vramlab" / "__pycache__").mkdir(parents=True)
    assert loaded(rest, **asks) == ("vramlab", "")


def test_an_error_of_the_package_itself_is_shown(tmp_path: Path) -> None:
    site = installed(tmp_path / "site")
    (site / "vramlab" / "_start.py").write_text("import no_such_module\n")
    _, err = loaded(site, VRAMLAB_ALLOC="caching")
    assert "no_such_module" in err
