#!/usr/bin/env python3
"""Tests whether compute-sanitizer reports an out-of-bounds write to a neighbouring tensor, with and without NVTX heaps.

    python3 experiments/pytorch/sanitize.py -o DIR [--overrun PROGRAM] [--trainer PROGRAM]

Runs programs/overrun.py under the memory checker: natively; under VramLab's allocators with VRAMLAB_NVTX_MEMORY=off; and with
it on, where the checker must report the write, and no error if the program stays in bounds. With --overrun (the example
`overrun` of the crate trainer) the same without PyTorch, with --trainer a short training, which must be clean.
DIR/sanitizer.jsonl has a line per run, with the first error; DIR/NAME.log the output.

Exit codes: 0 each run as expected, 1 some were not, 2 bad input.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from environment import HERE, environment

FOUND = 9
# Allocator, whether it reports its blocks, and whether the program writes out of bounds: then the checker must report the error,
# but not for expandable memory, for which the checker does not support heaps.
CASES = [
    ("native", False, True),
    ("caching", False, True),
    ("caching", True, True),
    ("caching", True, False),
    ("pytorch-expandable", True, True),
    ("remap", True, True),
]
EXPANDABLE = ("pytorch-expandable", "remap")


def sanitizer():
    """The checker's command, with the options that this version supports."""
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    found = next((place for place in places if place and Path(place).is_file()), None)
    if found is None:
        raise SystemExit("error: compute-sanitizer was not found; it is part of the CUDA toolkit")
    known = subprocess.run([found, "--help"], capture_output=True, text=True).stdout
    options = {"--nvtx": "yes", "--force-blocking-launches": "yes", "--target-processes": "all", "--print-limit": "20"}
    chosen = []
    for name, value in options.items():
        if shown := re.search(rf"^\s+{name}\b( arg)?", known, re.MULTILINE):
            # A flag has no value. With "=", as some options have an optional value and a following word would be the program.
            chosen.append(f"{name}={value}" if shown[1] else name)
    return [found, "--tool", "memcheck", "--error-exitcode", str(FOUND), *chosen]


def first_error(text):
    """The checker's first error: its line and the next ones that give its location."""
    lines = [line.lstrip("= ") for line in text.splitlines() if line.startswith("=========")]
    for at, line in enumerate(lines):
        if re.match(r"Invalid|Program hit|Error|Misaligned|Leaked|Fatal", line):
            return " | ".join(line.strip() for line in lines[at : at + 5] if line.strip())[:600]
    return None


def check(options, checker, name, command, variables, expected):
    """Runs a program under the checker; returns the record of the run."""
    log, began = options.output / f"{name}.log", time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        limited = ["timeout", "-k", "5", str(options.timeout), *checker, *command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        code = subprocess.run(limited, env=variables, **streams).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    error = first_error(text)
    printed = next((line for line in text.splitlines() if line.startswith("{")), None)
    return {
        "run": name, "code": code, "error": error, "expected_error": expected,
        "as_expected": code == FOUND and error is not None if expected else code == 0,
        "program": json.loads(printed) if printed else None,
        "took_s": round(time.monotonic() - began, 1), "checker": " ".join(checker[1:]),
    }  # fmt: skip


def main():
    """Runs the cases, a few at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder of results; made if need be"
    )
    overrun = "the example of the trainer: cargo build --release -p trainer --example overrun"
    parser.add_argument("--overrun", type=Path, metavar="PROGRAM", help=overrun)
    parser.add_argument(
        "--trainer", type=Path, metavar="PROGRAM", help="the trainer, to be checked in a short training"
    )
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="runs side by side (default: 3)")
    parser.add_argument("--timeout", type=int, default=150, metavar="SECONDS", help="for one run (default: 150)")
    options = parser.parse_args()
    for program in filter(None, (options.overrun, options.trainer)):
        if not program.is_file():
            print(
                f"error: {program}: no such program; build it: cargo build --release -p trainer [--example overrun]",
                file=sys.stderr,
            )
            return 2
    checker = sanitizer()
    options.output.mkdir(parents=True, exist_ok=True)
    unexpected = 0
    with tempfile.TemporaryDirectory(prefix="sanitize-") as folder:
        runs = []
        for arm, notified, beyond in CASES:
            command = [sys.executable, str(HERE / "programs" / "overrun.py"), *([] if beyond else ["--inside"])]
            own = {"VRAMLAB_NVTX_MEMORY": "on" if notified else "off"}
            name = f"{arm}-{'on' if notified else 'off'}-{'beyond' if beyond else 'inside'}"
            runs.append((name, command, environment(arm) | own, notified and beyond and arm not in EXPANDABLE))
        if options.overrun:
            for arm, notified, beyond in CASES[1:]:
                words = [arm, *([] if notified else ["--nvtx-memory", "off"]), *([] if beyond else ["--inside"])]
                name = f"overrun-{arm}-{'on' if notified else 'off'}-{'beyond' if beyond else 'inside'}"
                expected = notified and beyond and arm not in EXPANDABLE
                runs.append((name, [str(options.overrun), *words], dict(os.environ), expected))
        if options.trainer:
            for arm in ("caching", "pytorch-expandable"):
                arguments = (
                    "--device cuda --dataset digits --hidden 64 --batch 32 --steps 20 --nvtx-memory on --nvtx off"
                )
                command = [str(options.trainer), "--alloc", arm, *arguments.split(), "--out", f"{folder}/{arm}"]
                runs.append((f"trainer-{arm}-on", command, dict(os.environ), False))
        with (
            open(options.output / "sanitizer.jsonl", "w", encoding="utf-8") as file,
            ThreadPoolExecutor(options.jobs) as pool,
        ):
            begun = [pool.submit(check, options, checker, *run) for run in runs]
            for record in (future.result() for future in as_completed(begun)):
                file.write(json.dumps(record) + "\n")
                file.flush()
                unexpected += not record["as_expected"]
                word = "as expected" if record["as_expected"] else "NOT as expected"
                error = record["error"] or "no error"
                print(f"{record['took_s']:6.1f} s  {record['run']}: code {record['code']}, {word}: {error}", flush=True)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
