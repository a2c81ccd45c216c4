"""Runs steps of a program while it is recorded by a given recorder, a few at a time: see `recording_costs.py`.

    python programs/recorded_steps.py PROGRAM ARM FOLDER

Reads a number of steps per line and answers with the milliseconds per step. ARM is `plain`, `own`, `own-none`,
`pytorch-alloc`, `pytorch-all` or `pytorch-none`: the recorder, and the events with frames.
"""

import json
import os
import sys
import time
from pathlib import Path

import programs
import torch

WARM_UP = 20
# As large as in the measurements of allocators, except for the host-bound program.
SIZES = {"resnet50": {"batch": 32}}


def recording(arm, folder):
    """Starts the arm's recording; returns the object that ends it, or None."""
    recorder, _, frames = arm.partition("-")
    if recorder == "plain":
        return None
    if recorder == "pytorch":
        context = None if frames == "none" else frames
        torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=500_000)
        return None
    from vramlab import _record

    return _record.Recording(Path(folder) / f"{arm}.pickle", frames or "alloc")


def events():
    """Steps of a loop that allocates: two events per request, and three with its free."""
    kept = []

    def step(number):
        for _ in range(1000):
            kept[:] = [torch.empty(4096, device="cuda")]

    return step


def main():
    """Answers until the input ends."""
    name, arm, folder = sys.argv[1:]
    torch.cuda.init()
    torch.manual_seed(1)
    began = recording(arm, folder)
    if name == "events":
        step = events()
    else:
        step = programs.PROGRAMS[name][0](torch.device("cuda"), 1, **SIZES.get(name, {}))
    for number in range(WARM_UP):
        step(number)
    torch.cuda.synchronize()
    report = {"ready": torch.__version__, "python": sys.version.split()[0], "gpu": torch.cuda.get_device_name()}
    print(json.dumps(report), flush=True)
    for line in sys.stdin:
        steps = int(line)
        start = time.perf_counter()
        for number in range(steps):
            step(number)
        torch.cuda.synchronize()
        print(json.dumps({"ms": (time.perf_counter() - start) / steps * 1000}), flush=True)
    if began is None:
        return
    start = time.perf_counter()
    (file,) = began.write(began.path, last=True)
    (snapshot,) = began.recorder.files()
    took = time.perf_counter() - start
    ended = {"events": snapshot.events, "bytes": os.path.getsize(file), "end_s": took}
    print(json.dumps(ended | {"rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4096}), flush=True)


if __name__ == "__main__":
    main()
