#!/usr/bin/env python3
"""Tests whether PyTorch's expandable segments make GPT-2's steps on varying shapes slower, and which steps.

    python3 experiments/pytorch/baselines/expandable_steps.py -o experiments/results/expandable-steps.json [--repeats 5] [--steps 40]

Each repeat has one process per setting, in turn. A process trains on the same sequence of shapes three times: in the first
pass every shape is new to the libraries and memory grows, in the later passes neither. Each step is synchronised. The file
contains, for each process and step, the pass, batch, length, milliseconds and number of driver calls of the allocator. Needs
a GPU with 16 GB and PyTorch 2.11; two minutes on an H200.

Exit codes: 0 completed, 1 failed while training, 2 bad input.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from record_histories import BadInput, Parser, framework, positive, write
from run_record import provenance

SETTINGS = {"default": "", "expandable": "expandable_segments:True"}
PASSES = 3


def arguments():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the record goes")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="processes for each setting (default: 5)")
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="steps in a pass (default: 40)")
    parser.add_argument("--only", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.output or options.only):
        raise BadInput("-o FILE is missing; see --help")
    return options


def train(steps):
    """The rows of one process: pass, batch, length, milliseconds, new segments or mapped ranges."""
    torch = framework()
    from history_workloads import Gpt
    from torch.nn import functional as F

    torch.manual_seed(0)
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(batch, length):
        text = torch.randint(50257, (batch, length), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 50257).float(), text[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(3):
        step(2, 128)
    draw = random.Random(1)
    shapes = [(draw.randint(2, 8), draw.randint(128, 1024)) for _ in range(steps)]
    rows = []
    for turn in range(PASSES):
        for batch, length in shapes:
            before = torch.cuda.memory_stats()["num_device_alloc"]
            start = time.perf_counter()
            step(batch, length)
            milliseconds = round(1e3 * (time.perf_counter() - start), 3)
            rows.append([turn, batch, length, milliseconds, torch.cuda.memory_stats()["num_device_alloc"] - before])
    stats = torch.cuda.memory_stats()
    return {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_active_bytes": stats["active_bytes.all.peak"],
        "rows": rows,
    }


def main():
    try:
        options = arguments()
        if options.only:
            print(json.dumps(train(options.steps)))
            return 0
        framework()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = []
    for repeat in range(options.repeats):
        for name, conf in SETTINGS.items():
            command = [sys.executable, __file__, "--only", name, "--steps", str(options.steps)]
            environment = {**os.environ, "PYTORCH_ALLOC_CONF": conf} if conf else os.environ
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                return 1
            run = {"setting": name, "conf": conf, "repeat": repeat, **json.loads(done.stdout)}
            runs.append(run)
            means = [statistics.mean(row[3] for row in run["rows"] if row[0] == turn) for turn in range(PASSES)]
            print(f"{name}: {', '.join(f'{mean:.1f}' for mean in means)} ms a step in the three passes", flush=True)
    columns = ["pass", "batch", "length", "ms", "driver_allocations"]
    record = {"provenance": provenance(), "columns": columns, "runs": runs}
    try:
        write(options.output, (json.dumps(record, separators=(",", ":")) + "\n").encode())
    except OSError as error:
        print(f"error: {options.output}: {error.strerror}; choose another file with -o", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
