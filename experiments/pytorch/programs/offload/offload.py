#!/usr/bin/env python3
"""Programs that keep data in pinned host memory, under PyTorch's own allocator of it or one of VramLab's.

    python3 experiments/pytorch/programs/offload/offload.py activations --host host-exact --steps 10
    python3 experiments/pytorch/programs/offload/offload.py fsdp loader optimizer --begin 1
    torchrun --nproc-per-node 2 experiments/pytorch/programs/offload/offload.py fsdp

Prints one line of JSON for each program, in the order of the arguments: the most bytes of pinned memory that it
requested (`requested_bytes`) and that the allocator pinned (`reserved_bytes`), seconds of each step after the first
`--warm-up`, and a digest of the losses. Programs run one after the other; caches are emptied between them. `--begin N`
starts with program N modulo their number, so that each comes first in some of several runs. Under `torchrun` bytes are
sums over the ranks, and times are rank 0's. `--host pytorch` is PyTorch's own allocator, whose requests are counted by
the package `vramlab`. `--small --device cpu` tries the programs without a GPU, and without pinned memory.

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
# Steps of each program after the warm-up, about a second on an H200.
STEPS = {"fsdp": 4, "loader": 24, "optimizer": 12, "activations": 8, "weights": 24}
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


def make_deterministic():
    """The same seed gives the same losses to the bit, without a change of what is kept on the host."""
    # With `warn_only` the backward pass of flash attention differs from run to run.
    torch.use_deterministic_algorithms(True)
    # Otherwise each empty tensor, pinned ones included, is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False
    for enable in ("cudnn", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(False)


def rotated(names, begin):
    """The names from number `begin` on, then those before it."""
    at = begin % max(len(names), 1)
    return names[at:] + names[:at]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", metavar="program", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--host", default=OWN, help="pytorch, or an allocator of pinned memory such as host-exact")
    parser.add_argument("--steps", type=int, help="of each program, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--begin", type=int, default=0, help="number of the program that runs first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if unknown := [name for name in args.programs if name not in PROGRAMS]:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if len(set(args.programs)) < len(args.programs):
        parser.error("name each program once")
    if args.warm_up < 0 or args.begin < 0 or (args.steps is not None and args.steps < 1):
        parser.error("--steps must be at least 1, --warm-up and --begin at least 0")
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None)
    if device.type == "cuda":
        import vramlab
        import vramlab.torch

        try:
            vramlab.torch.watch_host() if args.host == OWN else vramlab.torch.use(host=args.host)
        except vramlab.Error as error:
            parser.error(str(error))
        torch.cuda.set_device(device)
    make_deterministic()
    try:
        results = {}
        for name in rotated(args.programs, args.begin):
            program = Program(name, device, args.small, args.seed)
            program.run(args.warm_up + (args.steps or STEPS[name]))
            results[name] = program.result(args.warm_up)
            # It ends before the next one begins.
            del program
        if models.rank() == 0:
            for name in args.programs:
                print(json.dumps({"program": name, "host": args.host} | results[name]))
    finally:
        models.leave_group()


if __name__ == "__main__":
    main()
