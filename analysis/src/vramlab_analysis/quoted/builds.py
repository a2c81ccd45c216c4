"""Which builds the records are of, as far as they say."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

from vramlab_analysis import inside, repository, stories
from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import holds_experiment, labels, load_experiment
from vramlab_analysis.quoted import beside
from vramlab_analysis.quoted.parts import listed


def _records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record of a GPU and where it says that it is from."""
    for path in (path for label in labels() for path in sorted(label.iterdir())):
        if holds_experiment(path):
            told: Any = load_experiment(path).document
        elif path.suffix == ".json":
            told = read_json(path)
            told = told[0] if isinstance(told, list) else told
        else:
            continue
        yield path.name, told.get("provenance") or {}
    yield "training-beside.jsonl", _of(beside.record()[0])
    yield "stories.jsonl.xz", _of(stories.load().machine)
    for path in inside.files():
        machines = {machine.get("build"): machine for machine in inside.load(path).machines}
        yield from ((path.name, _of(machine)) for machine in machines.values())


def _of(machine: dict[str, Any]) -> dict[str, Any]:
    """The provenance of what a Python program measured: of the build, where the repository that it saw is another."""
    told = machine.get("provenance") or {}
    build = machine.get("build") or told.get("git_commit")
    return told if build == told.get("git_commit") else {"git_commit": build}


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
    told = []
    for record, where in _records():
        told.append(where)
        if commit := where.get("git_commit"):
            named.setdefault(commit[:8], []).append(f"`{record}`")
    # Most are of one build: its records are those that no other build names.
    most = max(named, key=lambda commit: len(named[commit]))
    others = [
        f"{len(records)} of `{commit}` ({', '.join(dict.fromkeys(records))})"
        for commit, records in named.items()
        if commit != most
    ]
    unnamed = len(told) - sum(map(len, named.values()))
    others += [f"{unnamed} name no commit"] if unnamed else []
    gone = [f"`{commit}`" for commit in named if not here(commit)]
    others += [f"not in this repository {'is' if len(gone) == 1 else 'are'} {listed(gone)}"] if gone else []
    dirty = sum(bool(where.get("git_dirty")) for where in told)
    others += [f"{dirty} of a changed tree"] if dirty else []
    profiles = sorted({where["build_profile"] for where in told if "build_profile" in where})
    return (
        f"Builds, {' and '.join(profiles)}. Of {len(told)} records of GPUs {len(named[most])} are of `{most}`"
        f"{''.join(f'; {one}' for one in others)}."
    )
