"""Which builds the records are of, as far as they say."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

from vramlab_analysis import inside, repository
from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import holds_experiment, load_experiment


def _records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record of a GPU and where it says that it is from."""
    for label in sorted(repository.results().glob("*-h200")):
        for path in sorted(label.iterdir()):
            if holds_experiment(path):
                told: Any = load_experiment(path).document
            elif path.suffix == ".json":
                told = read_json(path)
                told = told[0] if isinstance(told, list) else told
            else:
                continue
            yield path.name, told.get("provenance") or {}
    for path in inside.files():
        for machine in inside.load(path).machines[:1]:
            yield path.name, {"git_commit": machine.get("build"), **(machine.get("provenance") or {})}


def _git(*words: str) -> str | None:
    """What git says of the repository, None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=repository.root(), capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def here(commit: str) -> bool:
    """Whether the history of what is checked out has a commit."""
    return _git("merge-base", "--is-ancestor", commit, "HEAD") is not None


def sentence() -> str | None:
    """Which commits the records name, and whether they are in this repository; None without its whole history."""
    if _git("rev-parse", "--is-shallow-repository") != "false":
        return None
    named: dict[str, list[str]] = {}
    unnamed, told = 0, []
    for record, where in _records():
        if commit := where.get("git_commit"):
            named.setdefault(commit[:8], []).append(f"`{record}`")
            told.append(where)
        else:
            unnamed += 1
    parts = [
        f"`{commit}`{'' if here(commit) else ', which is not in this repository'} ({', '.join(records)})"
        for commit, records in named.items()
    ]
    dirty = sum(bool(where.get("git_dirty")) for where in told)
    profiles = sorted({where["build_profile"] for where in told if "build_profile" in where})
    return (
        f"Builds. Of {unnamed + len(told)} records of a GPU {unnamed} name no commit. The others are "
        f"{' and '.join(profiles)} builds, {dirty or 'none'} of a changed tree, of {'; '.join(parts)}."
    )
