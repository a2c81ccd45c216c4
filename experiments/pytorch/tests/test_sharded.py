"""Programs of several ranks, over Gloo: rank 0 reports all, and a rank that fails ends the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
SMALL = ("--device", "cpu", "--small", "--steps", "2", "--warm-up", "1")
LIMIT_S = 300

torch = pytest.importorskip("torch")


def run(words, **variables):
    """The exit code, the records on standard output, and standard error. Ranks have one thread each."""
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=plain | {"OMP_NUM_THREADS": "1"} | variables,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("name", ["fsdp_gpt2", "fsdp_moe"])
def test_one_line_has_every_rank(name):
    code, records, text = run([PROGRAMS / "programs.py", name, *SMALL])
    assert code == 0, text
    (record,) = records
    ranks = record["of_ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(len(rank["losses"]) == 3 for rank in ranks)
    assert ranks[0]["losses"] != ranks[1]["losses"], "each rank has data of its own"
    assert len(record["losses_sha256"]) == 64


FAILING = """
import sys
sys.path[:0] = [{programs!r}, {baselines!r}]
import os, sharded
class Options:
    device, seed, small, warm_up = "cpu", 1, True, 0
def failing(device, seed, rank, **size):
    if rank == 1:
        sys.exit(7)
    return sharded.moe(device, seed, rank, **size)
sharded.PROGRAMS["moe"] = failing
sharded.measured("moe", Options, 2)
"""


def test_a_rank_that_fails_ends_the_others(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(programs=str(PROGRAMS), baselines=str(PROGRAMS.parent / "baselines")))
    code, records, text = run([script])
    assert code == 1, text
    assert not records
    assert "error: rank 1 ended with exit code 7" in text
