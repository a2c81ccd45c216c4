"""The programs with pinned host memory: on the CPU each runs and repeats its losses; the comparison of allocators."""

import importlib
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
sys.path.insert(0, str(OFFLOAD))
compare = importlib.import_module("compare")


def run(script, *words, given=""):
    """The exit code, the lines of standard output, and standard error."""
    command = [sys.executable, OFFLOAD / script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, input=given)
    return done.returncode, done.stdout.splitlines(), done.stderr


def records(*words):
    """The lines of a run of programs by their names."""
    code, lines, text = run("offload.py", *words, *SMALL, "--steps", "2", "--warm-up", "1")
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
        ((), "name a program, or --turns"),
        (("loader", "--turns"), "name a program, or --turns"),
        (("loader", "mine"), "no program mine; there are fsdp, loader"),
        (("loader", "loader"), "name each program once"),
        (("loader", "--steps", "0"), "--steps must be at least 1"),
        (("loader", "--begin", "-1"), "--begin at least 0"),
    ],
)
def test_bad_input_of_a_program_is_one_line(words, message):
    code, lines, text = run("offload.py", *words, *SMALL)
    assert (code, lines) == (2, [])
    assert message in text.splitlines()[-1]
    assert "Traceback" not in text


def test_turns_continue_a_program_until_an_empty_line(all_programs):
    code, lines, text = run("offload.py", "--turns", *SMALL, given="weights 1\nweights 2\n\nloader 1\n\n")
    assert code == 0, text
    first, second, ended, other, last = map(json.loads, lines)
    assert [len(turn["step_s"]) for turn in (first, second, other)] == [1, 2, 1]
    assert ended["program"] == "weights"
    assert ended["digest"] == all_programs["weights"]["digest"], "three steps in two turns"
    assert last["program"] == other["program"] == "loader"


def result(asked, pinned, digest):
    return {"requested_bytes": asked, "reserved_bytes": pinned, "digest": digest}


def test_rows_compare_each_round_with_that_of_the_first_allocator():
    times = {"pytorch": [[1.0, 3.0], [4.0]], "host-exact": [[1.0], [2.0, 2.0]]}
    results = {"pytorch": result(100, 150, "a"), "host-exact": result(100, 101, "b")}
    first, second = compare.rows("weights", times, results)
    assert (first["step_over_pytorch"], first["equal_losses"], first["reserved_over_requested"]) == (1.0, True, 1.5)
    assert second["step_over_pytorch"] == 0.5, "the median of 1/2 and 2/4"
    assert (second["rounds"], second["equal_losses"], second["reserved_over_requested"]) == (2, False, 1.01)
    assert second["step_s"] == 2.0
    (unpinned,) = compare.rows("weights", {"pytorch": [[1.0]]}, {"pytorch": result(0, 0, "a")})
    assert unpinned["reserved_over_requested"] is None
    assert "nan" in compare.shown(unpinned)


def test_a_comparison_writes_a_line_for_each_program_and_allocator(tmp_path):
    output = tmp_path / "offload.jsonl"
    words = ("weights", "--hosts", "pytorch,host-exact", "--rounds", "2", "-o", str(output), *SMALL)
    code, lines, text = run("compare.py", *words)
    assert code == 0, text
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["program"], row["host"]) for row in rows] == [("weights", "pytorch"), ("weights", "host-exact")]
    assert all(row["equal_losses"] and row["rounds"] == 2 for row in rows)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [(("mine",), "no program mine; there are fsdp"), (("weights", "--rounds", "0"), "--rounds must be at least 1")],
)
def test_bad_input_of_a_comparison_is_one_line(words, message):
    code, lines, text = run("compare.py", *words)
    assert (code, lines) == (2, [])
    assert message in text.splitlines()[-1]


def test_a_worker_that_fails_is_named():
    code, _, text = run("compare.py", "weights", "--device", "none", "--rounds", "1")
    assert code == 1, text
    assert "error: the process under pytorch ended with exit code" in text.splitlines()[-1]


def test_the_spec_compares_every_program():
    command = tomllib.loads((ROOT / "experiments/commands.toml").read_text())["offload"]["command"]
    assert set(PROGRAMS) <= set(command) & set(compare.STEPS)
    hosts = tomllib.loads((ROOT / "experiments/specs/offload.toml").read_text())["arms"][0]["matrix"]["host-alloc"]
    assert tuple(hosts) == compare.HOSTS
