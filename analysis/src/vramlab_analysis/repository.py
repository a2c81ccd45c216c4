"""The location of the repository: the installed package has no recorded results, notebooks and figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vramlab_analysis.errors import AnalysisError


def _is_root(folder: Path) -> bool:
    return (folder / "analysis" / "pyproject.toml").is_file() and (folder / "experiments" / "specs").is_dir()


def root() -> Path:
    """The repository around the current directory, else around this file (in an editable install).

    Raises AnalysisError when neither is in one.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if _is_root(folder):
            return folder
    raise AnalysisError(
        f"{here}: not inside the repository, whose recorded results are needed; change to its directory."
    )


def built(name: str) -> Path | None:
    """The newest program that the repository's build made, or None."""
    try:
        target = root() / os.environ.get("CARGO_TARGET_DIR", "target")
    except AnalysisError:
        return None
    programs = [path for kind in ("debug", "release") if (path := target / kind / name).is_file()]
    return max(programs, key=lambda path: path.stat().st_mtime) if programs else None


@dataclass(frozen=True)
class Results:
    """A directory of results, unpacked, as `experiments results` lists it."""

    folder: Path
    # Paths of its entries with their devices (None for a file), oldest first.
    records: tuple[tuple[Path, str | None], ...]

    def labels(self, device: str) -> list[Path]:
        """The directories of a device, oldest first."""
        return [path for path, of in self.records if of == device]

    def files(self, name: str) -> list[Path]:
        """The files DATE-LABEL-name, plain or compressed, oldest first."""
        ends = tuple(f"-{name}{ending}" for ending in ("", ".xz", ".gz"))
        return [path for path, of in self.records if of is None and path.name.endswith(ends)]


def listing() -> Results:
    """The recorded results: those in RESULTS, or the repository's. Their archives are unpacked first.

    The program `experiments` does both and is started once while the directory does not change.

    Raises AnalysisError when it is not built, or when a directory differs from its archive.
    """
    named = os.environ.get("RESULTS")
    folder = resolve(named) if named else root() / "experiments" / "results"
    if not folder.is_dir():
        raise AnalysisError(f"{folder}: no such directory of results.")
    return _listing(folder, folder.stat().st_mtime_ns)


def results() -> Path:
    """The directory of `listing`."""
    return listing().folder


@cache
def _listing(path: Path, _changed_ns: int) -> Results:
    program = built("experiments") or shutil.which("experiments")
    if program is None:
        raise AnalysisError(
            f"{path}: the program `experiments`, which lists recorded results, is not built; "
            "run `cargo build -p experiments` in the repository."
        )
    output = subprocess.run([program, "results", "--json", path.resolve()], capture_output=True, text=True)
    if output.returncode:
        lines = output.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
        if "unrecognized subcommand" in reason:
            reason = "the program is older than this package; run `cargo build -p experiments`."
        raise AnalysisError(f"{path}: `{program} results` failed: {reason}")
    found = json.loads(output.stdout)
    folder = Path(found["folder"])
    return Results(folder, tuple((folder / one["name"], one.get("device")) for one in found["records"]))


def unpack(archive: Path) -> Path:
    """The directory LABEL that LABEL.tar.xz is unpacked to, next to it.

    Raises AnalysisError when the directory has other contents.
    """
    return _listing(archive, archive.stat().st_mtime_ns).folder


def resolve(path: str) -> Path:
    """A path relative to the current directory, or to the repository's root if it exists only there.

    Jupyter starts a notebook in the notebook's own directory, and users type `RUN=runs/mine` or `RESULTS=runs` at the
    root.
    """
    if (given := Path(path)).is_absolute() or given.exists():
        return given
    try:
        in_root = root() / given
    except AnalysisError:
        return given
    return in_root if in_root.exists() else given
