"""Times the steps of a program while it is recorded, a few per request of the runner: `--recorder` of programs.py.

Recorders: `none`; `own`, VramLab's, and `own-none` without stack frames; `pytorch-alloc`, `pytorch-all` and `pytorch-none`,
PyTorch's history with frames of these events.
"""

import os
import statistics
import time
from pathlib import Path

RECORDERS = ("none", "own", "own-none", "pytorch-alloc", "pytorch-none", "pytorch-all")
WARM_UP = 20
# Below a run's directory, whose recordings are removed at its end.
FILE = Path("record") / "recording.pickle"


def begin(torch, name):
    """Starts recording; returns VramLab's recording, or None."""
    recorder, _, frames = name.partition("-")
    if recorder == "pytorch":
        context = None if frames == "none" else frames
        torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=500_000)
    if recorder != "own":
        return None
    from vramlab import _record

    FILE.parent.mkdir(exist_ok=True)
    return _record.Recording(FILE, frames or "alloc")


def measure(torch, step, recording, requests):
    """Milliseconds per step at each request, which has a number of steps, and the cost of ending the recording."""
    for number in range(WARM_UP):
        step(number)
    torch.cuda.synchronize()
    record = {"turn_ms": []}
    for steps in requests:
        began = time.perf_counter()
        for number in range(steps):
            step(number)
        torch.cuda.synchronize()
        record["turn_ms"].append((time.perf_counter() - began) / steps * 1000)
    record["ms"] = statistics.median(record["turn_ms"])
    if recording is not None:
        began = time.perf_counter()
        (file,) = recording.write(recording.path, last=True)
        (snapshot,) = recording.recorder.files()
        record |= {"end_s": time.perf_counter() - began, "events": snapshot.events, "bytes": os.path.getsize(file)}
        record["rss"] = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return record
