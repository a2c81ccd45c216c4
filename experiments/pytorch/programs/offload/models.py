"""The programs of offload.py: each a function of a device and a seed, which returns the function of a step.

`fsdp` and `loader` are PyTorch's own ways. The others are made: the optimizer's state, activations, or weights stay on
the host, and are copied when they are needed, as offloading libraries do it. No program knows its allocator.
"""

import os

import torch
import torch.distributed as dist
from history_workloads import Gpt
from torch import nn
from torch.nn import functional as F

SMALL = {"layers": 2, "width": 48, "heads": 2, "words": 211, "longest": 40, "batch": 3}
BF16 = torch.bfloat16


def pinned_like(tensor):
    """Host memory of a tensor's shape, pinned where there is a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def language_model(device, *, longest=1024, **size):
    """GPT-2, 124 million weights unless `size` says otherwise."""
    with torch.device(device):
        return Gpt(longest=longest, **size)


def text_loss(model, text, words):
    """The loss of predicting each next word."""
    with torch.autocast(text.device.type, dtype=BF16):
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.reshape(-1, words).float(), text[:, 1:].reshape(-1))


def texts_of(seed, words, batch, longest):
    """Batches of one shape on the host."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randint(words, (batch, longest), generator=generator)


def rank():
    """The number of this process in its job."""
    return int(os.environ.get("RANK", "0"))


def join_group(device):
    """The process group of the job, or of this process alone."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def leave_group():
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(numbers, device):
    """The sums of numbers over the ranks of a job."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return numbers
    sums = torch.tensor(list(numbers.values()), dtype=torch.int64, device=device)
    dist.all_reduce(sums)
    return dict(zip(numbers, sums.tolist(), strict=True))


def fsdp(device, seed, *, batch=4, words=50257, longest=1024, **size):
    """GPT-2 under FSDP 2 with CPUOffloadPolicy: shards, gradients and AdamW's state are on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    join_group(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = language_model(device, words=words, longest=longest, **size)
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)}
    if device.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    updates = torch.optim.AdamW(model.parameters(), lr=3e-4)
    texts = texts_of(seed + rank(), words, batch, longest)

    def step(_):
        text = texts().to(device)
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, words).float(), text[:, 1:].reshape(-1))
        updates.zero_grad(set_to_none=True)
        loss.backward()
        updates.step()
        return loss

    return step


class Texts(torch.utils.data.Dataset):
    """Texts of random words and of varying length."""

    def __init__(self, seed, words, longest, count=4096):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(longest // 2, longest, (count,), generator=generator).tolist()
        self.words = torch.randint(words, (longest,), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.words.roll(index)[: self.lengths[index]]


FEATURES = 128


def padded(texts):
    """A batch, as long as its longest text, and numbers that describe each of its words."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return tokens, (tokens.unsqueeze(-1) * 31 + torch.arange(FEATURES)).remainder(997).float()


def loader(device, seed, *, batch=16, words=50257, longest=1024, layers=4, width=768, heads=12):
    """A small model on batches of varying length from a DataLoader with pin_memory: 2 workers and the pin thread."""
    dataset = Texts(seed, words, longest)
    options = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    batches = torch.utils.data.DataLoader(
        dataset, batch_size=batch, collate_fn=padded, pin_memory=device.type == "cuda", **options
    )
    with torch.device(device):
        inner = [[nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)] for _ in range(layers)]
        model = nn.Sequential(nn.Linear(FEATURES, width), *sum(inner, []), nn.Linear(width, 1))
    updates = torch.optim.SGD(model.parameters(), lr=1e-3)
    waiting = iter(batches)

    def step(_):
        _, values = (part.to(device, non_blocking=True) for part in next(waiting))
        loss = model(values / 997).square().mean()
        updates.zero_grad(set_to_none=True)
        loss.backward()
        updates.step()
        return loss

    return step


def optimizer(device, seed, *, batch=4, words=50257, longest=1024, **size):
    """AdamW whose state is on the host: each parameter's moments are copied to the GPU, updated, and copied back."""
    model = language_model(device, words=words, longest=longest, **size)
    texts = texts_of(seed, words, batch, longest)
    parameters = list(model.parameters())
    state = [[pinned_like(parameter).zero_() for _ in range(2)] for parameter in parameters]
    rate, (beta1, beta2), tiny = 3e-4, (0.9, 0.999), 1e-8

    @torch.no_grad()
    def update(number):
        for parameter, moments in zip(parameters, state, strict=True):
            first, second = (moment.to(device, non_blocking=True) for moment in moments)
            first.lerp_(parameter.grad, 1 - beta1)
            second.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
            scale = (second / (1 - beta2**number)).sqrt_().add_(tiny)
            parameter.addcdiv_(first, scale, value=-rate / (1 - beta1**number))
            for moment, updated in zip(moments, (first, second), strict=True):
                moment.copy_(updated, non_blocking=True)

    def step(number):
        loss = text_loss(model, texts().to(device), words)
        loss.backward()
        update(number + 1)
        model.zero_grad(set_to_none=True)
        return loss

    return step


def activations(device, seed, *, batch=4, words=50257, longest=1024, **size):
    """Activations that backward needs are on the host: saved_tensors_hooks copy large ones there and back."""
    model = language_model(device, words=words, longest=longest, **size)
    updates = torch.optim.SGD(model.parameters(), lr=1e-3)
    texts = texts_of(seed, words, batch, longest)
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    least = 1 << 20 if device.type == "cuda" else 0

    def to_host(tensor):
        if tensor.untyped_storage().data_ptr() in kept or tensor.nbytes < least or not tensor.is_contiguous():
            return tensor
        host = pinned_like(tensor)
        return host.copy_(tensor, non_blocking=True)

    def to_device(tensor):
        return tensor.to(device, non_blocking=True)

    def step(_):
        with torch.autograd.graph.saved_tensors_hooks(to_host, to_device):
            loss = text_loss(model, texts().to(device), words)
        loss.backward()
        updates.step()
        updates.zero_grad(set_to_none=True)
        return loss

    return step


def weights(device, seed, *, batch=4, words=50257, longest=1024, layers=24, width=1600, heads=25):
    """Inference whose weights are on the host: a stream of its own copies the next layer's while one computes."""
    texts = texts_of(seed, words, batch, longest)
    on_gpu = device.type == "cuda"
    copies = torch.cuda.Stream(device) if on_gpu else None
    model = language_model(device, words=words, longest=longest, layers=1, width=width, heads=heads)
    block = model.blocks[0].eval().to(BF16)
    shapes = {name: parameter.shape for name, parameter in block.named_parameters()}
    generator = torch.Generator(device).manual_seed(seed)

    def layer():
        values = {name: torch.randn(shape, generator=generator, device=device) for name, shape in shapes.items()}
        host = {name: pinned_like(value.to(BF16)) for name, value in values.items()}
        for name, value in values.items():
            host[name].copy_(value.mul_(0.02))
        return host

    hosts = [layer() for _ in range(layers)]

    def fetch(number):
        """A layer's weights on the GPU, and the event after which they are there."""
        if not on_gpu:
            return hosts[number], None
        with torch.cuda.stream(copies):
            arrived = {name: value.to(device, non_blocking=True) for name, value in hosts[number].items()}
            return arrived, copies.record_event()

    @torch.no_grad()
    def step(_):
        text = texts().to(device)
        x = model.words(text).to(BF16)
        following = fetch(0)
        for number in range(layers):
            values, event = following
            following = fetch(number + 1) if number + 1 < layers else None
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
                for value in values.values():
                    value.record_stream(torch.cuda.current_stream())
            x = torch.func.functional_call(block, values, (x,))
        return x.float().square().mean()

    return step
