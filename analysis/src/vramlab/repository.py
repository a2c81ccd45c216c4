"""Where the repository lies: recorded results, notebooks and figures are no part of the installed package."""

from __future__ import annotations

import os
from pathlib import Path

from vramlab.errors import AnalysisError


def _is_root(folder: Path) -> bool:
    return (folder / "analysis" / "pyproject.toml").is_file() and (folder / "experiments" / "specs").is_dir()


def root() -> Path:
    """The repository around the current directory, else around this file (which lies there in an editable install).

    Raises AnalysisError when neither lies in one.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if _is_root(folder):
            return folder
    raise AnalysisError(f"{here}: not inside the repository, whose recorded results are needed; change into it.")


def results() -> Path:
    """The folder of recorded results: RESULTS, or the repository's."""
    given = os.environ.get("RESULTS")
    return Path(given) if given else root() / "experiments" / "results"


def resolve(path: str) -> Path:
    """A path as it was typed: from the current directory, or from the repository's root if it is only there.

    Jupyter starts a notebook in the notebook's own folder, and `RUN=runs/mine` was typed at the root.
    """
    if (given := Path(path)).is_absolute() or given.exists():
        return given
    try:
        there = root() / given
    except AnalysisError:
        return given
    return there if there.exists() else given
