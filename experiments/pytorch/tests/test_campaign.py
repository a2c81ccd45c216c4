"""The plans of the campaign, its use of earlier records, and the runner of PyTorch's tests on substitutes."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

campaign = importlib.import_module("campaign")
turns = importlib.import_module("turns")


def made(tmp_path, **options):
    chosen = {"resume": [], "budget": 100.0, "jobs": 2, "output": tmp_path, "ahead": True}
    return campaign.Campaign(Namespace(**chosen | options))


def test_every_planned_run_has_an_id_of_its_own():
    tasks = campaign.planned(campaign.PARTS, campaign.ARMS, 10, "checks.py")
    assert len({task.id for task in tasks}) == len(tasks)
    assert {task.part for task in tasks} == set(campaign.PARTS)
    assert {task.program for task in tasks} <= campaign.SIZES.keys()
    # Each round has every arm once, in a random order.
    timed = [task for task in tasks if task.part == "timed" and task.program == "gpt2" and task.arm in campaign.MAIN]
    assert all(sum(task.arm == arm for task in timed) == 10 for arm in campaign.MAIN)
    assert len({tuple(task.arm for task in timed if task.repeat == repeat) for repeat in range(10)}) > 1


def test_limits_are_multiples_of_what_native_holds_active(tmp_path):
    one = made(tmp_path)
    task = campaign.Task("curve", "gpt2", "remap", limit=1.02, alone=True)
    assert not one.wanted(task), "nothing is known yet"
    stats = {"active_bytes.all.peak": 1000, "reserved_bytes.all.peak": 1200}
    native = {
        "id": "curve gpt2 native #0",
        "part": "curve",
        "program": "gpt2",
        "arm": "native",
        "status": "ok",
        "stats": stats,
    }
    one.learn(native)
    assert one.wanted(task)
    assert one.limit(task) == 1020
    assert not one.wanted(campaign.Task("curve", "gpt2", "native", alone=True)), "it was done"
    for limit in (1.3, 1.2):
        known = {
            "part": "curve",
            "program": "gpt2",
            "arm": "remap",
            "status": "oom",
            "oom": "no",
            "limit": int(1000 * limit),
        }
        one.learn(known | {"id": f"curve gpt2 remap at {limit} #0", "over_active": limit})
    assert not one.wanted(task), "it ran out of memory under two larger limits"


def test_what_was_done_is_not_done_again_and_what_failed_is(tmp_path):
    ok, failed = (campaign.Task("memory", "moe", arm) for arm in ("native", "caching"))
    file = tmp_path / "results.jsonl"
    lines = [{"kind": "machine"}]
    for task, status in ((ok, "ok"), (failed, "failed")):
        lines.append({"id": task.id, "part": task.part, "program": task.program, "arm": task.arm, "status": status})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = made(tmp_path, resume=[file])
    assert not one.wanted(ok)
    assert one.wanted(failed)
    assert not made(tmp_path, resume=[file], budget=1.0).wanted(failed), "there is no time"


TURN = """
import os, sys
sys.path.insert(0, sys.argv[1])
import turns
for words in turns.answered(sys.argv[2], int(sys.argv[3])):
    print(sys.argv[3], words, file=open(sys.argv[4], "a"))
    if sys.argv[3] == "2":
        os._exit(7)
"""


def test_processes_take_turns_and_one_that_dies_loses_its_own(tmp_path):
    path, log = tmp_path / "turns", tmp_path / "log"
    one = turns.Turns(path)
    commands = {number: [sys.executable, "-c", TURN, HERE, path, str(number), log] for number in (1, 2, 3)}
    runs = {number: subprocess.Popen(command) for number, command in commands.items()}
    runs[4] = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    one.gather(runs, lambda run: run.poll() is not None)
    one.take("any")
    one.close()
    assert [runs[number].wait(20) for number in (1, 2, 3, 4)] == [0, 7, 0, 3]
    taken = [line.split() for line in log.read_text().splitlines()]
    for number in ("1", "3"):
        mine = [int(words) for who, words in taken if who == number]
        assert mine == [words for _ in range(turns.ROUNDS) for words in turns.WORDS]
    others = [who for who, _ in taken if who != "2"]
    orders = {tuple(others[at : at + 2]) for at in range(0, len(others), 2)}
    assert orders == {("1", "3"), ("3", "1")}, "each has one turn, before or behind the other"


def test_a_plan_needs_no_gpu(tmp_path):
    command = [
        sys.executable,
        HERE / "campaign.py",
        "-o",
        tmp_path / "out",
        "--plan",
        "--parts",
        "curve",
        "--arms",
        "native,remap",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "curve gpt2 remap at 1.005 #0" in done.stdout.splitlines()
    assert not (tmp_path / "out").exists()
    done = subprocess.run([*command[:-1], "remapp"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no arm is called 'remapp'" in done.stderr


TESTS = """
import os, time, unittest
class TestCuda(unittest.TestCase):
    def test_passes(self): pass
    def test_breaks(self): os._exit(7)
    def test_fails(self): self.assertEqual(1, 2)
    def test_hangs(self): time.sleep(60)
    def test_passes_natively(self): self.assertNotIn("expandable", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    @unittest.skip("never")
    def test_skipped(self): pass
"""


@pytest.fixture
def tests(tmp_path, monkeypatch):
    """Files of tests, and a substitute for PyTorch's module."""
    internal = tmp_path / "torch" / "testing" / "_internal"
    internal.mkdir(parents=True)
    for folder in (internal, internal.parent, internal.parents[1]):
        (folder / "__init__.py").touch()
    (internal / "inductor_utils.py").write_text("HAS_CUDA_AND_TRITON = False\n")
    (tmp_path / "test_cuda.py").write_text(TESTS)
    (tmp_path / "test_cudagraph_trees.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_test_that_breaks_or_hangs_costs_no_other(tests):
    command = [
        sys.executable,
        HERE / "torch_tests.py",
        "-o",
        tests / "out",
        "--tests",
        tests,
        "--arms",
        "native,expandable",
    ]
    done = subprocess.run([*command, "--timeout", "2", "--jobs", "2"], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for line in (tests / "out" / "torch-tests.jsonl").read_text().splitlines():
        one = json.loads(line)
        found[one["arm"], one["test"].rpartition("_")[2]] = one
    outcomes = {"passes": "passed", "breaks": "crashed", "fails": "failed", "hangs": "timed out", "skipped": "skipped"}
    for arm in ("native", "expandable"):
        assert {name: found[arm, name]["outcome"] for name in outcomes} == outcomes
    assert found["native", "natively"]["outcome"] == "passed"
    assert found["expandable", "natively"]["reason"].startswith("AssertionError: 'expandable' unexpectedly found")
    # A test that fails natively is not an allocator's fault, so it is not run again.
    assert found["native", "fails"].get("alone")
    assert not found["expandable", "fails"].get("alone")
    assert "1 of 2 that pass natively do not under expandable" in done.stdout
