"""Measures the time that recording adds to a step: differently recorded processes take turns on one GPU.

    python experiments/pytorch/recording_costs.py -o FILE --turns 12 gpt2 resnet50
    python experiments/pytorch/recording_costs.py -o FILE --turns 10 --steps 700 --arms own,own-none events

Each line of FILE is a turn, or the end of a recording. Ratios are within a turn: each has all arms, in a new random order.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import HERE, PACKAGE

ARMS = ("plain", "own", "own-none", "pytorch-alloc", "pytorch-none", "pytorch-all")


class Arm:
    """A process that waits for its turns."""

    def __init__(self, program, name, folder):
        self.name = name
        variables = os.environ | {"PYTHONPATH": f"{PACKAGE / 'src'}", "VRAMLAB_RECORDER": "own"}
        command = [sys.executable, str(HERE / "programs" / "recorded_steps.py"), program, name, str(folder)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=variables
        )

    def read(self):
        """The next line of its output; None if it has exited."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def turn(self, steps):
        """Milliseconds per step."""
        self.process.stdin.write(f"{steps}\n")
        return self.read()["ms"]

    def end(self):
        """The process's report on its recording."""
        self.process.stdin.close()
        report = self.read()
        self.process.wait(60)
        return report


def measure(program, arms, options, write):
    """Gives each arm its turns, and writes the times."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        running = [Arm(program, name, folder) for name in arms]
        versions = [arm.read() for arm in running][0]
        facts = {"program": program, "steps": options.steps, **versions, "build": options.build, "unix_s": int(time.time())}
        drawn, ratios = random.Random(program), {name: [] for name in arms}
        for turn in range(options.turns):
            order = drawn.sample(running, len(running))
            took = {arm.name: arm.turn(options.steps) for arm in order}
            write(facts | {"turn": turn, "ms": took})
            for name, ms in took.items():
                ratios[name].append(ms / took[arms[0]])
        for arm in running:
            if ended := arm.end():
                write(facts | {"arm": arm.name} | ended)
        for name, of in ratios.items():
            spread = f"{statistics.median(of):.3f} ({min(of):.3f} to {max(of):.3f})"
            print(f"{program}: {name} takes {spread} of a step of {arms[0]}", flush=True)


def main():
    """Measures the programs given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help="gpt2, resnet50, events, …")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="lines are appended to it")
    parser.add_argument("--turns", type=int, default=12, metavar="N", help="turns of each arm (default: 12)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of a turn (default: 20)")
    parser.add_argument("--arms", default=",".join(ARMS), help="ways of recording, the first is what others are over")
    parser.add_argument("--folder", metavar="DIR", help="where recordings are written (default: the system's)")
    parser.add_argument("--build", metavar="COMMIT", help="the commit that runs")
    options = parser.parse_args()
    with options.output.open("a") as file:
        for program in options.programs:
            measure(program, options.arms.split(","), options, lambda line: print(json.dumps(line), file=file, flush=True))


if __name__ == "__main__":
    main()
