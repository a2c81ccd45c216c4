#!/usr/bin/env python3
"""Records the events of PyTorch's caching allocator under four workloads, for `vramlab replay` and `capacity`.

    python3 experiments/pytorch/baselines/record_histories.py -o experiments/histories [--only NAME] [--steps N]

Each workload has a separate process, so that its history starts with the first allocation. For each: NAME.pickle.xz,
the snapshot of `torch.cuda.memory` without stack frames, and NAME.json, PyTorch's own statistics at its end. Needs a GPU
with 16 GB and PyTorch 2.11; it took 70 s on an H200. Sizes and order of allocations follow from --seed; addresses, and
the completion times of deferred frees, do not.

Exit codes: 0 completed, 1 failed while recording, 2 bad input.
"""

import argparse
import json
import lzma
import os
import pickle
import subprocess
import sys
from pathlib import Path

from command_line import BadInput, Failed, Parser, positive, record_code

# Steps of each workload: enough for the allocator to settle, few enough for a small file.
STEPS = {"mlp": 300, "gpt2": 12, "resnet50": 16, "streams": 160}
# Limit for a committed history.
MOST_BYTES = 150_000
INSTALL = "pip install torch==2.11.0"


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the files; made if need be")
    parser.add_argument("--only", choices=STEPS, metavar="NAME", help=f"one of {', '.join(STEPS)} (default: all)")
    parser.add_argument("--steps", type=positive, metavar="N", help=f"training steps (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of weights, data and sizes (default: 42)")
    return parser.parse_args()


def framework():
    """PyTorch with a GPU; raises an error with the fix if one is missing."""
    try:
        import torch
    except ImportError as error:
        raise BadInput(f"PyTorch cannot be loaded by {sys.executable} ({error}); {INSTALL}") from None
    if not torch.cuda.is_available():
        raise BadInput(
            f"PyTorch {torch.__version__} finds no GPU, and a history is recorded on one; {INSTALL} on a machine with a driver"
        )
    return torch


def record(name, steps, seed, output):
    """Runs one workload in this process and writes its history."""
    torch = framework()
    import history_workloads

    torch.manual_seed(seed)
    # Create the context first; the history contains every later allocation.
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None)
    device = torch.device("cuda")
    try:
        kept = history_workloads.WORKLOADS[name](device, steps, seed)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        raise Failed(f"{name}: {str(error).splitlines()[0]}; free the GPU, or lower --steps") from None
    stats = torch.cuda.memory_stats(device)
    snapshot = torch.cuda.memory._snapshot()
    del kept
    events = snapshot["device_traces"][torch.cuda.current_device()]
    seen = sum(event["action"] == "alloc" for event in events)
    if seen != stats["allocation.all.allocated"]:
        raise Failed(
            f"{name}: the history has {seen} allocations, PyTorch counted {stats['allocation.all.allocated']}: it is not complete"
        )
    facts = {
        "workload": name,
        "steps": steps,
        "seed": seed,
        "events": len(events),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(device),
        "conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        **{key: value for key, value in sorted(stats.items()) if isinstance(value, int) and ("." not in key or ".all." in key)},
    }
    packed = lzma.compress(pickle.dumps(snapshot, protocol=4), preset=9 | lzma.PRESET_EXTREME)
    if len(packed) > MOST_BYTES:
        raise Failed(f"{name}: the history takes {len(packed)} bytes, the limit is {MOST_BYTES}: lower --steps (now {steps})")
    write(output / f"{name}.pickle.xz", packed)
    write(output / f"{name}.json", (json.dumps(facts, indent=1) + "\n").encode())
    print(f"{name}: {len(events)} events, {len(packed)} bytes, peak reserved {stats['reserved_bytes.all.peak'] / 2**20:.0f} MiB")


def write(path, content):
    """Writes a file that is either complete or absent."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)


def run(options):
    """Records one workload in this process, or each in a process of its own."""
    if options.only:
        record(options.only, options.steps or STEPS[options.only], options.seed, options.output)
        return 0
    framework()
    for name in STEPS:
        command = [sys.executable, __file__, "--only", name, "--seed", str(options.seed), "-o", str(options.output)]
        command += ["--steps", str(options.steps)] if options.steps else []
        done = subprocess.run(command)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(record_code(arguments, run))
