"""`experiments/nsight/capture.sh` over a program that stands in for nsys and writes what it was given."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "experiments/nsight/capture.sh"
NSYS = """#!/bin/sh
for last; do case $last in --output=*) out=${last#--output=} ;; esac; done
if [ "$1" = profile ]; then env > "$out.environment"; printf '%s\\n' "$@" > "$out.nsys-rep"; else : > "$5"; fi
"""


def capture(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    nsys = folder / "nsys"
    nsys.write_text(NSYS)
    nsys.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "NSYS": str(nsys)} | environment
    return subprocess.run(
        ["bash", SCRIPT, *words], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=60
    )


def test_an_unchanged_program_is_captured_whole(tmp_path: Path) -> None:
    done = capture(tmp_path, "--", "/bin/echo", "-o", "words", MY_SETTING="7", API_TOKEN="t", SSH_KEY="k")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].split() == ["next", "vramlab", "nsight", "echo.sqlite"]
    given = (tmp_path / "echo.nsys-rep").read_text().splitlines()
    assert given[-3:] == ["/bin/echo", "-o", "words"]
    assert not [word for word in given if word.startswith("--capture-range")]
    environment = (tmp_path / "echo.environment").read_text()
    assert "MY_SETTING=7" in environment
    assert "API_TOKEN" not in environment
    assert "SSH_KEY" not in environment


def test_options_choose_range_environment_and_name(tmp_path: Path) -> None:
    words = ("--range", "--clean", "-e", "API_TOKEN", "-o", "new/one", "--", "/bin/true")
    done = capture(tmp_path, *words, MY_SETTING="7", API_TOKEN="t")
    assert done.returncode == 0, done.stderr
    assert "--capture-range=cudaProfilerApi" in (tmp_path / "new/one.nsys-rep").read_text().splitlines()
    environment = (tmp_path / "new/one.environment").read_text()
    assert "MY_SETTING" not in environment
    assert "API_TOKEN=t" in environment
    again = capture(tmp_path, *words)
    assert again.returncode == 2
    assert "already exists" in again.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "name the program"),
        (("--wrong", "--", "/bin/true"), "'--wrong' is not an option"),
        (("-o",), "-o needs"),
        (("--", "./missing"), "program not found"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, words: tuple[str, ...], part: str) -> None:
    done = capture(tmp_path, *words)
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
