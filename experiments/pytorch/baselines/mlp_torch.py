"""The trainer's network in PyTorch: linear layers with ReLU between, mean cross-entropy, plain gradient descent.

Loaders copy batches to the device in the trainer's three ways, or with a `DataLoader`. Steps run one operation at a time,
as one CUDA graph, or compiled; all keep each step's loss on the device until the epoch ends.
"""

import contextlib
import math

import torch
from torch.nn import functional as F

# Number of page-locked buffers, used in rotation, as in the trainer.
RING = 4
# Types of activations; tf32 is a way to multiply f32.
DTYPES = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def tensor(found):
    """A start file's tensor."""
    kind = {"F32": torch.float32, "U32": torch.int32, "U8": torch.uint8}[found.dtype]
    return torch.frombuffer(bytearray(found.data), dtype=kind).reshape(found.shape)


class Arithmetic:
    """The precision of the network: the trainer's --dtype, --weights and --loss-scale in PyTorch."""

    def __init__(self, options, device):
        self.dtype, self.device = DTYPES[options.dtype], device
        self.half = options.weights == "half"
        self.scale = options.loss_scale
        # The gradient at the start of the backward pass; None for a scale of 1, as is usual.
        self.seed = None if self.scale == 1 else torch.tensor(self.scale, device=device)

    def place(self, model):
        """Converts the weights from f32 to the type in which they are updated."""
        if self.half:
            model.to(self.dtype)

    def logits(self, model, x):
        """Logits in f32; `model` maps rows to its outputs."""
        mixed = self.dtype != torch.float32 and not self.half
        # Each weight is used once per pass, so autocast has nothing to cache, and a graph must not depend on its cache.
        scope = torch.autocast(self.device.type, self.dtype, cache_enabled=False) if mixed else contextlib.nullcontext()
        with scope:
            out = model(x)
        return out.float()


class Split:
    """One split of a data set on the host: rows of bytes or floats, and labels. The network takes values of `dtype`."""

    def __init__(self, features, labels, scale, shift, dtype):
        self.features, self.labels = features, labels.long()
        self.scale, self.shift, self.dtype = scale, shift, dtype

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.values(self.features[row]), self.labels[row]

    def values(self, picked):
        """The network's input: bytes times scale, rounded once."""
        if picked.dtype != torch.uint8:
            return picked.to(self.dtype)
        if self.shift:
            return picked.float().mul_(self.scale).add_(self.shift).to(self.dtype)
        # Every type represents a byte exactly.
        return picked.to(self.dtype).mul_(self.scale)


class Resident:
    """The data set is on the device; a batch is gathered by row numbers."""

    def __init__(self, split, device, rows):
        self.split = split
        held = split.values(split.features) if rows == "values" else split.features
        self.features, self.labels = held.to(device), split.labels.to(device)
        # At a fixed address, which graphs read.
        self.order = torch.zeros(len(split), dtype=torch.int64, device=device)

    def begin_pass(self, order):
        self.order.copy_(order)

    def pick(self, rows):
        return self.split.values(self.features.index_select(0, rows)), self.labels.index_select(0, rows)

    def batch(self, first, count):
        return self.pick(self.order[first : first + count])

    def static(self, count, at, batch):
        """The batch of the step that `at` counts on the device; the host copies nothing."""
        rows = torch.arange(count, device=self.order.device)
        return None, lambda: self.pick(self.order.index_select(0, torch.add(rows, at, alpha=batch)))


class Streamed:
    """Batches come from the host; a graph's input is copied to the same address each time."""

    def __init__(self, split, device):
        self.split, self.device, self.order = split, device, None

    def begin_pass(self, order):
        self.order = order

    def assemble(self, first, count):
        rows = self.order[first : first + count]
        return self.split.values(self.split.features.index_select(0, rows)), self.split.labels.index_select(0, rows)

    def static(self, count, _at, _batch):
        """Fills the buffer that a graph reads, and returns it."""
        width = self.split.features.shape[1]
        inputs = torch.zeros(count, width, dtype=self.split.dtype, device=self.device)
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)

        def fill(first):
            x, y = self.batch(first, count)
            inputs.copy_(x, non_blocking=True)
            labels.copy_(y, non_blocking=True)

        return fill, lambda: (inputs, labels)


class Copy(Streamed):
    """Assembled on the host and copied from pageable memory."""

    def batch(self, first, count):
        x, y = self.assemble(first, count)
        return x.to(self.device), y.to(self.device)


class Pinned(Streamed):
    """Assembled in page-locked buffers and copied asynchronously."""

    def __init__(self, split, device, batch):
        super().__init__(split, device)
        width = split.features.shape[1]
        self.ring = [
            (
                torch.empty(batch, width, dtype=split.dtype).pin_memory(),
                torch.empty(batch, dtype=torch.int64).pin_memory(),
                torch.cuda.Event(),
            )
            for _ in range(RING)
        ]
        self.next = 0

    def batch(self, first, count):
        inputs, labels, copied = self.ring[self.next]
        self.next = (self.next + 1) % RING
        copied.synchronize()
        x, y = self.assemble(first, count)
        inputs[:count].copy_(x)
        labels[:count].copy_(y)
        out = inputs[:count].to(self.device, non_blocking=True), labels[:count].to(self.device, non_blocking=True)
        copied.record()
        return out


class Workers(Streamed):
    """PyTorch's own `DataLoader` over single rows, as in its tutorials."""

    def __init__(self, split, device, batch, workers, pin):
        super().__init__(split, device)
        self.pin, self.rows, self.batches = pin, Order(), None
        self.loader = torch.utils.data.DataLoader(
            split, batch_size=batch, sampler=self.rows, num_workers=workers, pin_memory=pin, persistent_workers=workers > 0
        )

    def begin_pass(self, order):
        self.rows.order = order.tolist()
        self.batches = iter(self.loader)

    def batch(self, first, count):
        x, y = next(self.batches)
        return x.to(self.device, non_blocking=self.pin), y.to(self.device, non_blocking=self.pin)


class Order(torch.utils.data.Sampler):
    """The rows of a pass, in its order."""

    def __init__(self):
        self.order = []

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def loader(options, split, device):
    """The loader selected by the options."""
    batch = min(options.batch, len(split))
    if options.loader == "resident":
        return Resident(split, device, options.rows)
    if options.loader == "copy":
        return Copy(split, device)
    if options.loader == "pinned":
        return Pinned(split, device, batch)
    return Workers(split, device, batch, options.workers, options.pin)


def network(widths, device):
    """The network, with uninitialised weights."""
    layers = []
    for number, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
        layers += [torch.nn.ReLU()] if number else []
        layers.append(torch.nn.utils.skip_init(torch.nn.Linear, inputs, outputs, device=device))
    return torch.nn.Sequential(*layers)


def linears(model):
    return [layer for layer in model if isinstance(layer, torch.nn.Linear)]


@torch.no_grad()
def from_start(model, start):
    """Sets the network's weights from a start file."""
    for number, layer in enumerate(linears(model)):
        layer.weight.copy_(tensor(start.tensors[f"layers.{number}.weight"]))
        layer.bias.copy_(tensor(start.tensors[f"layers.{number}.bias"]))


@torch.no_grad()
def from_seed(model, init, seed, device):
    """Draws weights from the trainer's distributions, with different random numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for layer in linears(model):
        outputs, inputs = layer.weight.shape
        bound = math.sqrt(6 / (inputs + outputs))
        if init == "xavier":
            layer.weight.uniform_(-bound, bound, generator=generator)
        else:
            deviation = 0.05 if init == "normal" else math.sqrt(2 / inputs)
            layer.weight.normal_(0, deviation, generator=generator)
        layer.bias.zero_()


class Eager:
    """A plain PyTorch step."""

    def __init__(self, options, model, arithmetic, source, steps):
        self.model, self.arithmetic, self.source = model, arithmetic, source
        # Plain descent is linear in the gradients, so dividing the rate by the loss scale removes the scale.
        fused = True if options.fused_sgd else None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=options.lr / arithmetic.scale, fused=fused)
        self.losses = torch.zeros(steps, device=arithmetic.device)

    def loss(self, x, y):
        return F.cross_entropy(self.arithmetic.logits(self.model, x), y)

    def step(self, x, y, slot):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(x, y)
        loss.backward(self.arithmetic.seed)
        self.optimizer.step()
        self.losses[slot].copy_(loss.detach())

    def run(self, slot, first, count):
        """Queues one step on the rows from `first` in this pass's order; its loss is written to the slot."""
        self.step(*self.source.batch(first, count), slot)

    def prepare(self, counts, times):
        """Runs steps of each size without lasting effect: loads libraries, selects kernels, compiles code."""
        with self.kept():
            for count in counts:
                x = torch.zeros(count, self.model[0].in_features, dtype=self.arithmetic.dtype, device=self.losses.device)
                y = torch.zeros(count, dtype=torch.int64, device=self.losses.device)
                for _ in range(times):
                    self.step(x, y, 0)

    def kept(self):
        return Kept(self)


class Kept:
    """Restores the network's weights at the end."""

    def __init__(self, steps):
        self.steps = steps

    def __enter__(self):
        self.weights = [weight.detach().clone() for weight in self.steps.model.parameters()]

    def __exit__(self, *_):
        self.steps.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, before in zip(self.steps.model.parameters(), self.weights):
                weight.copy_(before)
        if self.steps.losses.is_cuda:
            torch.cuda.synchronize()


class Compiled(Eager):
    """Forward and backward pass through `torch.compile`; the update is PyTorch's optimizer."""

    def __init__(self, options, *given):
        super().__init__(options, *given)
        # The last batch has another size; a second version for it is faster than one for all sizes.
        self.loss = torch.compile(super().loss, mode=options.compile_mode, dynamic=False)

    def step(self, x, y, slot):
        torch.compiler.cudagraph_mark_step_begin()
        super().step(x, y, slot)


class Graph(Eager):
    """The whole step, from gathering the batch to the update, as one CUDA graph; one per batch size."""

    def __init__(self, options, *given):
        super().__init__(options, *given)
        self.batch = options.batch
        # Number of steps in this pass, on the device: the slot of the loss, and the next rows.
        self.at = torch.zeros(1, dtype=torch.int64, device=self.losses.device)
        self.graphs = {}

    def captured(self, load):
        x, y = load()
        loss = self.loss(x, y)
        loss.backward(self.arithmetic.seed)
        self.optimizer.step()
        self.losses.index_copy_(0, self.at, loss.detach().reshape(1))
        self.at.add_(1)

    def prepare(self, counts, times):
        side = torch.cuda.Stream()
        with self.kept():
            for count in counts:
                fill, load = self.source.static(count, self.at, self.batch)
                side.wait_stream(torch.cuda.current_stream())
                # As in PyTorch's notes on CUDA graphs: some steps on a side stream before the capture.
                with torch.cuda.stream(side):
                    for _ in range(max(times, 3)):
                        self.optimizer.zero_grad(set_to_none=True)
                        self.at.zero_()
                        self.captured(load)
                torch.cuda.current_stream().wait_stream(side)
                # Without gradients, so that the capture allocates them in its own memory.
                self.optimizer.zero_grad(set_to_none=True)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.captured(load)
                # The graph's inputs, which it does not own, must live as long as the graph.
                self.graphs[count] = (fill, load, graph)

    def run(self, slot, first, count):
        if slot == 0:
            self.at.zero_()
        fill, _, graph = self.graphs[count]
        if fill:
            fill(first)
        graph.replay()


class CompiledGraph(Graph):
    """The whole step compiled as one function by `torch.compile` and then captured as one CUDA graph.

    The gradients are those of a function of the weights, and the update is written out, because the compiler would split the
    function at the optimizer and at `backward`. So matrix products can include the update in their epilogues.
    """

    def __init__(self, options, *given):
        super().__init__(options, *given)
        self.rate = options.lr / self.arithmetic.scale
        # Detached, in the same memory.
        self.weights = [(layer.weight.detach(), layer.bias.detach()) for layer in linears(self.model)]
        self.compiled = torch.compile(self.whole, mode=options.compile_mode, dynamic=False, fullgraph=True)

    def outputs(self, weights, x):
        for number, (weight, bias) in enumerate(weights):
            x = F.linear(F.relu(x) if number else x, weight, bias)
        return x

    def whole(self, load, weights, losses, at):
        """The current step as one function that changes the weights, the slot of its loss and the step number."""
        x, y = load()

        def scaled(weights):
            loss = F.cross_entropy(self.arithmetic.logits(lambda x: self.outputs(weights, x), x), y)
            return loss * self.arithmetic.scale, loss

        gradients, (_, loss) = torch.func.grad_and_value(scaled, has_aux=True)(weights)
        for pair, changes in zip(weights, gradients):
            for weight, gradient in zip(pair, changes):
                weight.sub_(gradient, alpha=self.rate)
        losses.index_copy_(0, at, loss.reshape(1))
        at.add_(1)

    def captured(self, load):
        self.compiled(load, self.weights, self.losses, self.at)


def steps(options, model, arithmetic, source, count):
    """Steps in the selected mode, with `count` slots for losses."""
    kind = {"eager": Eager, "graph": Graph, "compile": Compiled, "compiled-graph": CompiledGraph}[options.mode]
    return kind(options, model, arithmetic, source, count)


@torch.no_grad()
def evaluate(steps, source, batch, rows, synchronise):
    """Mean loss and accuracy over the rows, in batches."""
    source.begin_pass(torch.arange(rows))
    losses, hits = [], []
    for first in range(0, rows, batch):
        count = min(batch, rows - first)
        x, y = source.batch(first, count)
        logits = steps.arithmetic.logits(steps.model, x)
        losses.append(F.cross_entropy(logits, y) * count)
        hits.append((logits.argmax(1) == y).sum())
        if synchronise:
            torch.cuda.synchronize()
    return torch.stack(losses).double().sum().item() / rows, torch.stack(hits).sum().item() / rows
