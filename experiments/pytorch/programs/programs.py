#!/usr/bin/env python3
"""PyTorch programs as users write them, for measuring the allocator under them. No program refers to an allocator.

    python3 experiments/pytorch/programs/programs.py gpt2 --steps 20 --warm-up 5 --seed 1

Each prints one line of JSON: losses, time of each step, PyTorch's memory statistics, memory of the device in use. A program is
a function of device and sizes that returns the function of a step. `--small` reduces it for `--device cpu`. Peaks of memory
are those of a fresh process; `--repeats N` measures N times in one, with peaks reset in between. `--history FILE` records every
event; the times then include recording. `usual` is the script of usual.py; `empty` times single calls in turns (`turns` of a
spec), each of which is a line on its input. `fsdp_gpt2` and `fsdp_moe` are programs of several ranks, see sharded.py.

Exit codes: 0 completed, 2 bad input, 3 out of memory (also printed).
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "baselines")]

import measure
import recorded_steps
import torch
from history_workloads import Gpt, descend
from load_serve import SMALL, load_serve
from torch import nn
from torch.nn import functional as F

# Sizes of `--small`, by program.
TINY = {"layers": 2, "width": 32, "heads": 2, "words": 200, "longest": 32}
BF16 = {"dtype": torch.bfloat16}


def language_model(device, seed, *, batch=8, length=1024, compiled=None, fused=False, capturable=False, **size):
    """GPT-2 (124 million weights unless `size` says otherwise), AdamW, and the loss of a batch under bf16 autocast."""
    longest = size.setdefault("longest", 1024)
    model = Gpt(**size).to(device)
    called = torch.compile(model, mode=compiled) if compiled else model
    options = {"capturable": True} if capturable else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused or None, **options)
    words = model.words.num_embeddings
    generator = torch.Generator().manual_seed(seed)

    length = min(length, longest)

    def texts(rows=batch, tokens=length):
        return torch.randint(words, (rows, tokens + 1), generator=generator)

    def loss_of(text):
        with torch.autocast(device.type, **BF16):
            logits = called(text[:, :-1])
            return F.cross_entropy(logits.reshape(-1, words).float(), text[:, 1:].reshape(-1))

    return model, optimizer, texts, loss_of


def gpt2(device, seed, **size):
    """GPT-2, 124 million weights, bf16 autocast, AdamW; batches of one shape."""
    model, optimizer, texts, loss_of = language_model(device, seed, **size)

    def step(number):
        loss = loss_of(texts().to(device, non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def varying(device, seed, shapes=16, **size):
    """GPT-2 with batch and length varying from step to step; after `shapes` steps the same shapes repeat."""
    model, optimizer, texts, loss_of = language_model(device, seed, **size)
    draw = random.Random(seed)
    longest = model.places.num_embeddings
    drawn = [(draw.randint(2, 8), draw.randint(longest // 8, longest)) for _ in range(shapes)]

    def step(number):
        rows, tokens = drawn[number % shapes]
        loss = loss_of(texts(rows, tokens).to(device, non_blocking=True))
        descend(optimizer, loss)
        return loss

    return step


def emptying(device, seed, **size):
    """`varying` with a cache flush after each step."""
    train = varying(device, seed, **size)

    def step(number):
        loss = train(number).detach()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return loss

    return step


def resnet50(device, seed, *, batch=64, side=224, depth=50):
    """torchvision's ResNet-50, SGD with momentum; batches of one shape."""
    from torchvision import models

    model = {50: models.resnet50, 18: models.resnet18}[depth]().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    # Decoding pictures is the loader's work; here two decoded batches are on the host.
    loaded = [
        (torch.randn(batch, 3, side, side, generator=generator), torch.randint(1000, (batch,), generator=generator))
        for _ in range(2)
    ]
    if device.type == "cuda":
        loaded = [(images.pin_memory(), labels.pin_memory()) for images, labels in loaded]

    def step(number):
        images, labels = (part.to(device, non_blocking=True) for part in loaded[number % len(loaded)])
        loss = F.cross_entropy(model(images), labels)
        descend(optimizer, loss)
        return loss

    return step


def moe(device, seed, *, width=512, experts=16, layers=6, least=4000, most=30000):
    """A mixture of experts: the number of tokens per expert differs from step to step."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def expert():
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers)).to(device)
    layers_of = nn.ModuleList(nn.ModuleList(expert() for _ in range(experts)) for _ in range(layers)).to(device)
    optimizer = torch.optim.AdamW([*gates.parameters(), *layers_of.parameters()], lr=1e-3)

    def step(number):
        x = torch.randn(draw.randint(least, most), width, generator=generator).to(device)
        for gate, networks in zip(gates, layers_of, strict=True):
            weight, index = gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for which, network in enumerate(networks):
                rows = (index == which).nonzero(as_tuple=True)[0]
                if rows.numel():
                    out[rows] = network(x[rows]) * weight[rows, None]
            x = x + out
        loss = x.square().mean()
        descend(optimizer, loss)
        return loss

    return step


def generate(device, seed, *, layers=12, width=1024, heads=16, rows=(4, 48), prompts=(32, 600), tokens=(8, 40), **size):
    """Text generation: a step answers one request, and its cache of keys and values grows with each token."""
    draw = random.Random(seed)
    model = Gpt(layers=layers, width=width, heads=heads, **size).to(device).bfloat16().eval()
    generator = torch.Generator().manual_seed(seed)
    longest = model.places.num_embeddings

    @torch.no_grad()
    def step(number):
        batch, prompt, count = draw.randint(*rows), draw.randint(*prompts), draw.randint(*tokens)
        text = torch.randint(model.words.num_embeddings, (batch, prompt), generator=generator).to(device)
        caches, score = [None] * layers, 0.0
        x = model.words(text) + model.places(torch.arange(prompt, device=device))
        for token in range(count):
            for index, block in enumerate(model.blocks):
                parts = block.qkv(block.before_attention(x)).split(width, 2)
                q, k, v = (part.view(batch, -1, heads, width // heads).transpose(1, 2) for part in parts)
                if caches[index] is not None:
                    k, v = torch.cat([caches[index][0], k], 2), torch.cat([caches[index][1], v], 2)
                caches[index] = (k, v)
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
                x = x + block.project(attended.transpose(1, 2).reshape(batch, -1, width))
                x = x + block.mlp(block.before_mlp(x))
            logits = model.last(x[:, -1:]) @ model.words.weight.T
            score = logits.float().square().mean()
            x = model.words(logits.argmax(-1)) + model.places.weight[min(longest - 1, prompt + token)]
        return score

    return step


def gnn(device, seed, *, nodes=800_000, width=128, hidden=256, classes=47, least=2_000, most=60_000, edges=25):
    """A graph network on random subgraphs, whose numbers of nodes and edges differ from step to step.

    Node features are on the device; a step samples nodes and random edges between them, and runs two message layers.
    """
    draw = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    features = torch.randn(nodes, width, generator=generator, device=device)
    sizes = ((width, hidden), (hidden, hidden), (hidden, classes))
    own, others = (nn.ModuleList(nn.Linear(a, b) for a, b in sizes).to(device) for _ in range(2))
    optimizer = torch.optim.Adam([*own.parameters(), *others.parameters()], lr=1e-3)

    def step(number):
        count = draw.randint(least, most)
        links = count * draw.randint(4, edges)
        chosen = torch.randint(nodes, (count,), generator=generator, device=device)
        source, target = torch.randint(count, (2, links), generator=generator, device=device)
        degree = torch.bincount(target, minlength=count).clamp_(min=1).unsqueeze(1)
        x = features[chosen]
        for at, (mine, theirs) in enumerate(zip(own, others, strict=True)):
            gathered = torch.zeros_like(x).index_add_(0, target, x[source]) / degree
            x = mine(x) + theirs(gathered)
            x = F.dropout(x.relu(), 0.1) if at + 1 < len(sizes) else x
        loss = F.cross_entropy(x, chosen % classes)
        descend(optimizer, loss)
        return loss

    return step


def events(device, seed, *, requests=1000):
    """A loop that only allocates, whose steps are bound by the host."""
    kept = []

    def step(number):
        for _ in range(requests):
            kept[:] = [torch.empty(4096, device=device)]

    return step


def compiled(device, seed, *, mode="reduce-overhead", layers=4, **size):
    """A smaller GPT-2 under torch.compile with CUDA graphs; evaluation in between, so that several graphs share a pool."""
    _, optimizer, texts, loss_of = language_model(device, seed, compiled=mode, layers=layers, **size)

    def step(number):
        torch.compiler.cudagraph_mark_step_begin()
        text = texts().to(device)
        if number % 4 == 3:
            with torch.no_grad():
                loss_of(text)
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(text)
        descend(optimizer, loss)
        return loss

    return step


def graphed(device, seed, **size):
    """GPT-2 whose whole step is one CUDA graph that the program captures itself, after three steps on a side stream."""
    _, optimizer, texts, loss_of = language_model(device, seed, capturable=device.type == "cuda", **size)
    text = texts().to(device)

    def eager():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(text)
        loss.backward()
        optimizer.step()
        return loss

    if device.type != "cuda":
        return lambda number: eager()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            eager()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = loss_of(text)
        loss.backward()
        optimizer.step()

    def step(number):
        text.copy_(texts())
        graph.replay()
        return loss

    return step


# By name: the program, the sizes of `--small`, the numbers of warm-up and measured steps.
PROGRAMS = {
    "gpt2": (gpt2, TINY | {"batch": 2, "length": 32}, 5, 20),
    "resnet50": (resnet50, {"batch": 2, "side": 32, "depth": 18}, 5, 30),
    "varying": (varying, TINY | {"shapes": 2}, 0, 32),
    "training": (varying, TINY | {"shapes": 2}, 16, 16),
    "emptying": (emptying, TINY | {"shapes": 2}, 16, 16),
    "load_serve": (load_serve, SMALL, 8, 24),
    "moe": (moe, {"width": 16, "experts": 3, "layers": 2, "least": 20, "most": 60}, 0, 24),
    "generate": (generate, TINY | {"rows": (2, 3), "prompts": (3, 8), "tokens": (2, 4)}, 0, 16),
    "gnn": (gnn, {"nodes": 500, "width": 8, "hidden": 8, "classes": 3, "least": 20, "most": 60, "edges": 5}, 0, 80),
    "compiled": (compiled, TINY | {"batch": 2, "length": 32, "mode": "default"}, 8, 20),
    "events": (events, {"requests": 10}, 0, 20),
    "graphed": (graphed, TINY | {"batch": 2, "length": 32}, 3, 20),
}


def usual_script(options, steps):
    """The script of usual.py."""
    import usual

    return usual.train(options.device, options.small, options.seed, steps)


def single_calls(options, steps):
    """Times of torch.empty at each request of the runner, which has a number of floats."""
    return measure.empty(torch, options.device != "cpu", requests())


def three_passes(options, steps):
    """GPT-2 on the same shapes three times, each step by itself: pass, batch, length, ms, and new segments or mapped ranges.

    In the first pass every shape is new to the libraries and memory grows, in the later passes neither.
    """
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    size = TINY if options.small else {}
    model, optimizer, texts, loss_of = language_model(device, options.seed, fused=on_gpu, **size)
    longest = model.places.num_embeddings

    def step(rows, tokens):
        loss = loss_of(texts(rows, tokens).to(device))
        descend(optimizer, loss)
        if on_gpu:
            torch.cuda.synchronize()

    def driver_allocations():
        return measure.counters(torch)["num_device_alloc"] if on_gpu else 0

    for _ in range(3):
        step(2, longest // 8)
    draw = random.Random(1)
    shapes = [(draw.randint(2, 8), draw.randint(longest // 8, longest)) for _ in range(steps)]
    rows = []
    for number in range(3):
        for shape in shapes:
            before, began = driver_allocations(), time.perf_counter()
            step(*shape)
            took_ms = round(1e3 * (time.perf_counter() - began), 3)
            rows.append([number, *shape, took_ms, driver_allocations() - before])
    ms = statistics.median(row[3] for row in rows if row[0])
    return {"rows": rows, "ms": ms} | (measure.memory(torch, {}) if on_gpu else {})


def requests():
    """The numbers on standard input, a line each: prints a line when ready, and after each turn."""
    print("ready", flush=True)
    for line in sys.stdin:
        yield int(line)
        print("done", flush=True)


def several_ranks(name):
    """A program of sharded.py."""

    def measured(options, steps):
        import sharded

        return sharded.measured(name, options, sharded.STEPS if options.steps is None else steps)

    return measured


# Programs that measure themselves instead of having a step.
SELF_MEASURED = {
    "usual": usual_script,
    "empty": single_calls,
    "passes": three_passes,
}
# Programs of several ranks, which measure themselves, too.
OF_RANKS = {"fsdp_gpt2": several_ranks("gpt2"), "fsdp_moe": several_ranks("moe")}
SELF_MEASURED |= OF_RANKS


def prepare(name, device, seed, small, **more):
    """A program's step on a device."""
    torch.manual_seed(seed)
    program, sizes, _, _ = PROGRAMS[name]
    return program(torch.device(device), seed, **(sizes if small else {}), **more)


def measured(name, options):
    """Runs a program the requested number of times and yields a record each time."""
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    began = time.perf_counter()
    if on_gpu:
        torch.cuda.init()
        if "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if options.limit:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit / total))
        if options.history:
            torch.cuda.memory._record_memory_history(context=None, max_entries=2_000_000)
    _, _, warm_up, steps = PROGRAMS.get(name, (None, None, 0, 20))
    warm_up = warm_up if options.warm_up is None else options.warm_up
    steps = steps if options.steps is None else options.steps
    record = {"program": name, "seed": options.seed, "torch": torch.__version__}
    record["conf"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if on_gpu:
        record |= {"gpu": torch.cuda.get_device_name(), "settings": measure.settings(torch)}
    if options.limit:
        record["limit"] = options.limit
    if options.latency and (ours := sys.modules.get("vramlab.torch")):
        ours.latency()
    if name in SELF_MEASURED:
        found = SELF_MEASURED[name](options, steps)
        # Of several ranks the first reports all.
        if found is not None:
            yield record | {"oom": None} | found
        return
    more = {}
    if options.while_loading:
        record["while_loading"] = more["while_loading"] = options.while_loading
    recording = recorded_steps.begin(torch, options.recorder) if options.recorder else None
    try:
        step = prepare(name, device, options.seed, options.small, **more)
    except torch.OutOfMemoryError as error:
        yield record | {"oom": str(error).splitlines()[0], "steps": 0, "losses": []} | measure.memory(torch, {})
        return
    if options.recorder:
        yield record | {"oom": None} | recorded_steps.measure(torch, step, recording, requests())
        return
    for repeat in range(options.repeats):
        one = record | ({"repeat": repeat} if options.repeats > 1 else {})
        one |= measure.run(torch, step, device, warm_up=warm_up if repeat == 0 else 0, steps=steps)
        if measure.PHASES and repeat == 0:
            measure.end_phase(torch, device, "steps")
            one["phases"] = measure.PHASES
        one["seconds"] = round(time.perf_counter() - began, 3)
        if options.history and on_gpu and repeat == options.repeats - 1:
            measure.save_history(torch, options.history)
        yield one
        if one["oom"]:
            return
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()


def parser():
    """The options of a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=[*PROGRAMS, *SELF_MEASURED])
    parser.add_argument("--steps", type=int, metavar="N", help="steps to measure (default: by program)")
    parser.add_argument("--warm-up", type=int, metavar="N", help="steps before (default: by program)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of weights and data (default: 1)")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="measure N times in this process (default: 1)"
    )
    parser.add_argument("--limit", type=int, metavar="BYTES", help="most memory that PyTorch may reserve")
    parser.add_argument(
        "--while-loading", metavar="SETTING", help="setting of PyTorch's allocator while load_serve loads"
    )
    parser.add_argument("--latency", action="store_true", help="time each call of VramLab's allocator")
    parser.add_argument("--history", metavar="FILE", help="record all events and write them, compressed with xz")
    parser.add_argument(
        "--recorder", choices=recorded_steps.RECORDERS, help="record, and time the steps that its input requests in turns"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--small", action="store_true", help="a small version of the program")
    parser.add_argument("--output", metavar="FILE", help="append the lines to a file (default: print them)")
    return parser


def main(words=None):
    """Runs the program given on the command line."""
    options = parser().parse_args(words)
    if options.while_loading and options.program != "load_serve":
        print("error: --while-loading is for load_serve", file=sys.stderr)
        return 2
    if options.program in OF_RANKS:
        # Before CUDA is in use, which a forked process could not use any more.
        import sharded

        sharded.start_others()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: PyTorch finds no GPU; --device cpu --small tries the program without one", file=sys.stderr)
        return 2
    refused = None
    for record in measured(options.program, options):
        measure.write(record, options.output)
        refused = record["oom"]
    return 3 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
