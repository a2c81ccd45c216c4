"""`pip install ./experiments`: the program `vramlab`, alone and beside the Python package `vramlab_analysis`."""

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
HISTORY = ROOT / "experiments/histories/mlp.pickle.xz"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
# Unoptimised, as the tests in Rust have it: what they have compiled is only linked once more.
COMPILED = any((TARGET / "debug/deps").glob("libdoctor-*.rlib"))


def project(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return told


def test_the_two_distributions_share_no_name() -> None:
    program, package = project("experiments"), project("analysis")
    assert (program["name"], package["name"]) == ("vramlab", "vramlab-analysis")
    assert "scripts" not in program
    assert set(package["scripts"]) == {"vramlab-analysis"}
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert program["version"] == package["version"] == workspace["version"]
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
def test_the_wheel_is_the_program_and_finds_the_package_beside_it(tmp_path: Path) -> None:
    new = Environment(tmp_path)
    install = ("python", "-m", "pip", "install", "--no-deps", "--no-compile")
    new.run(*install, ROOT / "experiments")
    listed = new.run("python", "-m", "pip", "show", "--files", "vramlab").split("Files:\n")[1]
    files = [Path(line.strip()) for line in listed.splitlines()]
    # The program, and no Python.
    assert [file.stem for file in files if file.parts[-2] in ("bin", "Scripts")] == ["vramlab"]
    assert not [file for file in files if file.suffix == ".py"]
    assert new.run("vramlab", "--version").startswith("vramlab ")
    advice = new.run("vramlab", "advise", HISTORY, "--conf", "expandable_segments:True")
    assert "What would help" in advice
    assert "Who held memory" in new.run("vramlab", "explain", HISTORY)
    record = write_run(tmp_path / "record")
    new.run("vramlab", "report", record, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
    # With the package beside it, the program hands the package's commands on.
    new.run(*install, "--no-build-isolation", ROOT / "analysis")
    assert str(new.folder) in new.run("python", "-c", "import vramlab_analysis; print(vramlab_analysis.__file__)")
    assert "| trainer | a device |" in new.run("vramlab", "losses", record)
    assert "| trainer | a device |" in new.run("vramlab-analysis", "losses", record)
