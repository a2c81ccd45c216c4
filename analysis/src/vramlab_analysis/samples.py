"""Samples of output in the README: each line must be printed by the program of this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.repository import built

# The README's commands with samples of output: the program, and arguments that work on every machine.
COMMANDS = {
    "cargo run -p trainer -- --alloc caching": (
        "trainer",
        ["--alloc", "caching", "--device", "sim", "--dataset", "digits", "--out", "run"],
    ),
    "vramlab advise experiments/histories/resnet50.pickle.xz": (
        "vramlab",
        ["advise", "experiments/histories/resnet50.pickle.xz"],
    ),
}
PAGE = "README.md"
BLOCK = re.compile(r"^```sh\n((?:(?!```).*\n)+)```\n+```text\n((?:(?!```).*\n)+)```$", re.MULTILINE)


@cache
def printed(program: Path, *words: str) -> str:
    """The output of a program, errors and progress first."""
    root = repository.root()
    with tempfile.TemporaryDirectory(prefix="sample-") as folder:
        whole = [str(root / word) if (root / word).is_file() else word for word in words]
        # COLUMNS would wrap lines.
        environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"NO_COLOR": "1"}
        done = subprocess.run(
            [program, *whole], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
    if done.returncode:
        raise AnalysisError(f"{program} {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stderr + done.stdout


def stale(shown: str, printed: str) -> str | None:
    """The first line of a sample that is not printed in this order; `...` stands for omitted lines."""
    left = [line.rstrip() for line in printed.splitlines()]
    for line in shown.splitlines():
        if line == "...":
            continue
        start = line.removesuffix(" ...")
        same = (at for at, one in enumerate(left) if one == line or (start != line and one.startswith(start)))
        at = next(same, None)
        if at is None:
            return line
        left = left[at + 1 :]
    return None


def check(page: str | None = None) -> list[str]:
    """Compares each sample of the README with its program; returns the programs that are not built.

    Raises AnalysisError for a line that is not printed, and for a sample of an unknown command.
    """
    text = (repository.root() / PAGE).read_text() if page is None else page
    blocks = BLOCK.findall(text)
    if len(blocks) != text.count("\n```text\n"):
        raise AnalysisError(f"{PAGE}: a `text` block must follow the `sh` block of its command.")
    missing = []
    for commands, shown in blocks:
        command = commands.splitlines()[-1].split("  #")[0].strip()
        if command not in COMMANDS:
            raise AnalysisError(f"{PAGE}: shows what '{command}' prints, which {__name__} cannot run.")
        name, words = COMMANDS[command]
        program = built(name)
        if program is None:
            missing.append(name)
        elif line := stale(shown, printed(program, *words)):
            raise AnalysisError(f"{PAGE}: shows '{line.strip()}', which '{command}' does not print there.")
    return missing
