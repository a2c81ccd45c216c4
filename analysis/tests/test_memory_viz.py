"""The check of snapshots unpickles nothing that could run a program, and gives no such file to PyTorch's script."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "analysis/check_memory_viz.py"
SNAPSHOT: dict[str, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_memory_viz", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Runs:
    """What runs a program when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def wheel(folder: Path) -> Path:
    """A wheel with a script that does what PyTorch's would with a hostile file: it unpickles it."""
    path = folder / "torch.whl"
    with zipfile.ZipFile(path, "w") as archive:
        text = "import pickle, sys\nprint(pickle.load(open(sys.argv[2], 'rb')))\n"
        archive.writestr("torch/cuda/_memory_viz.py", text)
    return path


def hostile(mark: Path) -> dict[str, bytes]:
    """Files that run a program when something unpickles them, or are no snapshot."""
    command = f"touch {mark}"
    return {
        "reduce": pickle.dumps({**SNAPSHOT, "segments": [Runs(command)]}, 4),
        "protocol 0": pickle.dumps(Runs(command), 0),
        "global": b"cos\nsystem\n(V" + command.encode() + b"\ntR.",
        "inst": b"(V" + command.encode() + b"\nios\nsystem\n.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(command)])
        + command.encode()
        + b"\x85R.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"Pid\n.",
        "cut off": pickle.dumps(SNAPSHOT, 4)[:-9],
        "empty": b"",
        "no mark": b"\x80\x04]e.",
        "no snapshot": pickle.dumps([1, 2], 4),
        "text": b"\x1b]0;title\x07 not a pickle",
    }


@pytest.mark.parametrize("kind", list(hostile(Path("x"))))
def test_a_hostile_file_is_not_loaded(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(hostile(mark)[kind])
    done = subprocess.run(
        [sys.executable, SCRIPT, "--wheel", wheel(tmp_path), path], capture_output=True, text=True, check=False
    )
    assert not mark.exists()
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("FAILED ")
    assert "not loaded" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_unpickler_builds_data_only(check: ModuleType, tmp_path: Path) -> None:
    assert check.load(pickle.dumps(SNAPSHOT, 4)) == SNAPSHOT
    mark = tmp_path / "mark"
    for kind in ("reduce", "protocol 0", "global", "inst", "stack global", "persistent"):
        with pytest.raises(pickle.UnpicklingError):
            check.load(hostile(mark)[kind])
    assert not mark.exists()
