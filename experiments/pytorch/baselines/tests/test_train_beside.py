"""`train_beside.py` without a GPU: its plan, resuming after a killed call, and a cell with substitute arms."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

beside = importlib.import_module("train_beside")


class Made:
    """A substitute for PyTorch's process, whose time is its name."""

    def __init__(self, arm, width, dtype, folder, options):
        self.arm, self.ended = arm, False

    def answer(self):
        if self.arm == "autotune":
            raise beside.Failed("it does not compile")
        return {"ready": "2.11"}

    def time(self):
        return {"us": float(len(self.arm)), "loss": 0.5}

    def end(self):
        self.ended = True


def made(arm, *_):
    """The trainer's substitute time, in an arm of ours."""
    us = {"ours": 4.0, "ours-streams": 2.0}[arm]
    return {"us": us, "loss": 0.5, "provenance": {"git_commit": "abc"}, "settings": {"of": arm}}


def cell(monkeypatch, width, dtype):
    monkeypatch.setattr(beside, "Theirs", Made)
    monkeypatch.setattr(beside, "ours", made)
    return beside.cell(width, dtype, Namespace(arms=list(beside.ARMS), rounds=3))


def test_a_cell_has_every_time_of_every_arm_and_says_which_failed(monkeypatch):
    told = cell(monkeypatch, 2048, "f16")
    assert {arm: len(one["us"]) for arm, one in told["arms"].items()} == dict.fromkeys(
        ("ours", "captured", "compiled", "compiled-plain"), 3
    )
    assert told["failed"] == {"autotune": "it does not compile"}
    assert told["best"] in ("captured", "compiled")
    assert told["ratio"] == 0.5
    assert told["provenance"] == {"git_commit": "abc"}


def test_the_fastest_of_ours_that_computes_alike_is_compared(monkeypatch):
    told = cell(monkeypatch, 1024, "f32")
    assert told["ratio"] == 0.25
    assert told["settings"] == {"of": "ours"}


def test_the_middle_half_is_of_the_values():
    assert beside.middle([1.0, 2.0, 3.0, 4.0, 100.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert beside.middle([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}


def test_cells_that_the_file_has_are_not_planned_again_and_a_cut_line_is(tmp_path):
    path = tmp_path / "beside.jsonl"
    whole = json.dumps({"kind": "cell", "width": 128, "dtype": "f16", "took_s": 10.0}) + "\n"
    path.write_text(whole + '{"kind": "cell", "width": 1024, "dt')
    command = [sys.executable, str(HERE / "train_beside.py"), "-o", str(path), "--plan", "--types", "f16", "--widths", "128,1024"]
    told = subprocess.run(command, capture_output=True, text=True)
    arms = ", ".join(beside.ARMS)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == ["1 cells, about 10 s when compiled", f"f16 1024: {arms}"]
    assert path.read_text() == whole


def test_an_arm_that_is_gone_is_refused(tmp_path):
    command = [sys.executable, str(HERE / "train_beside.py"), "-o", str(tmp_path / "x.jsonl"), "--arms", "ours,ours-tensor"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2
    assert "'ours-tensor': write some of ours, ours-streams," in told.stderr


def test_a_trainer_that_is_not_there_is_said(tmp_path):
    command = [sys.executable, str(HERE / "train_beside.py"), "-o", str(tmp_path / "x.jsonl"), "--trainer", str(tmp_path / "none")]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2
    assert "no such file" in told.stderr
