"""`capture.sh` and `record.sh` of `experiments/nsight` over programs that stand in for nsys and the trainer."""

from __future__ import annotations

import itertools
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


CAPTURING_NSYS = """#!/bin/bash
shift
while [[ $1 == --* ]]; do case $1 in --output=*) out=${1#--output=} ;; esac; shift; done
"$@" && : > "$out.qdstrm"
"""
TRAINER = """#!/bin/bash
[ "$1" != --version ] || exit 0
words="$*"
while [ "$1" != --out ]; do shift; done
case $words in *--fail*stream-ordered*|*stream-ordered*--fail*) echo no >&2; exit 3 ;; esac
mkdir -p "$2"; cd "$2"
printf '%s\n' "$words" > summary.json
for name in driver_calls.jsonl trace.jsonl perfetto.json; do : > "$name"; done
"""


def record(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("nsys", CAPTURING_NSYS), ("trainer", TRAINER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "NSYS": str(folder / "nsys")}
    script, trainer = str(SCRIPT.with_name("record.sh")), str(folder / "trainer")
    command = ["bash", script, "-o", "captures", "-t", trainer, *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=60)


def test_each_backend_is_captured_and_three_with_wide_layers(tmp_path: Path) -> None:
    done = record(tmp_path, "--", "--steps", "9")
    assert done.returncode == 0, done.stderr
    arms = {path.parent.name: path.read_text().split() for path in tmp_path.glob("captures/*/summary.json")}
    wide = {"naive-sync-never-hidden-2048", "caching-sync-step-hidden-2048", "stream-ordered-sync-step-hidden-2048"}
    backends = ("naive", "caching", "stream-ordered")
    assert set(arms) == wide | {f"{alloc}-sync-{sync}" for alloc in backends for sync in ("never", "step")}
    for arm, given in arms.items():
        options = dict(itertools.pairwise(given))
        assert arm.startswith(f"{options['--alloc']}-sync-{options['--sync']}")
        assert (options["--hidden"], options.get("--nvtx")) == (("2048", "off") if arm in wide else ("784", None))
        # The last one counts.
        assert given[-2:] == ["--steps", "9"]
        files = {path.name for path in (tmp_path / "captures" / arm).iterdir()}
        assert files == {"summary.json", "driver_calls.jsonl.gz"}
        assert (tmp_path / f"captures/{arm}.qdstrm.xz").exists()


def test_a_capture_that_fails_is_named_and_the_others_are_made(tmp_path: Path) -> None:
    done = record(tmp_path, "--", "--fail")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: stream-ordered-sync-never failed")]
    assert len(list(tmp_path.glob("captures/*/summary.json"))) == 6
