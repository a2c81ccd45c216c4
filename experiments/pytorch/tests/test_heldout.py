"""The recorder of the held-out programs: its programs and settings are those measured, and it refuses bad input."""

import ast
import json
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
    del sys.modules["record"]


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
    monkeypatch.setattr(
        record, "provenance", lambda: {"git_commit": "0123456789ab", "git_dirty": True, "host_hash": "ab"}
    )
    origin = record.origin()
    assert origin["commit"] == "01234567-dirty"
    assert origin["host"] == "ab"
    assert "driver" not in origin
    assert len(origin["date"]) == 10
    assert origin["command"].startswith("python3 ")


def test_an_unknown_program_is_refused_in_one_line(tmp_path):
    command = [sys.executable, FOLDER / "record.py", "-o", tmp_path, "--only", "unheard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
