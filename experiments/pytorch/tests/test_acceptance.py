"""The acceptance list: what the specs run, and its programs on the CPU if PyTorch is installed."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
SPECS = HERE.parent / "specs"
sys.path.insert(0, str(HERE))

catalogue = importlib.import_module("catalogue")

PROGRAMS = catalogue.programs()
# Programs that take a second besides their imports, one of each family that runs without a GPU.
QUICK = tomllib.loads((SPECS / "acceptance.toml").read_text())["sim"]["matrix"]["of"]
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


def test_the_specs_run_every_program_on_its_number_of_gpus():
    listed = {}
    for spec in ("acceptance", "acceptance-2"):
        document = tomllib.loads((SPECS / f"{spec}.toml").read_text())
        for arm in document["arms"]:
            options = document.get("options", {}) | arm.get("options", {})
            names = (document.get("matrix", {}) | arm.get("matrix", {}))["of"]
            listed.setdefault(options["program"], []).append(sorted(names))
    kinds = {"acceptance": (1, 1), "acceptance-two": (2, 1), "acceptance-job": (2, 2)}
    for kind, (gpus, ranks) in kinds.items():
        expected = sorted(name for name, one in PROGRAMS.items() if (one.gpus, one.ranks) == (gpus, ranks))
        assert listed[kind] == [expected] * len(listed[kind]), kind


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The runs of the spec on the CPU, two at a time, as PyTorch's import dominates; and the runner's output."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    target = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))
    programs = [path for kind in ("debug", "release") if (path := target / kind / "experiments").is_file()]
    if not programs:
        pytest.skip("the program `experiments` is not built")
    folder = tmp_path_factory.mktemp("acceptance")
    command = [max(programs, key=lambda path: path.stat().st_mtime), "run", "acceptance", "--device", "sim"]
    environment = os.environ | {"PYTHON": sys.executable}
    options = {"capture_output": True, "text": True, "timeout": 1200, "cwd": HERE.parents[1], "env": environment}
    done = subprocess.run([*command, "--jobs", "2", "-o", folder], **options)
    runs = [json.loads(path.read_text()) for path in (folder / "acceptance" / "runs").glob("*/run.json")]
    return done, runs


@pytest.mark.parametrize("name", QUICK)
def test_a_program_runs_on_the_cpu_and_says_the_same_twice(made, name):
    done, runs = made
    mine = [run for run in runs if run["options"]["of"] == name]
    assert [run["status"] for run in mine] == ["done", "done"], mine
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"acceptance {name}" in next(line for line in done.stderr.splitlines() if line.startswith("results  "))
