"""`pip install ./experiments`: the program `vramlab` and the Python package of that name in one wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_run
from tests.test_install import NO_INDEX, OF_ANOTHER_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "analysis/src/vramlab"
HISTORY = ROOT / "experiments/histories/mlp.pickle.xz"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
# Unoptimised, as the tests in Rust have it: what they have compiled is only linked once more.
COMPILED = any((TARGET / "debug/deps").glob("libexperiments-*.rlib"))


def project(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return told


def test_both_projects_are_one_distribution() -> None:
    program, package = project("experiments"), project("analysis")
    for key in ("name", "version", "requires-python", "dependencies", "optional-dependencies"):
        assert program[key] == package[key], key
    # A script of that name would lie where the program does.
    assert "scripts" not in program
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert program["version"] == workspace["version"]
    assert program["license"] == workspace["license"]


class Environment:
    """A new one, which finds the libraries of this one behind its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "environment"
        venv.create(self.folder, with_pip=True)
        self.bin = self.folder / ("Scripts" if sys.platform == "win32" else "bin")
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))
        (self.packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.variables = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_ENVIRONMENT}
        self.variables |= {
            "CARGO_TARGET_DIR": str(TARGET.resolve()),
            "MATURIN_PEP517_ARGS": "--profile dev",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
        }

    def run(self, *command: str | Path) -> str:
        """What a command prints, elsewhere than in the checkout. Skips where there is no package index."""
        done = subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])],
            env=self.variables, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode and NO_INDEX.search(done.stderr):
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.skipif(
    shutil.which("cargo") is None or not (COMPILED or "VRAMLAB_WHEEL" in os.environ),
    reason="needs Cargo, and takes minutes where nothing is compiled yet: VRAMLAB_WHEEL=1 does it all the same",
)
def test_the_wheel_brings_the_program_and_the_package(tmp_path: Path) -> None:
    new = Environment(tmp_path)
    new.run("python", "-m", "pip", "install", "--no-deps", "--no-compile", ROOT / "experiments")
    # All of the package, and nothing that an interpreter left there.
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()}
    kept = {file for file in files if "__pycache__" not in file.parts}
    told = new.run("python", "-m", "pip", "show", "--files", "vramlab")
    names = {Path(line.strip()) for line in told.split("Files:\n")[1].splitlines()}
    assert {name.relative_to("vramlab") for name in names if name.parts[0] == "vramlab"} == kept
    assert {file.name for file in kept} >= {"report.html", "report.css", "report.js", "py.typed"}
    # Its own commands.
    assert new.run("vramlab", "--version").startswith("vramlab ")
    advice = new.run("vramlab", "advise", HISTORY, "--conf", "expandable_segments:True")
    assert "What would help" in advice
    assert "Who held memory" in new.run("vramlab", "explain", HISTORY)
    # Those of the package, which is the one beside it, on a run record; and the page, for which it has to ask it.
    assert str(new.folder) in new.run("python", "-c", "import vramlab; print(vramlab.__file__)")
    record = write_run(tmp_path / "record")
    assert "| trainer | a device |" in new.run("vramlab", "losses", record)
    new.run("vramlab", "report", record, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
