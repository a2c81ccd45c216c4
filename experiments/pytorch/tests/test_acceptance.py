"""The acceptance list: its programs on the CPU if PyTorch is installed, and its runner over substitute programs."""

import importlib
import json
import subprocess
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

acceptance = importlib.import_module("acceptance")
catalogue = importlib.import_module("catalogue")
# The runner has added its directory to the path.
judge = importlib.import_module("vramlab_analysis.acceptance")

PROGRAMS = catalogue.programs()
# Programs that take a second besides their imports, one of each family that runs without a GPU.
QUICK = ["penalty", "checkpoint_early", "hook_errors", "generators", "unwinding", "speculative", "per_sample",
         "dropped_in_flight"]  # fmt: skip

# A substitute for the list's programs, with behaviour selected by name.
MADE = """
import json, os, signal, subprocess, sys, time
name, arm = sys.argv[1], os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
if name == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def waits_for_ever():
        time.sleep(600)
    waits_for_ever()
if name == "leaves":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if name == "breaks" and arm:
    os._exit(7)
losses = {"differs": [1.0, 2.0 + bool(arm)], "noisy": [1.0 + 1e-3 * (os.getpid() % 7)],
          "sees": [float(os.environ.get("CUDA_VISIBLE_DEVICES", "-1"))]}.get(name, [0.5])
sys.stdout.write("a line without an end" if name == "prints" else "")
print(json.dumps({"acceptance": name, "rank": 0, "losses": losses, "peak_reserved": 1 << 20}))
"""
CATALOGUE = """
def program(**told):
    return lambda function: function

{}
"""


def test_the_list_has_what_it_is_for():
    assert len(PROGRAMS) >= 70
    assert all(one.summary.endswith(".") for one in PROGRAMS.values())
    assert {one.gpus for one in PROGRAMS.values()} == {1, 2}
    assert all(one.gpus >= one.ranks for one in PROGRAMS.values())
    assert all(one.tolerance < 0.1 for one in PROGRAMS.values())
    of_one = [one for one in PROGRAMS.values() if one.gpus == 1]
    # Few programs need packages besides PyTorch.
    assert sum(not one.needs for one in of_one) > 0.7 * len(of_one)


def test_two_programs_of_one_name_are_refused(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(CATALOGUE.format("@program()\ndef twice(run):\n    '''Is there.'''\n"))
    with pytest.raises(ValueError, match=r"b\.py:\d+: twice is in a\.py already"):
        catalogue.programs(tmp_path)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The programs' output on the CPU, by name: several run concurrently, as PyTorch's import dominates."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    folder = tmp_path_factory.mktemp("acceptance")
    command = [sys.executable, HERE / "acceptance.py", "-o", folder, "--device", "cpu", "--programs", ",".join(QUICK)]
    done = subprocess.run([*command, "--budget", "900", "--jobs", "2"], capture_output=True, text=True, timeout=1200)
    lines = [json.loads(line) for line in (folder / acceptance.RECORD).read_text().splitlines()]
    return done, [one for one in lines if one.get("kind") != "machine"]


@pytest.mark.parametrize("name", QUICK)
def test_a_program_runs_on_the_cpu_and_says_the_same_twice(printed, name):
    done, records = printed
    mine = [one for one in records if one["program"] == name]
    assert [one["status"] for one in mine] == ["ok", "ok"], mine
    assert all(rank["losses"] for one in mine for rank in one["ranks"])
    assert judge.loss_difference(*mine) <= PROGRAMS[name].tolerance
    assert done.returncode == 0, done.stdout + done.stderr


# --- the runner, over substitute programs ---


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Runs substitute programs in a process that has the list replaced; returns a function of options."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "run.py").write_text(MADE)
    names = ("good", "hangs", "leaves", "breaks", "differs", "noisy", "prints", "sees")
    listed = [
        f"@program({'tolerance=0.01' if name == 'noisy' else ''})\ndef {name}(run):\n    '''Is made.'''\n"
        for name in names
    ]
    (folder / "family.py").write_text(CATALOGUE.format("\n".join(listed)))
    monkeypatch.setattr(catalogue, "FOLDER", folder)
    monkeypatch.setattr(acceptance, "PATIENCE_S", 1)

    def run(names, arms="native,expandable", repeats=1, gpus=1, **more):
        known = catalogue.programs(folder)
        chosen = {
            "budget": 60.0,
            "jobs": 4,
            "limit_s": 30.0,
            "again": False,
            "device": "cuda",
            "vramlab": None,
            "debugger": None,
        }
        options = Namespace(**chosen | more)
        record = tmp_path / acceptance.RECORD
        one = acceptance.Acceptance(options, acceptance.whole_lines(record))
        jobs = acceptance.plan([known[name] for name in names.split(",")], arms.split(","), repeats)
        work = tmp_path / f"work{time.monotonic_ns()}"
        work.mkdir()
        with open(record, "a", encoding="utf-8") as file:
            one.run(jobs, work, file, 100.0, gpus)
        return one

    return run


def test_runs_are_compared_with_natives(made):
    one = made("good,breaks,differs,noisy,prints")
    assert one.kept == 15, "native twice"
    assert sorted(one.differences()) == [
        "breaks expandable #0: ended with 7",
        "differs expandable #0: losses differ by 3.3e-01",
    ]
    assert one.records["good native #0"]["ranks"][0]["peak_reserved"] == 1 << 20


def test_a_run_that_does_not_end_says_where_and_leaves_nothing(made):
    began = time.monotonic()
    one = made("hangs,good", arms="native", limit_s=2.0)
    record = one.records["hangs native #0"]
    assert record["status"] == "hung"
    assert "waits_for_ever" in record["log"], "the stacks of its threads"
    assert any("python" in line for line in record["stacks"]), "what the kernel says of it"
    assert one.records["good native #1"]["status"] == "ok"
    assert sorted(one.differences()) == ["hangs native #0: did not end", "hangs native #1: did not end"]
    assert time.monotonic() - began < 60


def runs(pid):
    """True if a process is alive and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_is_left_behind_is_found_and_ended(made):
    one = made("leaves", arms="native")
    record = one.records["leaves native #0"]
    assert record["status"] == "failed"
    assert "time.sleep(600)" in record["left_behind"][0]
    assert "leaves native #0: left processes behind" in one.differences()
    pid = int(record["left_behind"][0].partition(":")[0])
    until = time.monotonic() + 20
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(pid)


def test_a_call_goes_on_where_the_last_one_ended(made, tmp_path):
    assert made("good", arms="native").kept == 2
    record = tmp_path / acceptance.RECORD
    # A call that was killed while it wrote.
    with open(record, "a", encoding="utf-8") as file:
        file.write('{"id": "good expandable #0", "prog')
    assert made("good,breaks").kept == 1 + 3
    assert made("good,breaks").kept == 0
    assert made("good,breaks", again=True).kept == 1, "what failed"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(lines) == 2 + 4 + 1


def test_no_run_begins_that_would_not_end_in_time(made):
    one = made("good", budget=1.0)
    assert (one.kept, one.skipped) == (0, 3)


def test_repeats_go_round_the_arms(made):
    programs = [PROGRAMS["ddp_hook"]]
    jobs = acceptance.plan(programs, ["native+run", "remap+run"], 3)
    assert [(job.arm, job.repeat) for job in jobs][:3] == [("native+run", 0), ("remap+run", 0), ("native+run", 1)]
    assert len({job.id for job in jobs}) == len(jobs) == 6
    jobs = acceptance.plan(programs, ["native", "remap"], 3)
    assert len({job.id for job in jobs}) == len(jobs) == 6


def test_each_run_sees_the_gpus_that_it_needs(made, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    one = made("sees", arms="native", repeats=4, gpus=2)
    seen = [one.records[f"sees native #{repeat}"]["ranks"][0]["losses"] for repeat in range(4)]
    assert sorted(seen) == [[0.0], [0.0], [1.0], [1.0]], "four side by side, half of them on each"


def test_ports_are_given_once():
    given = set()
    ports = [acceptance.free_port(given) for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 32768, "the system gives those above out by itself"
