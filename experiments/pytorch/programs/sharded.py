"""Programs of several ranks under FSDP 2 (`fully_shard`), a GPU each: GPT-2 and a mixture of experts.

Started by torchrun, a process is one rank. Otherwise it becomes rank 0 and forks the others, which have its imports then.
Rank 0 reports every rank. Without a GPU the ranks use Gloo.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time

import measure
import torch
import torch.distributed as dist
from history_workloads import Gpt, descend
from torch import nn
from torch.nn import functional as F

# Ranks of a program that starts them itself.
RANKS = 2
# Exit code for a rank that ran out of memory, as of the other programs.
OUT_OF_MEMORY = 3
TINY = {
    "gpt2": {"layers": 2, "width": 32, "heads": 2, "words": 200, "longest": 32},
    "moe": {"width": 16, "experts": 3, "layers": 2, "least": 20, "most": 60},
}
WARM_UP, STEPS = 4, 16


class Rank:
    """Another rank, forked from this process. Two threads may ask for its end."""

    def __init__(self, process):
        self.process, self.code, self.lock = process, None, threading.Lock()

    def poll(self):
        """Its exit code, negative for a signal; None while it runs."""
        with self.lock:
            if self.code is None:
                ended, status = os.waitpid(self.process, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if ended else None
            return self.code

    def kill(self):
        """Ends it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.process, signal.SIGKILL)

    def wait(self):
        """Waits until it has ended; its exit code."""
        while self.poll() is None:
            time.sleep(0.01)
        return self.code


# The ranks that this process has forked, and the folder by whose file they meet: a free port can be taken before it is used.
OTHERS = []
MEETING = None


def start_others():
    """Makes this process rank 0 and forks the others, once; the others. CUDA must not be in use."""
    global MEETING
    if "RANK" in os.environ:
        return OTHERS
    # Each rank removes it at its end, by which all have met.
    MEETING = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
    os.environ["WORLD_SIZE"] = str(RANKS)
    first = os.getpid()
    sys.stdout.flush()
    for rank in range(1, RANKS):
        process = os.fork()
        if process == 0:
            OTHERS.clear()
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
            # Only rank 0 prints results.
            os.dup2(2, 1)
            end_with(first)
            return OTHERS
        OTHERS.append(Rank(process))
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0"})
    watch(OTHERS)
    return OTHERS


def end_with(first):
    """Ends this process when rank 0 has ended: a collective would wait for it."""

    def look():
        while os.getppid() == first:
            time.sleep(0.05)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def fail(others, rank, code):
    """Ends this process and the other ranks after one has failed."""
    print(f"error: rank {rank} ended with exit code {code}", file=sys.stderr, flush=True)
    for other in others:
        other.kill()
    os._exit(OUT_OF_MEMORY if code == OUT_OF_MEMORY else 1)


def watch(others):
    """Ends this process when another rank fails: a collective would wait for it."""

    def look():
        while True:
            for rank, process in enumerate(others, 1):
                if code := process.poll():
                    fail(others, rank, code)
            time.sleep(0.05)

    threading.Thread(target=look, daemon=True).start()


def shard(model, parts):
    """Shards each part of a model, then the rest; matrix products in bfloat16, sums of gradients in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in parts:
        fully_shard(part, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def gpt2(device, seed, rank, *, shapes=8, **size):
    """GPT-2 with batch and length varying from step to step, the same on all ranks; texts differ."""
    with device:
        model = Gpt(**size)
    shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    words, longest = size.get("words", 50257), size.get("longest", 1024)
    generator, draw = torch.Generator().manual_seed(1000 * seed + rank), random.Random(seed)
    drawn = [(draw.randint(2, 8), draw.randint(longest // 8, longest)) for _ in range(shapes)]

    def step(number):
        rows, tokens = drawn[number % shapes]
        text = torch.randint(words, (rows, tokens + 1), generator=generator).to(device, non_blocking=True)
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, words).float(), text[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


class Experts(nn.Module):
    """A layer of experts, each of which gets the tokens that a gate gives it.

    An expert without tokens still has gradients, so that all ranks sum the same ones.
    """

    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        weight, index = self.gate(x).float().softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for which, expert in enumerate(self.experts):
            rows = (index == which).nonzero(as_tuple=True)[0]
            out = out.index_add(0, rows, (expert(x[rows]) * weight[rows, None]).to(out.dtype))
        return x + out


def moe(device, seed, rank, *, width=512, experts=16, layers=6, least=4000, most=30000):
    """A mixture of experts: the number of tokens of each expert differs from step to step and from rank to rank."""
    with device:
        model = nn.Sequential(*(Experts(width, experts) for _ in range(layers)))
    shard(model, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, draw = torch.Generator().manual_seed(1000 * seed + rank), random.Random(1000 * seed + rank)

    def step(number):
        x = torch.randn(draw.randint(least, most), width, generator=generator).to(device)
        loss = model(x).float().square().mean()
        descend(optimizer, loss)
        return loss

    return step


PROGRAMS = {"gpt2": gpt2, "moe": moe}


def row(rank, record):
    """What one rank reports."""
    out = {"rank": rank, "losses": record["losses"], "ms": record.get("ms"), "wall_ms": record.get("wall_ms")}
    stats = record.get("stats", {})
    for name in ("reserved", "active", "allocated"):
        if (peak := stats.get(f"{name}_bytes.all.peak")) is not None:
            out[f"peak_{name}"] = peak
            out[f"peak_{name}_after_warm_up"] = record["after_warm_up"][f"{name}_bytes.all.peak"]
    return out | {"calls_in_steps": record.get("calls_in_steps")}


def measured(name, options, steps):
    """Trains as one rank. Rank 0 returns the measurements of all, the others None."""
    others = start_others()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = options.device != "cpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    # Every rank begins with the same weights.
    torch.manual_seed(options.seed)
    place = {"init_method": f"file://{MEETING.name}/store", "rank": rank, "world_size": ranks} if MEETING else {}
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, **place)
    warm_up = WARM_UP if options.warm_up is None else options.warm_up
    try:
        step = PROGRAMS[name](device, options.seed, rank, **(TINY[name] if options.small else {}))
        record = measure.run(torch, step, device, warm_up=warm_up, steps=steps)
    except torch.OutOfMemoryError as error:
        record = {"oom": str(error).splitlines()[0]}
    if record["oom"]:
        # The other ranks wait in a collective, so nothing can be gathered.
        print(f"error: rank {rank}: {record['oom']}", file=sys.stderr, flush=True)
        if rank == 0:
            # They do not count as failed.
            killed, others[:] = others[:], []
            for other in killed:
                other.kill()
            return record | {"losses": [], "steps": 0, "ranks": ranks}
        os._exit(OUT_OF_MEMORY)
    rows = [None] * ranks
    dist.all_gather_object(rows, row(rank, record))
    dist.destroy_process_group()
    if rank:
        return None
    for number, other in enumerate(others, 1):
        if code := other.wait():
            fail(others, number, code)
    losses = "".join(loss for each in rows for loss in each["losses"])
    record["losses_sha256"] = hashlib.sha256(losses.encode()).hexdigest()
    return record | {"ranks": ranks, "of_ranks": rows}
