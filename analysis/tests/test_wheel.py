"""`pip install ./experiments`: one wheel with the program `vramlab`, the library, and the packages over both."""

from __future__ import annotations

import os
import re
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


def test_the_two_distributions_agree() -> None:
    program, package = project("experiments"), project("analysis")
    assert (program["name"], package["name"]) == ("vramlab", "vramlab-analysis")
    # A script would be there without the libraries that it needs; the program hands on the commands of the package.
    assert "scripts" not in program
    assert set(package["scripts"]) == {"vramlab-analysis"}
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert program["version"] == package["version"] == workspace["version"]
    assert program["license"] == workspace["license"]
    # The wheel has the package, and needs what the package needs.
    extra = [line.split(";")[0] for line in program["optional-dependencies"]["analysis"]]
    assert extra == package["dependencies"]


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
            "VRAMLAB_PROFILE": "dev",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
        }

    def end(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """How a command ends, elsewhere than in the checkout. Skips where there is no package index."""
        done = subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])],
            env=self.variables | variables, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode and NO_INDEX.search(done.stderr):
            pytest.skip("no package index can be reached")
        return done

    def run(self, *command: str | Path, **variables: str) -> str:
        """What a command prints that goes well."""
        done = self.end(*command, **variables)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.skipif(
    shutil.which("cargo") is None or not (COMPILED or "VRAMLAB_WHEEL" in os.environ),
    reason="needs Cargo, and takes minutes where nothing is compiled yet: VRAMLAB_WHEEL=1 does it all the same",
)
def test_the_wheel_is_the_program_the_library_and_the_packages(tmp_path: Path) -> None:
    new = Environment(tmp_path)
    new.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT / "experiments")
    (wheel,) = tmp_path.glob("*.whl")
    new.run("python", "-m", "pip", "install", "--no-deps", "--no-compile", wheel)
    listed = new.run("python", "-m", "pip", "show", "--files", "vramlab").split("Files:\n")[1]
    files = [Path(line.strip()) for line in listed.splitlines()]
    assert [file.stem for file in files if file.parent.name in ("bin", "Scripts")] == ["vramlab"]
    top = {file.parts[0] for file in files if file.parts[0] != ".."}
    assert top == {
        "vramlab",
        "vramlab_analysis",
        "vramlab.pth",
        f"vramlab-{project('experiments')['version']}.dist-info",
    }
    # What the shim is compiled from, where PyTorch is.
    assert {Path("vramlab/shim/shim.cpp"), Path("vramlab/include/vramlab.h")} <= set(files)
    # For any Python, on any Linux of the tag that the name says.
    if sys.platform == "linux":
        new.run("python", "-m", "pip", "install", "auditwheel")
        platform = re.fullmatch(r".*-py3-none-(manylinux_[0-9_]+_\w+)\.whl", wheel.name)
        assert platform is not None, wheel.name
        assert f'"{platform[1]}"' in new.run("auditwheel", "show", wheel)
    assert new.run("vramlab", "--version").startswith("vramlab ")
    advice = new.run("vramlab", "advise", HISTORY, "--conf", "expandable_segments:True")
    assert "What would help" in advice
    assert "Who held memory" in new.run("vramlab", "explain", HISTORY)
    record = write_run(tmp_path / "record")
    new.run("vramlab", "report", record, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
    allocates(new)
    runs_programs(new)
    # The analysis is in it, and its libraries are here.
    assert str(new.folder) in new.run("python", "-c", "import vramlab_analysis; print(vramlab_analysis.__file__)")
    assert "| trainer | a device |" in new.run("vramlab", "losses", record)


def allocates(new: Environment) -> None:
    """The library is found and serves Python."""
    script = """
import vramlab
with vramlab.Allocator("caching", device="sim") as allocator:
    address = allocator.alloc(1 << 20)
    print(allocator.stats()["allocated_bytes.all.current"])
    allocator.free(address)
print(vramlab.library_path().parent.name)
"""
    assert new.run("python", "-c", script) == "1048576\nvramlab\n"


def runs_programs(new: Environment) -> None:
    """Programs run as they would, and those that use PyTorch leave their snapshots."""
    done = new.end("vramlab", "run", "--", "python", "-c", "import sys; print(sys.argv); sys.exit(5)", "x y")
    assert (done.returncode, done.stdout) == (5, "['-c', 'x y']\n")
    fake = ROOT / "experiments/inside/tests/fake"
    script = "import torch; torch.cuda.init(); print(torch.__version__)"
    recorded = {
        "PYTHONPATH": str(fake),
        "FAKE_SNAPSHOT": str(HISTORY),
        "PATH": f"{new.bin}{os.pathsep}{os.environ['PATH']}",
    }
    done = new.end("vramlab", "run", "--output", "out", "--", "python", "-c", script, **recorded)
    assert (done.returncode, done.stdout) == (0, "2.11.0+fake\n")
    assert "advise   export PYTORCH_CUDA_ALLOC_CONF=" in done.stderr
    names = sorted(re.sub(r"\d+", "", path.name) for path in (new.folder / "out").iterdir())
    assert names == ["pid.pickle", "pid.process.json", "program.json"]
    # Installed, the package does it for programs that are started without `vramlab run`, too.
    (new.folder / "alone").mkdir()
    new.run("python", "-c", script, VRAMLAB_OUTPUT=str(new.folder / "alone"), **recorded)
    assert len(list((new.folder / "alone").glob("pid*.pickle"))) == 1
    done = new.end("python", "-c", script, VRAMLAB_ALLOC="no-such-allocator", **recorded)
    assert done.returncode == 2
    assert done.stderr.startswith("vramlab: no-such-allocator cannot be put under PyTorch: ")
