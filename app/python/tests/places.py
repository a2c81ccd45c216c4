"""Separate processes for tests, with a stand-in for PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "src" / "vramlab"
FAKE = HERE / "fake"
HISTORY = HERE.parents[2] / "experiments" / "histories" / "mlp.pickle.xz"


class Place:
    """A directory, and processes that write their recordings there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        of_another = ("VRAMLAB_", "PYTHON", "FAKE_", "RANK", "LOCAL_RANK")
        self.variables = {key: value for key, value in os.environ.items() if not key.startswith(of_another)}
        self.variables["PYTHONPATH"] = os.pathsep.join([str(PACKAGE / "_site"), str(FAKE)])
        self.variables |= {"VRAMLAB_OUTPUT": str(self.out), "VRAMLAB_RUN": "a-run", "FAKE_CALLS": str(folder / "calls")}
        # The recorder needs PyTorch's classes.
        self.variables["VRAMLAB_RECORDER"] = "pytorch"

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        file = self.folder / "script.py"
        file.write_text(script)
        command = [sys.executable, str(file)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=self.variables | variables, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, script: str, code: int = 0, **variables: str) -> tuple[str, str]:
        """Runs a script and returns its stdout and stderr."""
        process = self.start(script, **variables)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        return out, err

    def files(self) -> list[str]:
        """The output's file names, without the process id."""
        names = [path.name for path in self.out.iterdir()]
        return sorted(re.sub(r"pid\d+", "pid", name) for name in names)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.process.json"))]

    def record(self) -> dict[str, Any]:
        (record,) = self.records()
        return record

    def calls(self, of: str | None = None) -> list[list[Any]]:
        """The recorded calls of the stand-in."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.is_file() else []
        calls = [json.loads(line)[1:] for line in lines]
        return [call for call in calls if of in (None, call[0])]
