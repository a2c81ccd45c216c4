#!/usr/bin/env python3
"""Applies each mutant of mutants.json to a copy of the repository, and says which ones the tests let live.

    python3 allocators/mutants/run.py [--only WORDS]... [--target DIR] [--list]

A mutant replaces one piece of text, which has to occur exactly once, and names the tests that have to fail for it. Those
tests run without it first. Nothing is optimised, because what counts is how soon a test program is built. Exit code 1 if
any mutant survives or does not compile. Needs cargo, git and nothing else; some seconds to a minute for each mutant.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def copy_repository(place: Path) -> None:
    """Copies what git tracks, and what it does not ignore, as it lies there now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def cargo(place: Path, target: Path, tests: str, *extra: str) -> subprocess.CompletedProcess:
    command = ["cargo", "test", "--quiet", "--locked", "-p", "vramlab", *tests.split(), *extra]
    environment = {
        **os.environ,
        "CARGO_TARGET_DIR": str(target),
        "CARGO_PROFILE_DEV_OPT_LEVEL": "0",
        "CARGO_PROFILE_DEV_DEBUG": "0",
    }
    # A mutant may loop for ever; nothing here takes as long.
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)


def verdict(place: Path, target: Path, mutant: dict) -> str:
    file = place / "allocators" / mutant["file"]
    text = file.read_text()
    if text.count(mutant["find"]) != 1:
        return "STALE: its text does not occur exactly once"
    try:
        file.write_text(text.replace(mutant["find"], mutant["replace"]))
        for tests in mutant["tests"]:
            if cargo(place, target, tests, "--no-run").returncode != 0:
                return "DOES NOT COMPILE"
            if cargo(place, target, tests).returncode != 0:
                return "caught"
        return "SURVIVED"
    except subprocess.TimeoutExpired:
        return "caught: the tests did not end"
    finally:
        file.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", metavar="WORDS", help="only mutants whose file or name contains this; may be repeated"
    )
    parser.add_argument("--target", type=Path, help="where cargo builds; kept, so that a second run is faster")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    options = parser.parse_args()
    mutants = json.loads((HERE / "mutants.json").read_text())
    wanted = options.only or [""]
    mutants = [one for one in mutants if any(words in f"{one['file']}: {one['name']}" for words in wanted)]
    if options.list:
        print("\n".join(f"{one['file']}: {one['name']}" for one in mutants))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        place = Path(directory) / "tree"
        target = (options.target or Path(directory) / "target").resolve()
        copy_repository(place)
        for tests in sorted({tests for one in mutants for tests in one["tests"]}):
            whole = cargo(place, target, tests)
            if whole.returncode != 0:
                print(f"{tests}: fails without a mutant\n{whole.stdout}{whole.stderr}", file=sys.stderr)
                return 1
        alive = 0
        for mutant in mutants:
            found = verdict(place, target, mutant)
            alive += not found.startswith("caught")
            print(f"{found:8} {mutant['file']}: {mutant['name']}", flush=True)
    print(f"{len(mutants)} mutants, {alive} not caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
