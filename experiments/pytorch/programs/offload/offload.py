#!/usr/bin/env python3
"""Programs that keep data in pinned host memory, under PyTorch's own allocator of it or one of VramLab's.

    python3 experiments/pytorch/programs/offload/offload.py activations --host host-exact --steps 10
    torchrun --nproc-per-node 2 experiments/pytorch/programs/offload/offload.py fsdp

Prints one line of JSON: the most bytes of pinned memory that the program requested (`requested_bytes`) and that the
allocator pinned (`reserved_bytes`), seconds of each step after the first `--warm-up`, and a digest of the losses. Under
`torchrun` both are sums over the ranks, and times are rank 0's. `--host pytorch` is PyTorch's own allocator, whose
requests are counted by the package `vramlab`. `--turns` reads lines from its input, each a program and a number of
steps, which continue that program; an empty line ends a program, and each line is answered by one of JSON. So several
processes can take turns on a GPU. `--small --device cpu` tries the programs without a GPU, and without pinned memory.

Exit codes: 0 completed, 2 bad input.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "baselines")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import models
import torch

# Programs by name: each is a function of a device and a seed, which returns the function of a step.
PROGRAMS = {
    "fsdp": models.fsdp,
    "loader": models.loader,
    "optimizer": models.optimizer,
    "activations": models.activations,
    "weights": models.weights,
}
OWN = "pytorch"


def empty_caches():
    """Returns what the allocators have cached."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_host_memory_stats()


def peaks(device):
    """The most bytes of pinned memory that this process requested and that its allocator pinned."""
    if device.type != "cuda":
        return {"requested_bytes": 0, "reserved_bytes": 0}
    import vramlab.torch

    stats = vramlab.torch.host_stats()
    return {key: stats[key]["peak"] for key in ("requested_bytes", "reserved_bytes")}


class Program:
    """A program in progress: its losses and the times of its steps."""

    def __init__(self, name, device, small, seed):
        empty_caches()
        torch.manual_seed(seed)
        self.name, self.device = name, device
        self.losses, self.times = [], []
        self.step = PROGRAMS[name](device, seed, **models.SMALL if small else {})

    def run(self, steps):
        """Some steps; the loss of each is read at its end."""
        for _ in range(steps):
            start = time.perf_counter()
            loss = self.step(len(self.losses))
            self.losses.append(loss.item())
            self.times.append(time.perf_counter() - start)

    def result(self, warm_up):
        """What is printed."""
        text = ",".join(loss.hex() for loss in self.losses)
        return {
            "program": self.name,
            **models.sum_over_ranks(peaks(self.device), self.device),
            "step_s": [round(seconds, 6) for seconds in self.times[warm_up:]],
            "losses": [self.losses[0], self.losses[-1]],
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        }


def take_turns(device, small, seed):
    """Answers each line of the input."""
    program = None
    for line in sys.stdin:
        words = line.split()
        if not words:
            answer = program.result(0) if program else {}
            program = None
            empty_caches()
        else:
            name, steps = words[0], int(words[1])
            if program is None or program.name != name:
                program = None
                program = Program(name, device, small, seed)
            before = len(program.times)
            program.run(steps)
            answer = {"program": name, "step_s": program.times[before:]}
        print(json.dumps(answer), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", choices=sorted(PROGRAMS))
    parser.add_argument("--host", default=OWN, help="pytorch, or an allocator of pinned memory such as host-exact")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--turns", action="store_true")
    args = parser.parse_args()
    if args.turns == bool(args.program):
        parser.error("name a program, or --turns")
    if not 0 <= args.warm_up < args.steps:
        parser.error("--steps must be more than --warm-up")
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None)
    if device.type == "cuda":
        import vramlab
        import vramlab.torch

        try:
            vramlab.torch.watch_host() if args.host == OWN else vramlab.torch.use(host=args.host)
        except vramlab.Error as error:
            parser.error(str(error))
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # With `warn_only` the backward passes of these attentions differ from run to run.
    for enable in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)
    try:
        if args.turns:
            take_turns(device, args.small, args.seed)
        else:
            program = Program(args.program, device, args.small, args.seed)
            program.run(args.steps)
            result = program.result(args.warm_up)
            if models.rank() == 0:
                print(json.dumps({"host": args.host} | result))
    finally:
        models.leave_group()


if __name__ == "__main__":
    main()
