"""Lives of blocks, segments and levels, and latency histograms."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from vramlab_analysis import calls, histograms, histories
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.records import load_run

BASE = 0x7F00_0000_0000


def test_each_allocation_finds_its_own_free(run_folder: Path) -> None:
    blocks = histories.lives(load_run(run_folder).trace)
    assert blocks.height == 11
    assert blocks["end_ns"].null_count() == 1
    assert blocks.filter(addr=BASE)["end_ns"].to_list() == [None]
    returning = blocks.filter(addr=BASE + 2**20)
    assert (returning["end_ns"] - returning["start_ns"]).unique().to_list() == [50_000]


def test_levels_follow_the_operations(run_folder: Path) -> None:
    run = load_run(run_folder)
    levels = histories.levels(run.trace)
    assert levels["requested"].to_list() == [1_000_000, *[1_004_000, 1_000_000] * 10]
    assert levels["allocated"].max() == 2**20 + 4096
    assert histories.segments(run.calls).rows() == [(BASE, 2 * 2**20, 1500, None)]
    assert histories.reserved(run.calls).rows() == [(1500, 2 * 2**20)]


def test_address_space_that_nothing_uses_is_left_out() -> None:
    place, regions = histories.compacted([BASE, 0x1000, BASE + 512, 0x1200], [512, 512, 512, 512])
    assert place.tolist() == [1024, 0, 1536, 512]
    assert [(start, length, at) for start, length, at in regions] == [(0x1000, 1024, 0), (BASE, 1024, 1024)]


def test_a_window_that_is_not_in_the_run(run_folder: Path) -> None:
    steps = load_run(run_folder).steps
    assert histories.window(steps, 1, 2) == (250_000, 750_000)
    with pytest.raises(AnalysisError, match="the run has 4 steps"):
        histories.window(steps, 8, 9)


def test_the_window_of_the_first_step_begins_with_the_run(run_folder: Path) -> None:
    steps = load_run(run_folder).steps
    assert histories.window(steps, 0, 0) == (0, 250_000)
    assert histories.window(steps, 0, 2) == (0, 750_000)
    assert histories.window(steps, 3, 9) == (750_000, 1_000_000)
    assert histories.window(steps.head(1), 0, 0) == (0, 250_000)
    with pytest.raises(AnalysisError, match="the run has 1 step, so"):
        histories.window(steps.head(1), 1, 3)


def test_calls_are_divided_by_the_steps_that_the_run_has(run_folder: Path) -> None:
    """The run has 4 steps; its last two made five launches and five waits."""
    run = load_run(run_folder)
    for last in (3, 9):
        rows = calls.account_of_steps(run, 2, last).select("call", "calls").sort("call").rows()
        assert rows == [("kernel_launch", 2.5), ("stream_synchronize", 2.5)], last


def test_histograms_come_back_as_they_were_recorded(run_folder: Path) -> None:
    recorded = load_run(run_folder).histograms
    assert [(one.operation, one.path, one.count) for one in recorded] == [
        ("allocate", "driver_alloc", 20),
        ("allocate", "hit", 80),
        ("deallocate", "hit", 100),
    ]
    allocate = [one for one in recorded if one.operation == "allocate"]
    assert histograms.percentile(allocate, 0.5) == 50
    assert histograms.percentile(allocate, 0.99) == pytest.approx(1000, rel=1e-3)
    assert histograms.percentile(allocate, 1.0) == pytest.approx(30_000, rel=1e-3)


def test_a_spectrum_is_a_step_function_of_the_share(run_folder: Path) -> None:
    recorded = load_run(run_folder).histograms
    whole = histograms.spectrum(recorded, "all").filter(operation="allocate")
    assert whole["percentile"].to_list() == pytest.approx([0, 0.8, 0.8, 0.99, 0.99, 1.0])
    assert np.diff(whole["value_ns"].to_numpy()).min() >= 0
    phases = histograms.spectrum(recorded, "phase").filter(operation="allocate")
    assert dict(phases.select("group", "count").unique().rows()) == {"cold": 20, "steady": 80}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no histogram"),
        ("Tag=a.b,0.000,1.000\n", "is it truncated"),
        ("Tag=a.b,0.000,1.000,5.000,HISTFAAAAnonsense\n", "not a histogram"),
        ("Tag=a.b,zero,1.000,5.000,HISTFAAAA\n", "not a number"),
    ],
)
def test_a_log_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "latency.hlog"
    path.write_text(text)
    with pytest.raises(AnalysisError, match=said):
        histograms.load(path)


# The check of snapshots unpickles nothing that could run a program, and gives no such file to PyTorch's script.


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "analysis/check_memory_viz.py"
SNAPSHOT: dict[str, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_memory_viz", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runs:
    """An object that runs a program when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def wheel(folder: Path) -> Path:
    """A wheel with a script that unpickles a file, as PyTorch's does."""
    path = folder / "torch.whl"
    with zipfile.ZipFile(path, "w") as archive:
        text = "import pickle, sys\nprint(pickle.load(open(sys.argv[2], 'rb')))\n"
        archive.writestr("torch/cuda/_memory_viz.py", text)
    return path


def hostile(mark: Path) -> dict[str, bytes]:
    """Files that run a program when they are unpickled, or are not snapshots."""
    command = f"touch {mark}"
    return {
        "reduce": pickle.dumps({**SNAPSHOT, "segments": [Runs(command)]}, 4),
        "protocol 0": pickle.dumps(Runs(command), 0),
        "global": b"cos\nsystem\n(V" + command.encode() + b"\ntR.",
        "inst": b"(V" + command.encode() + b"\nios\nsystem\n.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"Pid\n.",
        "cut off": pickle.dumps(SNAPSHOT, 4)[:-9],
        "empty": b"",
        "no mark": b"\x80\x04]e.",
        "no snapshot": pickle.dumps([1, 2], 4),
        "text": b"\x1b]0;title\x07 not a pickle",
    }


@pytest.mark.parametrize("kind", list(hostile(Path("x"))))
def test_a_hostile_file_is_not_loaded(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(hostile(mark)[kind])
    done = subprocess.run(
        [sys.executable, SCRIPT, "--wheel", wheel(tmp_path), path], capture_output=True, text=True, check=False
    )
    assert not mark.exists()
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("FAILED ")
    assert "not loaded" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_unpickler_builds_data_only(check: ModuleType, tmp_path: Path) -> None:
    assert check.load(pickle.dumps(SNAPSHOT, 4)) == SNAPSHOT
    mark = tmp_path / "mark"
    for kind in ("reduce", "protocol 0", "global", "inst", "stack global", "persistent"):
        with pytest.raises(pickle.UnpicklingError):
            check.load(hostile(mark)[kind])
    assert not mark.exists()
