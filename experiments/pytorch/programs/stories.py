#!/usr/bin/env python3
"""Two case studies as programs: loading and then serving weights, and `empty_cache` in a training loop.

    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:20 python3 experiments/pytorch/programs/stories.py load_serve

`load_serve` loads as vLLM does. Each layer's first matrix (530 MiB) is allocated, converted to a new layout and freed; its
second (270 MiB) is allocated and stays. Under PyTorch's defaults the second is split from the first one's memory, and the
remainder stays reserved (vllm-project/vllm, pull request 41268). Then experts are loaded in slabs of 8 and 4 MiB in turn, each
freed before the next is requested. Under `max_split_size_mb:20` an empty segment of 20 MiB serves none of them (issue 51205).
Finally it answers requests of differing length. `load_serve --while-loading SETTING` changes the setting until serving starts.

`training` is GPT-2 on batches of differing shape; `emptying` is the same with `torch.cuda.empty_cache()` after each step.

Each prints one line of JSON: the time of each step, PyTorch's statistics, and for `load_serve` those after each phase.
`--history FILE` records every event; the times then include recording. `--small` runs with `--device cpu`.

Exit codes: 0 completed, 2 bad input, 3 out of memory (also printed).
"""

import argparse
import lzma
import os
import pickle
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
import programs
import torch
from torch.nn import functional as F

MIB = 2**20
# More than any GPU has, which is PyTorch's default: no size is too large to be split.
NO_LIMIT_MB = (2**64 - 1) // MIB
STORIES = ("load_serve", "training", "emptying")
# Numbers of warm-up and measured steps.
STEPS = {"load_serve": (8, 24), "training": (16, 16), "emptying": (16, 16)}
SIZES = {"width": 4096, "padded": 4176, "inner": 33920, "layers": 12, "experts": 32, "slabs": (8 * MIB, 4 * MIB), "most": 2048}
SMALL = {"width": 32, "padded": 40, "inner": 64, "layers": 2, "experts": 2, "slabs": (4096, 2048), "most": 8}


class Phases:
    """PyTorch's memory at the end of each phase, and its peaks during the phase."""

    def __init__(self, on_gpu):
        self.on_gpu, self.told, self.began = on_gpu, [], time.perf_counter()

    def end(self, name):
        """Records a phase that ended, and starts the next."""
        one = {"name": name}
        if self.on_gpu:
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            for kind in ("reserved", "active"):
                one[kind] = stats[f"{kind}_bytes.all.current"]
                one[f"peak_{kind}"] = stats[f"{kind}_bytes.all.peak"]
            one |= measure.counters(torch)
        now = time.perf_counter()
        one["ms"], self.began = round(1e3 * (now - self.began), 3), now
        self.told.append(one)


def set_split(words):
    """Changes the settings of a running program, as vLLM does for loading."""
    torch.cuda.memory._set_allocator_settings(words)


def load(device, *, width, padded, inner, layers, experts, slabs, phases, **_):
    """The weights of `layers` layers, and the experts' store, filled slab by slab."""
    on_gpu = device.type == "cuda"
    first_host = torch.zeros(2 * inner, width, dtype=torch.bfloat16, pin_memory=on_gpu)
    # Padded as layouts are, so that two of them are larger than a first matrix.
    second_host = torch.zeros(padded, inner, dtype=torch.bfloat16, pin_memory=on_gpu)
    weights = []
    for _ in range(layers):
        arrived = first_host.to(device, non_blocking=True)
        first = arrived.t().contiguous()
        del arrived
        weights.append((first, second_host.to(device, non_blocking=True)))
    phases.end("layers")
    store = torch.zeros(sum(slabs), dtype=torch.uint8, device=device)
    hosts = [torch.ones(size, dtype=torch.uint8, pin_memory=on_gpu) for size in slabs]
    for _ in range(layers * experts):
        at = 0
        for host in hosts:
            # The previous slab is freed first.
            slab = None
            slab = host.to(device, non_blocking=True)
            store[at : at + len(slab)].copy_(slab)
            at += len(slab)
    del slab
    phases.end("experts")
    return weights, store


def load_serve(device, seed, phases, while_loading=None, *, most, **size):
    """Loads the weights; returns a step that answers one request with a random number of tokens."""
    if while_loading:
        set_split(while_loading)
    weights, store = load(device, phases=phases, **size)
    if while_loading:
        set_split(f"max_split_size_mb:{NO_LIMIT_MB}")
    draw = random.Random(seed)

    @torch.no_grad()
    def step(number):
        x = torch.ones(draw.randint(most // 32 or 1, most), size["width"], dtype=torch.bfloat16, device=device)
        for first, second in weights:
            gate, up = (x @ first).chunk(2, 1)
            x = x + F.linear(F.silu(gate) * up, second)[:, : size["width"]]
        return x[-1].float().square().mean() + store[0]

    return step


def training(device, seed, small, empty):
    """GPT-2 on batches of differing shape, with or without a cache flush after each step."""
    step = programs.prepare("varying", device, seed, small)
    if not empty:
        return step

    def emptying(number):
        loss = step(number).detach()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return loss

    return emptying


def parser():
    """The options of a story."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("story", choices=STORIES)
    parser.add_argument("--steps", type=int, metavar="N", help="steps to measure (default: by story)")
    parser.add_argument("--warm-up", type=int, metavar="N", help="steps before (default: by story)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of data and sizes (default: 1)")
    parser.add_argument("--limit", type=int, metavar="BYTES", help="most memory that PyTorch may reserve")
    parser.add_argument("--while-loading", metavar="SETTING", help="a setting of PyTorch's allocator until the serving begins")
    parser.add_argument("--history", metavar="FILE", help="record the events, and write them there, .xz")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="a small version of the story")
    parser.add_argument("--output", metavar="FILE", help="append the line to a file (default: print it)")
    return parser


def settings():
    """The settings in effect, as PyTorch prints them."""
    try:
        told = torch.cuda.memory._snapshot()["allocator_settings"]
    except (KeyError, RuntimeError):
        # Another allocator under PyTorch has none of its settings.
        return None
    return {key: value for key, value in told.items() if isinstance(value, (int, float, str, bool))}


def tell(options, device, phases):
    """Runs the story and returns the measurements."""
    warm_up, steps = STEPS[options.story]
    warm_up = warm_up if options.warm_up is None else options.warm_up
    steps = steps if options.steps is None else options.steps
    torch.manual_seed(options.seed)
    record = {}
    try:
        if options.story == "load_serve":
            size = SMALL if options.small else SIZES
            step = load_serve(device, options.seed, phases, options.while_loading, **size)
        else:
            step = training(device, options.seed, options.small, options.story == "emptying")
    except torch.OutOfMemoryError as error:
        record = {"oom": str(error).splitlines()[0], "steps": 0} | measure.memory(torch, {})
    else:
        record = measure.run(torch, step, device, warm_up=warm_up, steps=steps)
    phases.end("steps")
    return record


def main(words=None):
    """Runs the story given on the command line."""
    options = parser().parse_args(words)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("error: PyTorch finds no GPU; --device cpu --small tries the story without one", file=sys.stderr)
        return 2
    began = time.perf_counter()
    record = {"story": options.story, "seed": options.seed, "torch": torch.__version__}
    record["conf"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if options.while_loading:
        record["while_loading"] = options.while_loading
    if on_gpu:
        torch.cuda.init()
        if options.limit:
            record["limit"] = options.limit
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit / total))
        if told := settings():
            record["settings"] = told
        if options.history:
            torch.cuda.memory._record_memory_history(context=None, max_entries=2_000_000)
    phases = Phases(on_gpu)
    record |= tell(options, device, phases)
    record |= {"phases": phases.told, "seconds": round(time.perf_counter() - began, 3)}
    if options.history and on_gpu:
        snapshot = pickle.dumps(torch.cuda.memory._snapshot(), protocol=4)
        Path(options.history).write_bytes(lzma.compress(snapshot, preset=6))
    measure.write(record, options.output)
    return 3 if record["oom"] else 0


if __name__ == "__main__":
    sys.exit(main())
