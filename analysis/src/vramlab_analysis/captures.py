"""Captures of Nsight Systems, as `vramlab nsight FILE --json --rows` prints them. Times are nanoseconds.

The keys are described in `app/cli/schema.md`. The program is the newest that this checkout has built, or else the first
on the PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError

Row = dict[str, Any]


@dataclass(frozen=True)
class Capture:
    """A capture with its tables, and every call, piece of work and range in the order of their starts."""

    path: str
    document: Row

    def table(self, name: str) -> list[Row]:
        """The rows of a table, such as `calls`."""
        rows: list[Row] = self.document["tables"][name]
        return rows

    @property
    def calls(self) -> list[Row]:
        """Calls of the host, each with the work that it waited for."""
        rows: list[Row] = self.document["rows"]["calls"]
        return rows

    @property
    def work(self) -> list[Row]:
        """Kernels, copies and fills of the devices, each with the call that queued it."""
        rows: list[Row] = self.document["rows"]["work"]
        return rows

    @property
    def ranges(self) -> list[Row]:
        """NVTX ranges."""
        rows: list[Row] = self.document["rows"]["ranges"]
        return rows

    @cached_property
    def steps(self) -> list[Row]:
        """The ranges of training steps. Steps of one launch are one range, such as `steps 9 to 16`."""
        return [row for row in self.ranges if row["text"].split(" ", 1)[0] in ("step", "steps")]

    @cached_property
    def paths(self) -> list[str]:
        """For each range: its text behind those of the ranges around it, with slashes."""
        paths: list[str] = []
        for row in self.ranges:
            outer = row["parent"]
            paths.append(row["text"] if outer is None else f"{paths[outer]}/{row['text']}")
        return paths

    def path_of(self, call: Row) -> str:
        """Ranges around the start of a call, from the outside in, with slashes."""
        return "" if call["range"] is None else self.paths[call["range"]]

    def launch_path(self, work: Row) -> str:
        """Ranges around the call that queued the work."""
        return "" if work["call"] is None else self.path_of(self.calls[work["call"]])


def program() -> Path:
    """The program that reads captures.

    Raises AnalysisError when there is none.
    """
    found = repository.built("vramlab") or shutil.which("vramlab")
    if found is None:
        raise AnalysisError(
            "captures are read by the program vramlab, which is not built: cargo build --release -p vramlab-cli"
        )
    return Path(found)


@cache
def load(path: str | Path) -> Capture:
    """Reads a capture: an SQLite export, or a directory that `vramlab nsight --extract` wrote.

    Raises AnalysisError when the program is missing, or refuses the file.
    """
    command: list[str | Path] = [program(), "nsight", path, "--json", "--rows"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise AnalysisError(f"{command[0]} nsight: {lines[0].removeprefix('error: ')}")
    return Capture(str(path), json.loads(done.stdout))
