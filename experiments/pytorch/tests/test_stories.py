"""The plan of the stories, and resuming from the file of a killed call."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

stories = importlib.import_module("stories")


def test_each_round_has_every_arm_once_and_recordings_come_first():
    tasks = stories.planned(stories.ARMS, 3)
    assert len(set(tasks)) == len(tasks)
    assert [task[2] for task in tasks[:3]] == ["history"] * 3
    for repeat in range(3):
        served = [task[1] for task in tasks if task[0] == "load_serve" and task[2:] == ("free", repeat)]
        assert sorted(served) == sorted(stories.ARMS)


def test_a_line_that_a_kill_cut_short_is_taken_away_and_done_again(tmp_path):
    path = tmp_path / "stories.jsonl"
    first = {"id": stories.name_of("load_serve", "default", "history", 0), "status": "ok", "took_s": 7.0}
    path.write_text(json.dumps(first) + "\n" + '{"id": "load_serve spl')
    assert [one["id"] for one in stories.whole_lines(path)] == [first["id"]]
    assert path.read_text() == json.dumps(first) + "\n"
    told = subprocess.run(
        [sys.executable, str(HERE / "stories.py"), "-o", str(tmp_path), "--plan", "--repeats", "1"],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    planned = told.stdout.splitlines()[1:]
    assert first["id"] not in planned
    assert "load_serve split20 free #0" in planned


def test_an_arm_that_is_none_is_refused(tmp_path):
    told = subprocess.run(
        [sys.executable, str(HERE / "stories.py"), "-o", str(tmp_path), "--arms", "none"],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 2
    assert "no arm is called 'none'" in told.stderr
