"""The recorder of the held-out programs: its programs and settings are those measured, and it refuses bad input."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "experiments/pytorch/programs/heldout"


@pytest.fixture
def record(monkeypatch):
    """The module `record`, which needs no PyTorch to be imported."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import record

    yield record
    for name in ("record", "record_settings"):
        del sys.modules[name]


def measured():
    """The measurements of the first held-out programs."""
    lines = (ROOT / "experiments/results/advise-truth.jsonl").read_text().splitlines()
    runs = [run for line in lines if (run := json.loads(line))["set"] == "heldout"]
    return [run for run in runs if run["recorded_after"] == runs[0]["recorded_after"]]


def test_the_measured_programs_and_settings_are_recorded(record):
    runs = measured()
    assert set(record.NAMES) == {run["program"] for run in runs}
    assert sorted(record.SETTINGS.values()) == sorted({run["conf"] for run in runs})


def test_each_program_has_a_function(record):
    functions = {
        node.name for node in ast.parse((FOLDER / "programs.py").read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert functions == set(record.NAMES)


def test_a_record_names_its_command_and_day(record, monkeypatch):
    settings = sys.modules["record_settings"]
    monkeypatch.setattr(
        settings, "provenance", lambda: {"git_commit": "0123456789ab", "git_dirty": True, "host_hash": "ab"}
    )
    origin = settings.origin()
    assert origin["commit"] == "01234567-dirty"
    assert origin["host"] == "ab"
    assert "driver" not in origin
    assert len(origin["date"]) == 10
    assert origin["command"].startswith("python3 ")


# A substitute for PyTorch on a GPU: its statistics are fixed, and memory runs out under a limit.
TORCH = """
import os, types
class OutOfMemoryError(RuntimeError): pass
calls = []
history = lambda **words: calls.append(words)
memory = types.SimpleNamespace(_record_memory_history=history, _snapshot=lambda: {"calls": calls})
stats = {"reserved_bytes.all.peak": 3 << 20, "active_bytes.all.peak": 2 << 20, "a.small.b": 1, "ratio": 0.5}
properties = types.SimpleNamespace(total_memory=1 << 30)
cuda = types.SimpleNamespace(
    is_available=lambda: True, init=lambda: None, synchronize=lambda: None, memory=memory,
    get_device_properties=lambda number: properties, get_device_name=lambda: "GPU",
    set_per_process_memory_fraction=lambda share: calls.append(share),
    memory_stats=lambda: stats,
)
__version__ = "2.11"
device = str
def manual_seed(seed): pass
"""
WORKLOADS = """
import os, torch
def run(*words):
    if os.environ.get("PYTORCH_ALLOC_CONF", "").startswith("garbage"):
        raise torch.OutOfMemoryError("no memory")
    return [1]
WORKLOADS = dict.fromkeys(("generate", "moe"), run)
"""


def test_each_setting_has_a_process_and_a_file(tmp_path):
    """`record_settings.py` over substitutes for PyTorch and the programs: limits follow from the defaults."""
    baselines = ROOT / "experiments/pytorch/baselines"
    # The substitutes are next to the script, whose directory is first on the path.
    for name in ("record_settings", "record_histories", "run_record", "command_line"):
        shutil.copy(baselines / f"{name}.py", tmp_path)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "settings_workloads.py").write_text(WORKLOADS)
    script = tmp_path / "record_settings.py"
    command = [sys.executable, script, "-o", tmp_path / "out", "--only", "generate", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert len(found) == 10
    assert found["generate.limit"]["limit_mib"] == int(2 + 0.35) + 1
    assert found["generate.default"]["stats"] == {"reserved_bytes.all.peak": 3 << 20, "active_bytes.all.peak": 2 << 20}
    assert found["generate.gc"]["oom"] == "no memory"
    assert found["generate.split32"]["conf"] == "max_split_size_mb:32"
    assert all(one["date"] and one["command"] for one in found.values())
    assert [path.name for path in (tmp_path / "out").glob("*.xz")] == ["generate.default.pickle.xz"]


def test_an_unknown_program_is_refused_in_one_line(tmp_path):
    command = [sys.executable, FOLDER / "record.py", "-o", tmp_path, "--only", "unheard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
