#!/usr/bin/env python3
"""Runs one program of the acceptance list and prints one line of JSON: its losses and PyTorch's peaks of memory.

    python3 experiments/pytorch/programs/acceptance/run.py lora
    python3 experiments/pytorch/programs/acceptance/launch.py 2 29500 ddp_hook    a job of two processes
    python3 experiments/pytorch/programs/acceptance/run.py --list

`--device cpu` tries one without a GPU, with small sizes. The seeds are fixed, and PyTorch refuses operations whose results
are not bitwise reproducible, unless a program allows them.

Exit codes: 0 completed or skipped (as printed), 1 the program failed, 2 bad input.
"""

import argparse
import importlib
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The script's own directory is first on the path, where names of the families would hide other modules.
sys.path[0:1] = [str(HERE.parent), str(HERE.parents[1])]

# Read when the first cuBLAS handle is created: without it, matrix products on several streams may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def print_record(record):
    """Prints a record in one write: the processes of a job share the output."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def prepare(torch, options):
    """Fixes the seeds and requests deterministic kernels; returns the program's argument."""
    from acceptance import common

    rank, ranks = common.rank_of_job()
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank if ranks > 1 else 0)
    warnings.filterwarnings("ignore")
    # With `warn_only` the backward pass of flash attention would add in any order.
    torch.use_deterministic_algorithms(True)
    # It would write to each new tensor, which users' programs do not.
    torch.utils.deterministic.fill_uninitialized_memory = False
    common.seed_all()
    device = torch.device("cuda", rank if ranks > 1 else 0) if on_gpu else torch.device("cpu")
    return common.Run(device, rank, ranks, small=options.small or not on_gpu)


def memory(torch):
    """PyTorch's peaks, summed over the GPUs that this process used, and the number of cache flushes by allocation retries."""
    each = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    keys = {
        "peak_allocated": "allocated_bytes.all.peak", "peak_active": "active_bytes.all.peak",
        "peak_reserved": "reserved_bytes.all.peak", "retries": "num_alloc_retries", "ooms": "num_ooms",
    }  # fmt: skip
    return {name: sum(stats.get(key, 0) for stats in each) for name, key in keys.items()}


def in_job(torch, run, function):
    """Runs a program as one process of a job."""
    import torch.distributed as dist

    backend = "nccl" if run.on_gpu else "gloo"
    dist.init_process_group(backend, device_id=run.device if run.on_gpu else None)
    try:
        function(run)
        dist.barrier()
    except BaseException:
        # The other processes would wait for this one forever; their launcher ends them.
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


def main():
    """Runs the program given on the command line."""
    import catalogue

    known = catalogue.programs()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", metavar="NAME", help="a program of --list")
    parser.add_argument("--list", action="store_true", help="print the programs, and run none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, which the CPU has always")
    options = parser.parse_args()
    if options.list:
        for one in known.values():
            needs = f", needs {', '.join(one.needs)}" if one.needs else ""
            print(f"{one.name:22} {one.gpus} GPU, {one.family}{needs}: {one.summary}")
        return 0
    one = known.get(options.program)
    if one is None:
        print(f"error: no program is called '{options.program}'; --list has them all", file=sys.stderr)
        return 2
    record = {"acceptance": one.name, "rank": int(os.environ.get("RANK", "0")), "tolerance": one.tolerance}
    if one.missing:
        print_record(record | {"skipped": f"needs {', '.join(one.missing)}"})
        return 0
    if options.device == "cpu" and not one.cpu:
        print_record(record | {"skipped": "needs a GPU"})
        return 0
    import torch

    if options.device == "cuda" and torch.cuda.device_count() < one.gpus:
        print_record(record | {"skipped": f"needs {one.gpus} GPU{'s' * (one.gpus > 1)}"})
        return 0
    run = prepare(torch, options)
    if run.ranks != one.ranks:
        print(f"error: {one.name} is a job of {one.ranks}, and WORLD_SIZE is {run.ranks}; see launch.py", file=sys.stderr)
        return 2
    function = getattr(importlib.import_module(f"acceptance.{one.family}"), one.name)
    began = time.perf_counter()
    if run.ranks > 1:
        in_job(torch, run, function)
    else:
        function(run)
    if run.on_gpu:
        torch.cuda.synchronize()
        record |= memory(torch)
        record["backend"] = torch.cuda.get_allocator_backend()
    # JSON cannot represent infinities and NaN.
    losses = [value if math.isfinite(value) else str(value) for value in run.losses]
    record |= {"losses": losses, "seconds": round(time.perf_counter() - began, 3), "torch": torch.__version__}
    print_record(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
