"""Which builds the records are of, as far as they say."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

from vramlab_analysis import inside, repository
from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import holds_experiment, load_experiment


def _records() -> Iterator[tuple[str, str | None]]:
    """Each record of a GPU and the commit that it names."""
    for label in sorted(repository.results().glob("*-h200")):
        for path in sorted(label.iterdir()):
            if holds_experiment(path):
                told: Any = load_experiment(path).document
            elif path.suffix == ".json":
                told = read_json(path)
                told = told[0] if isinstance(told, list) else told
            else:
                continue
            yield f"{label.name}/{path.name}", (told.get("provenance") or {}).get("git_commit")
    for path in inside.files():
        for machine in inside.load(path).machines[:1]:
            yield path.name, machine.get("commit") or machine.get("build")


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
    unnamed = 0
    for record, commit in _records():
        if commit is None:
            unnamed += 1
        else:
            named.setdefault(commit[:8], []).append(record.partition("/")[2] or record)
    parts = []
    for commit, records in named.items():
        gone = "" if here(commit) else ", which is not in this repository"
        parts.append(f"`{commit}`{gone} ({', '.join(f'`{one}`' for one in records)})")
    return (
        f"Builds. Of {unnamed + sum(map(len, named.values()))} records of a GPU {unnamed} name no commit. The others "
        f"are of {'; '.join(parts)}."
    )
