"""The commands in the notebook for one's own run, in a new environment and a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_run
from vramlab_analysis.experiments import results

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = "analysis/notebooks/00_your_own_run.ipynb"
RECORDED = results("memory", "gpu").select(alloc="caching")[0].record
PATIENCE_S = 120
OF_ANOTHER_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RESULTS", "RUN")
NO_INDEX = re.compile(r"No matching distribution found|Failed to establish a new connection|Name or service not known")


def commands(text: str, after: str) -> list[str]:
    """The lines of the first block of commands after a heading or sentence."""
    block = text.split(after, 1)[1].split("```sh\n", 1)[1].split("```", 1)[0]
    return [line for line in block.splitlines() if line.strip()]


def of_notebook() -> list[str]:
    first = json.loads((ROOT / NOTEBOOK).read_text())["cells"][0]
    return commands("".join(first["source"]), "# Your own run")


class Newcomer:
    """A copy of the repository's files that matter here, with a run record where `cargo run` would have left it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        left = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints", "build", "dist")
        shutil.copytree(ROOT / "analysis", folder / "analysis", ignore=left)
        shutil.copytree(ROOT / "experiments/specs", folder / "experiments/specs")
        shutil.copytree(RECORDED.path, folder / "runs/mine")
        # The versions of the lock: a new release of a package does not change what this test says.
        lock = (ROOT / "analysis/requirements.lock").read_text()
        pins = [line.removesuffix("\\").strip() for line in lock.splitlines() if re.match(r"[a-zA-Z0-9]", line)]
        (folder / "pins.txt").write_text("\n".join(pins) + "\n")
        self.environment = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_ENVIRONMENT}
        self.environment |= {
            "PIP_CONSTRAINT": str(folder / "pins.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_QUIET": "1",
            "HOME": str(folder),
            "PIP_CACHE_DIR": self.environment.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip")),
        }

    def type(self, *lines: str) -> str:
        """Runs the lines in one shell at the root. Skips without a package index."""
        done = subprocess.run(
            ["bash", "-c", "set -eu\n" + "\n".join(lines)],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode and NO_INDEX.search(done.stderr):
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def when_it_listens(request: urllib.request.Request) -> Any:
    """The answer to a request; a server may say its address before it listens there."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    return Newcomer(tmp_path_factory.mktemp("newcomer"))


def split(lines: list[str]) -> tuple[list[str], str]:
    """The lines that install, and the last one; the first one trains, which the recorded run stands for."""
    assert lines[0].startswith("cargo run -p trainer ")
    assert lines[0].endswith(" --out runs/mine")
    return lines[1:-1], lines[-1]


def test_the_lines_of_the_notebook_start_jupyter_and_draw_the_run(newcomer: Newcomer) -> None:
    install, lab = split(of_notebook())
    newcomer.type(*install)
    newcomer.type(
        install[0], "cd /", f"vramlab-analysis steps {newcomer.folder}/runs/mine", "python -m vramlab_analysis --help"
    )
    assert lab.endswith(f"jupyter lab {NOTEBOOK}")
    out = newcomer.folder / "executed.ipynb"
    execute = lab.replace("jupyter lab", f"jupyter nbconvert --execute --to notebook --output {out}")
    newcomer.type(install[0], execute)
    cells = json.loads(out.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 6
    said = "".join(outputs[0]["data"]["text/markdown"])
    assert f"on {RECORDED.device}: {RECORDED.steps.height} steps" in said, said

    # The server starts and has the notebook open.
    words = "--no-browser --allow-root --ServerApp.port=0 --ServerApp.ip=127.0.0.1 --IdentityProvider.token=of-the-test"
    server = subprocess.Popen(
        ["bash", "-c", f"set -eu\n{install[0]}\nexport {lab.replace(' jupyter', '; exec jupyter', 1)} {words}"],
        cwd=newcomer.folder, env=newcomer.environment, text=True, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    late = threading.Timer(PATIENCE_S, os.killpg, (server.pid, signal.SIGKILL))
    late.start()
    try:
        address, told = None, []
        assert server.stderr is not None
        for line in server.stderr:
            told.append(line)
            if there := re.search(r"(http://127\.0\.0\.1:\d+)/lab", line):
                # The server's root is the folder of the notebook that it was started with.
                address = f"{there[1]}/api/contents/{Path(NOTEBOOK).name}"
                break
        assert address, "".join(told)
        request = urllib.request.Request(address, headers={"Authorization": "token of-the-test"})
        with when_it_listens(request) as answer:
            assert json.load(answer)["content"]["cells"][0]["source"].startswith("# Your own run")
    finally:
        late.cancel()
        os.killpg(server.pid, signal.SIGTERM)
        server.communicate()


# `pip install ./app/python`: one wheel with the program `vramlab`, the library, and the package over both.


HISTORY = ROOT / "experiments/histories/mlp.pickle.xz"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
COMPILED = any((TARGET / "debug/deps").glob("libvramlab_cli-*.rlib"))


def project(folder: str) -> dict[str, Any]:
    told: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return told


def test_the_two_distributions_agree() -> None:
    program, package = project("app/python"), project("analysis")
    assert (program["name"], package["name"]) == ("vramlab", "vramlab-analysis")
    # A script would be there without the libraries that it needs; the program hands on the commands of the package.
    assert "scripts" not in program
    assert set(package["scripts"]) == {"vramlab-analysis"}
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert program["version"] == package["version"] == workspace["version"]
    assert program["license"] == workspace["license"]


def test_the_program_hands_on_commands_that_the_package_has() -> None:
    source = (ROOT / "app/cli/src/python.rs").read_text()
    listed = re.search(r"const COMMANDS: \[&str; \d+\] = \[(.*?)\];", source, re.DOTALL)
    assert listed is not None
    names = re.findall(r'"([a-z-]+)"', listed[1])
    assert names
    main = (ROOT / "analysis/src/vramlab_analysis/__main__.py").read_text()
    has = re.findall(r'commands\.add_parser\(\s*"([a-z-]+)"', main)
    assert set(names) <= set(has)


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
            # What `cargo test --workspace` has compiled is only linked: an example asks for the features of tests.
            "VRAMLAB_CARGO": "--workspace --lib --bins --example time_kernels",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "NO_COLOR": "1",
        }

    def end(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command outside of the checkout. Skips without a package index."""
        done = subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])],
            env=self.variables | variables, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode and NO_INDEX.search(done.stderr):
            pytest.skip("no package index can be reached")
        return done

    def run(self, *command: str | Path, **variables: str) -> str:
        """The output of a successful command."""
        done = self.end(*command, **variables)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.skipif(
    shutil.which("cargo") is None or not (COMPILED or "VRAMLAB_WHEEL" in os.environ),
    reason="needs Cargo, and takes minutes where nothing is compiled yet: VRAMLAB_WHEEL=1 does it all the same",
)
def test_the_wheel_is_the_program_the_library_and_the_package(tmp_path: Path) -> None:
    new = Environment(tmp_path)
    new.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT / "app/python")
    (wheel,) = tmp_path.glob("*.whl")
    new.run("python", "-m", "pip", "install", "--no-deps", "--no-compile", wheel)
    listed = new.run("python", "-m", "pip", "show", "--files", "vramlab").split("Files:\n")[1]
    files = [Path(line.strip()) for line in listed.splitlines()]
    assert [file.stem for file in files if file.parent.name in ("bin", "Scripts")] == ["vramlab"]
    top = {file.parts[0] for file in files if file.parts[0] != ".."}
    assert top == {
        "vramlab",
        "vramlab.pth",
        f"vramlab-{project('app/python')['version']}.dist-info",
    }
    # What the shim is compiled from, where PyTorch is.
    assert {Path("vramlab/shim/shim.cpp"), Path("vramlab/include/vramlab.h")} <= set(files)
    # What goes under PyTorch, and between any CUDA program and the driver.
    libraries = {file.name for file in files if file.suffix == ".so" and file.parent.name == "vramlab"}
    if sys.platform == "linux":
        assert libraries == {"libvramlab.so", "libvramlab_inject.so"}
    # For any Python, on any Linux of the tag that the name says.
    if sys.platform == "linux":
        new.run("python", "-m", "pip", "install", "auditwheel")
        platform = re.fullmatch(r".*-py3-none-(manylinux_[0-9_]+_\w+)\.whl", wheel.name)
        assert platform is not None, wheel.name
        assert f'"{platform[1]}"' in new.run("auditwheel", "show", wheel)
    assert new.run("vramlab", "--version").startswith("vramlab ")
    advice = new.run("vramlab", "advise", HISTORY, "--conf", "expandable_segments:True")
    assert "What would help" in advice
    assert "Active memory at its peak" in new.run("vramlab", "explain", HISTORY)
    record = write_run(tmp_path / "record")
    new.run("vramlab", "report", record, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
    allocates(new)
    runs_programs(new)
    # The analysis is another distribution, which the program hands commands to.
    done = new.end("vramlab", "losses", record)
    assert (done.returncode, "pip install ./analysis" in done.stderr) == (2, True), done.stderr
    new.run("python", "-m", "pip", "install", "--no-deps", ROOT / "analysis")
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
    fake = ROOT / "app/python/tests/fake"
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
