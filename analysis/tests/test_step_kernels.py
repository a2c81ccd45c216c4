"""`experiments/nsight/step_kernels.py` on artificial captures."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from vramlab_analysis import step_kernels

SCRIPT = Path(__file__).resolve().parents[2] / "experiments/nsight/step_kernels.py"
STEP = [("gather_rows_u8", 100), ("linear_forward_f32_wide", 300), ("linear_gradient_f32_flat", 500)]


def capture(path: Path, steps: int) -> None:
    """Steps of three launches, each 50 ns behind the one before, and the beginning of one more."""
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        file.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, shortName, gridX, gridY, gridZ)")
        file.executemany("INSERT INTO StringIds VALUES (?, ?)", [(at, name) for at, (name, _) in enumerate(STEP)])
        now = 0
        for _ in range(steps):
            for at, (_, ns) in enumerate(STEP):
                file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 4, 2, 1)", (now, now + ns, at))
                now += ns + 50
        file.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 4, 2, 1)", (now, now + 100))


def counters(path: Path, names: list[str]) -> None:
    """Nsight Compute's output for four steps; the first reads more."""
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    number = 0
    for step in range(4):
        for name in names:
            read = "9,999" if step == 0 else "1,000"
            lines.append(f'"{number}","{name}","dram__bytes_read.sum","byte","{read}"')
            lines.append(f'"{number}","{name}","dram__bytes_write.sum","byte","500"')
            number += 1
    path.write_text("\n".join(lines) + "\n")


def run(folder: Path, steps: int, names: list[str]) -> subprocess.CompletedProcess[str]:
    """The script on such captures; adds to record.jsonl."""
    capture(folder / "step.sqlite", steps)
    counters(folder / "step.csv", names)
    words = ["--width", "128", "--type", "f32", "--sqlite", "step.sqlite", "--counters", "step.csv"]
    words += ["--gpu", "a GPU", "--build", "abc", "-o", "record.jsonl"]
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=folder, capture_output=True, text=True, check=False)


def test_a_step_has_each_launch_with_its_time_and_its_bytes(tmp_path: Path) -> None:
    told = run(tmp_path, 5, [name for name, _ in STEP])
    assert told.returncode == 0, told.stderr
    record = json.loads((tmp_path / "record.jsonl").read_text())
    assert record["step_us"] == pytest.approx(1.05)
    assert [(kernel["name"], kernel["us"]) for kernel in record["kernels"]] == [(name, ns / 1e3) for name, ns in STEP]
    assert {(kernel["blocks"], kernel["read_bytes"], kernel["written_bytes"]) for kernel in record["kernels"]} == {
        (8, 1000, 500)
    }


@pytest.mark.parametrize(
    ("steps", "names", "said"),
    [
        (0, [name for name, _ in STEP], "no two launches of gather_rows"),
        (5, ["gather_rows_u8", "another", "linear_gradient_f32_flat"], "its launches are others"),
    ],
)
def test_captures_that_do_not_fit_are_refused(tmp_path: Path, steps: int, names: list[str], said: str) -> None:
    told = run(tmp_path, steps, names)
    assert (told.returncode, (tmp_path / "record.jsonl").exists()) == (2, False)
    assert said in told.stderr
    assert "Traceback" not in told.stderr


def test_the_least_that_moves_is_three_times_the_weights() -> None:
    assert step_kernels.least_bytes(1024, "f16") == 6 * (784 * 1024 + 2 * 1024 * 1024 + 1024 * 10)
    assert step_kernels.least_bytes(1024, "f32") == 2 * step_kernels.least_bytes(1024, "f16")
