"""What the notebook for one's own run tells a newcomer to type, in a new environment and a copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unpacked

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = "analysis/notebooks/00_your_own_run.ipynb"
RECORDED = ROOT / "experiments/results/2026-11-21-h200/memory/runs/01-trainer-caching-r0"
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
        unpacked(RECORDED, folder / "runs/mine")
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
        """Runs the lines in one shell at the root. Skips where there is no package index."""
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
    assert "on NVIDIA H200: 40 steps" in said, said

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
