"""The programs with pinned host memory: on the CPU each runs and repeats its losses."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OFFLOAD = ROOT / "experiments/pytorch/programs/offload"
PROGRAMS = ("fsdp", "optimizer", "activations", "weights", "loader")
SMALL = ("--small", "--device", "cpu")

pytest.importorskip("torch")


def run(*words):
    """The exit code, the lines of standard output, and standard error."""
    command = [sys.executable, OFFLOAD / "offload.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def records(*words):
    """The lines of a run of programs by their names."""
    code, lines, text = run(*words, *SMALL, "--steps", "2", "--warm-up", "1")
    assert code == 0, text
    return {record["program"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def all_programs():
    return records(*PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_reports_steps_bytes_and_losses(name, all_programs):
    assert tuple(all_programs) == PROGRAMS, "in the order of the arguments"
    record = all_programs[name]
    assert next(iter(record)) == "program"
    assert record["host"] == "pytorch"
    assert len(record["step_s"]) == 2
    assert all(seconds > 0 for seconds in record["step_s"])
    assert len(record["digest"]) == 16
    assert all(loss > 0 for loss in record["losses"])
    # Without a GPU nothing is pinned.
    assert record["requested_bytes"] == record["reserved_bytes"] == 0


def test_losses_do_not_depend_on_the_order_and_follow_the_seed(all_programs):
    begun_elsewhere = records(*PROGRAMS, "--begin", "7")
    assert tuple(begun_elsewhere) == PROGRAMS
    digests = {name: record["digest"] for name, record in all_programs.items()}
    assert {name: record["digest"] for name, record in begun_elsewhere.items()} == digests
    assert len(set(digests.values())) == len(PROGRAMS)
    (other,) = records("optimizer", "--seed", "2").values()
    assert other["digest"] != digests["optimizer"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: program"),
        (("loader", "mine"), "no program mine; there are fsdp, loader"),
        (("loader", "loader"), "name each program once"),
        (("loader", "--steps", "0"), "--steps must be at least 1"),
        (("loader", "--begin", "-1"), "--begin at least 0"),
    ],
)
def test_bad_input_of_a_program_is_one_line(words, message):
    code, lines, text = run(*words, *SMALL)
    assert (code, lines) == (2, [])
    assert message in text.splitlines()[-1]
    assert "Traceback" not in text


def test_the_spec_compares_every_program():
    command = tomllib.loads((ROOT / "experiments/commands.toml").read_text())["offload"]["command"]
    assert set(PROGRAMS) <= set(command)
    hosts = tomllib.loads((ROOT / "experiments/specs/offload.toml").read_text())["arms"][0]["matrix"]["host-alloc"]
    assert hosts == ["pytorch", "host-pytorch", "host-exact"]
