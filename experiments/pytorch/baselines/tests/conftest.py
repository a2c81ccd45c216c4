"""The trainer on the simulated device: the program in TRAINER, or the most recent build in target/release or target/debug, or
else a new build.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASELINES = Path(__file__).resolve().parents[1]
ROOT = BASELINES.parents[2]
sys.path.insert(0, str(BASELINES))

import start_file  # noqa: E402


@pytest.fixture(scope="session")
def trainer():
    named = os.environ.get("TRAINER")
    if named:
        return named
    found = [path for path in (ROOT / "target" / profile / "trainer" for profile in ("release", "debug")) if path.is_file()]
    if not found:
        subprocess.run(["cargo", "build", "--quiet", "-p", "trainer"], cwd=ROOT, check=True)
        return str(ROOT / "target/debug/trainer")
    return str(max(found, key=lambda path: path.stat().st_mtime))


@pytest.fixture(scope="session")
def run(trainer, tmp_path_factory):
    """Trains on the simulated device; the start file and the record's directory."""

    def run(*options):
        place = tmp_path_factory.mktemp("run")
        command = [trainer, "--device", "sim", "--lr", "0.1", *options]
        command += ["--save-start", place / "start.safetensors", "--out", place / "record"]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        return start_file.read(place / "start.safetensors"), place / "record"

    return run
