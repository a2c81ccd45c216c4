"""A program that loads weights as vLLM does and then serves them, for programs.py.

Each layer's first matrix (530 MiB) is allocated, converted to a new layout and freed; its second (270 MiB) is allocated
and stays. Under PyTorch's defaults the second is split from the first one's memory, and the remainder stays reserved
(https://github.com/vllm-project/vllm/pull/41268). Then experts are loaded in slabs of 8 and 4 MiB in turn, each freed
before the next is requested. Under `max_split_size_mb:20` an empty segment of 20 MiB serves none of them
(https://github.com/vllm-project/vllm/issues/51205). Finally it answers requests of differing length. `--while-loading
SETTING` changes the setting until serving starts.
"""

import random

import measure
import torch
from torch.nn import functional as F

MIB = 2**20
# More than any GPU has, which is PyTorch's default: no size is too large to be split.
NO_LIMIT_MB = (2**64 - 1) // MIB
SMALL = {"width": 32, "padded": 40, "inner": 64, "layers": 2, "experts": 2, "slabs": (4096, 2048), "most": 8}


def set_split(words):
    """Changes the settings of a running program, as vLLM does for loading."""
    torch.cuda.memory._set_allocator_settings(words)


def load(device, *, width, padded, inner, layers, experts, slabs):
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
    measure.end_phase(torch, device, "layers")
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
    measure.end_phase(torch, device, "experts")
    return weights, store


def load_serve(
    device,
    seed,
    *,
    width=4096,
    padded=4176,
    inner=33920,
    layers=12,
    experts=32,
    slabs=(8 * MIB, 4 * MIB),
    most=2048,
    while_loading=None,
):
    """Loads the weights; returns a step that answers one request with a random number of tokens."""
    if while_loading:
        set_split(while_loading)
    weights, store = load(device, width=width, padded=padded, inner=inner, layers=layers, experts=experts, slabs=slabs)
    if while_loading:
        set_split(f"max_split_size_mb:{NO_LIMIT_MB}")
    draw = random.Random(seed)

    @torch.no_grad()
    def step(number):
        x = torch.ones(draw.randint(most // 32 or 1, most), width, dtype=torch.bfloat16, device=device)
        for first, second in weights:
            gate, up = (x @ first).chunk(2, 1)
            x = x + F.linear(F.silu(gate) * up, second)[:, :width]
        return x[-1].float().square().mean() + store[0]

    return step
