#!/usr/bin/env python3
"""Trains the trainer's network under DistributedDataParallel and prints one JSON object.

    trainer start -o start.safetensors --dataset digits --hidden 1024 --batch 512 --epochs 12
    torchrun --nproc-per-node 2 ddp_mlp.py --start-file start.safetensors --mode eager

Weights, data, order and whole batches are those of the start file; each rank takes its part of each batch, as the trainer's
ranks do. Written for PyTorch 2.11; on a CPU it uses Gloo. `ms` is the median step of the epochs after the second.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time

import start_file
import torch
import torch.distributed as dist
from mlp_torch import tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Iterations that PyTorch's documentation asks for before the capture of a DDP step.
WARM_UP = 11


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--start-file", metavar="FILE", required=True, help="start file with weights and data")
    add("--mode", choices=("eager", "graph"), default="eager", help="how a step runs (default: eager)")
    add("--epochs", type=int, metavar="N", help="passes over the training set (default: the file's)")
    add("--lr", type=float, default=0.1, metavar="RATE", help="learning rate (default: 0.1)")
    add("--bucket", type=float, default=25, metavar="MIB", help="DDP's bucket_cap_mb (default: 25)")
    add("--fused-sgd", action="store_true", help="SGD(fused=True): one kernel a step")
    return parser.parse_args()


class Data:
    """The training rows on the device, and the order of each epoch."""

    def __init__(self, start, device):
        scale = float(start.metadata.get("scale", 1))
        rows = tensor(start.tensors["train.features"]).to(device)
        self.rows = rows.float() * scale + float(start.metadata.get("shift", 0))
        self.labels = tensor(start.tensors["train.labels"]).to(device).long()
        self.orders = [tensor(start.tensors[f"order.{epoch + 1}"]).to(device).long() for epoch in range(start.orders)]


def network(start, device):
    layers = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(start.widths)):
        layer = nn.Linear(inputs, outputs)
        with torch.no_grad():
            layer.weight.copy_(tensor(start.tensors[f"layers.{number}.weight"]))
            layer.bias.copy_(tensor(start.tensors[f"layers.{number}.bias"]))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


class Captured:
    """A step as a graph, for parts of one number of rows."""

    def __init__(self, step, rows, width, device):
        self.x = torch.zeros(rows, width, device=device)
        self.y = torch.zeros(rows, dtype=torch.long, device=device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(self.x, self.y)

    def __call__(self, x, y):
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.loss


def part(batch, rank, size):
    rows = len(batch)
    return batch[rows * rank // size : rows * (rank + 1) // size]


def train(options, start, data, device):
    """Step times by epoch, and the losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    cuda = device.type == "cuda"
    batch, epochs = start.number("batch"), options.epochs or start.number("epochs")
    graph = options.mode == "graph"
    # A graph's warm-up steps change the weights; they are restored.
    side = torch.cuda.Stream() if graph else None
    with torch.cuda.stream(side):
        plain = network(start, device)
        model = DistributedDataParallel(
            plain, device_ids=[device.index] if cuda else None, bucket_cap_mb=options.bucket
        )
    fused = {"fused": True} if options.fused_sgd else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, **fused)

    def step(x, y):
        optimizer.zero_grad(set_to_none=not graph)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    steps = {}
    if graph:
        held = {name: value.clone() for name, value in plain.state_dict().items()}
        tail = len(data.rows) % batch
        with torch.cuda.stream(side):
            for rows in {batch, tail} - {0}:
                rows = len(part(range(rows), rank, size))
                x, y = data.rows[:rows], data.labels[:rows]
                for _ in range(WARM_UP):
                    step(x, y)
        torch.cuda.current_stream().wait_stream(side)
        for rows in {batch, tail} - {0}:
            rows = len(part(range(rows), rank, size))
            steps[rows] = Captured(step, rows, start.widths[0], device)
        plain.load_state_dict(held)
    times, losses = [], []
    for epoch in range(epochs):
        order = data.orders[epoch % len(data.orders)]
        kept = torch.empty(-(-len(order) // batch), device=device)
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for number, whole in enumerate(order.split(batch)):
            own = part(whole, rank, size)
            x, y = data.rows[own], data.labels[own]
            kept[number] = steps.get(len(own), step)(x, y)
        # The trainer's step times too end when the losses have been read.
        losses += kept.tolist()
        times.append((time.perf_counter() - began) / len(kept))
    # The mean over the ranks is that of the whole batch, where its parts have as many rows.
    total = torch.tensor(losses, device=device)
    dist.all_reduce(total)
    return times, (total / size).tolist()


def main():
    options = arguments()
    if options.mode == "graph":
        # Its watchdog would query events of a capture.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    out = {
        "program": "ddp",
        "framework_version": torch.__version__,
        "ranks": dist.get_world_size(),
        "mode": options.mode,
    }
    if cuda:
        out |= {"gpu": torch.cuda.get_device_name(device), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    start = start_file.read(options.start_file)
    times, losses = train(options, start, Data(start, device), device)
    out |= {"hidden": start.number("hidden"), "bucket_mib": options.bucket, "fused_sgd": options.fused_sgd}
    out |= {"ms": 1e3 * statistics.median(times[2:] or times), "epoch_step_s": times, "losses": losses[:32]}
    if cuda:
        out |= {"peak_reserved_bytes": torch.cuda.max_memory_reserved()}
    if dist.get_rank() == 0:
        print(json.dumps(out), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except start_file.BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
