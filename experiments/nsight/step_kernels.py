#!/usr/bin/env python3
"""Where the time of a training step goes: each launch of a step, its microseconds, and the bytes that it moves from and to memory.

    python3 experiments/nsight/step_kernels.py --width 8192 --type f32 --sqlite STEP.sqlite --counters STEP.csv -o step-kernels.jsonl

adds a line to step-kernels.jsonl. Both files are of the trainer's step as one graph, by Nsight Systems and Nsight Compute:

    nsys profile --trace=cuda --cuda-graph-trace=node --capture-range=cudaProfilerApi --capture-range-end=stop --export=sqlite \\
        -o STEP target/release/trainer --launch graph --fuse update ... --profile-steps 200..359
    ncu --graph-profiling node --cache-control none --clock-control none --profile-from-start off --launch-count 120 --csv \\
        --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum target/release/trainer ... > STEP.csv

Times are those of Nsight Systems, medians over the steps, since Nsight Compute runs each kernel by itself; bytes are Nsight
Compute's. A step begins with the launch that gathers its rows. Exit codes: 0 done, 2 bad input.
"""

import argparse
import csv
import json
import sqlite3
import statistics
import sys
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path

FIRST = "gather_rows"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"


class Unusable(Exception):
    """What is wrong with a file, in one line."""


def whole_steps(launches, name_of):
    """The launches cut into steps; those of the commonest length."""
    starts = [at for at, one in enumerate(launches) if name_of(one).startswith(FIRST)]
    steps = [launches[first:end] for first, end in pairwise(starts)]
    if not steps:
        raise Unusable(f"no two launches of {FIRST}*: capture more steps of the trainer with --loader resident")
    length, _ = Counter(map(len, steps)).most_common(1)[0]
    return [step for step in steps if len(step) == length]


def timed(path):
    """Nanoseconds of a step from its beginning to the next one's, and its launches: name, blocks, nanoseconds."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        launches = file.execute(
            "SELECT start, end, value, gridX * gridY * gridZ FROM CUPTI_ACTIVITY_KIND_KERNEL"
            " JOIN StringIds ON id = shortName ORDER BY start"
        ).fetchall()
    steps = whole_steps(launches, lambda launch: launch[2])
    kernels = [
        (same[0][2], same[0][3], statistics.median(end - start for start, end, *_ in same))
        for same in zip(*steps, strict=True)
    ]
    return statistics.median(last[0][0] - step[0][0] for step, last in pairwise(steps)), kernels


def counted(path):
    """Names of a step's launches, and the bytes that each reads and writes."""
    launches = {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.reader(line for line in file if line.startswith('"'))
        head = next(rows, [])
        try:
            number, name, metric, value = (
                head.index(column) for column in ("ID", "Kernel Name", "Metric Name", "Metric Value")
            )
        except ValueError:
            raise Unusable("no table of counters: run ncu with --csv") from None
        for row in rows:
            launches.setdefault(row[number], {"name": row[name]})[row[metric]] = int(row[value].replace(",", ""))
    steps = whole_steps(list(launches.values()), lambda launch: launch["name"])
    # The first one finds the cache as Nsight Compute left it.
    steps = steps[1:] or steps
    return [
        (same[0]["name"], *(statistics.median(one[metric] for one in same) for metric in (READ, WRITTEN)))
        for same in zip(*steps, strict=True)
    ]


def main():
    """Adds the line of one capture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--width", type=int, required=True, metavar="N", help="of the hidden layers")
    add("--type", required=True, metavar="NAME", help="f32, tf32, f16 or bf16")
    add("--sqlite", type=Path, required=True, metavar="FILE", help="what Nsight Systems exported")
    add("--counters", type=Path, required=True, metavar="FILE", help="what Nsight Compute printed")
    add("--gpu", required=True, metavar="NAME", help="where this was measured")
    add("--build", required=True, metavar="COMMIT", help="what was measured")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the record; a line is added")
    options = parser.parse_args()
    path = options.sqlite
    try:
        step_ns, kernels = timed(path)
        path = options.counters
        bytes_of = counted(path)
        if [name for name, *_ in kernels] != [name for name, *_ in bytes_of]:
            raise Unusable(f"its launches are others than those in {options.sqlite}")
    except (OSError, ValueError, sqlite3.Error, KeyError, Unusable) as error:
        print(f"error: {path}: {error}", file=sys.stderr)
        return 2
    record = {
        "width": options.width,
        "dtype": options.type,
        "gpu": options.gpu,
        "build": options.build,
        "step_us": step_ns / 1e3,
    }
    record["kernels"] = [
        {"name": name, "blocks": blocks, "us": ns / 1e3, "read_bytes": read, "written_bytes": written}
        for (name, blocks, ns), (_, read, written) in zip(kernels, bytes_of, strict=True)
    ]
    with open(options.output, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
