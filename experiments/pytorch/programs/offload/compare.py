#!/usr/bin/env python3
"""Compares allocators of pinned host memory in the programs of offload.py, in turns on one GPU.

    python3 experiments/pytorch/programs/offload/compare.py -o offload.jsonl

Each allocator has a process, and the processes take turns: in each round every process runs some steps of a program, in
an order that rotates. Writes a line of JSON for each program and allocator: bytes requested and reserved at most, the
median seconds of a step, its ratio to PyTorch's in the same round (median over the rounds), and whether the losses are
equal to PyTorch's to the bit. Prints the same as a table. `--seconds` ends with the rounds that fit, at least one.

Exit codes: 0 completed, 1 a program failed, 2 bad input.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

OFFLOAD = Path(__file__).resolve().parent / "offload.py"
HOSTS = ("pytorch", "host-pytorch", "host-exact")
# Steps of a turn, so that each takes some tenths of a second.
STEPS = {"fsdp": 1, "loader": 16, "optimizer": 2, "activations": 2, "weights": 2}

HEAD = "program     host         asked GiB    taken   ratio   step ms   ratio rounds  equal losses"


class Worker:
    """A process that runs programs under one allocator, when it is asked to."""

    def __init__(self, host, options):
        self.host = host
        command = [sys.executable, str(OFFLOAD), "--turns", "--host", host, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        """Sends a line."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        """The answer to the oldest line without one."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process under {self.host} ended with exit code {self.process.wait()}")
        return json.loads(line)


def turns(workers, program, rounds, deadline):
    """The seconds of the steps of each round, by allocator, and the results at the end."""
    line = f"{program} {STEPS[program]}"
    # A program begins in all processes at once, and its first turn is not counted.
    for worker in workers:
        worker.ask(line)
    for worker in workers:
        worker.answer()
    times = {worker.host: [] for worker in workers}
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        at = number % len(workers)
        for worker in workers[at:] + workers[:at]:
            worker.ask(line)
            times[worker.host].append(worker.answer()["step_s"])
    for worker in workers:
        worker.ask("")
    return times, {worker.host: worker.answer() for worker in workers}


def rows(program, times, results):
    """A line for each allocator."""
    first = next(iter(times))
    for host, result in results.items():
        ratios = [
            statistics.median(turn) / statistics.median(own)
            for turn, own in zip(times[host], times[first], strict=True)
        ]
        asked = result["requested_bytes"]
        yield {
            "program": program,
            "host": host,
            "requested_bytes": asked,
            "reserved_bytes": result["reserved_bytes"],
            "reserved_over_requested": result["reserved_bytes"] / asked if asked else None,
            "step_s": statistics.median(seconds for turn in times[host] for seconds in turn),
            "step_over_pytorch": statistics.median(ratios),
            "rounds": len(ratios),
            "equal_losses": result["digest"] == results[first]["digest"],
            "digest": result["digest"],
        }


def shown(row):
    """A line of the table."""
    ratio = row["reserved_over_requested"]
    gib = [f"{row[key] / 2**30:9.3f}" for key in ("requested_bytes", "reserved_bytes")]
    return (
        f"{row['program']:12}{row['host']:14}{gib[0]}{gib[1]}{ratio if ratio is not None else float('nan'):8.3f}"
        f"{1000 * row['step_s']:10.1f}{row['step_over_pytorch']:8.3f}{row['rounds']:7}  {row['equal_losses']}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(STEPS)} (all)")
    parser.add_argument("--hosts", default=",".join(HOSTS), help="the first is compared with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    chosen = args.programs or list(STEPS)
    if unknown := set(chosen) - set(STEPS):
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    begun = time.monotonic()
    workers = [Worker(host, ["--device", args.device] + ["--small"] * args.small) for host in args.hosts.split(",")]
    print(HEAD)
    try:
        for number, program in enumerate(chosen):
            # What is left, shared by the programs that are left.
            left = (begun + args.seconds - time.monotonic()) / (len(chosen) - number)
            times, results = turns(workers, program, args.rounds, time.monotonic() + left)
            for row in rows(program, times, results):
                print(shown(row), flush=True)
                if args.output:
                    with args.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    except (RuntimeError, BrokenPipeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.process.stdin.close() if not worker.process.stdin.closed else None
    for worker in workers:
        worker.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
