"""The workloads of `record_histories.py`: common training programs, in plain PyTorch.

Each is a function of device, steps and seed that returns the objects to keep alive until the snapshot. Tests may reduce the
widths.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F


def descend(optimizer, loss):
    """The end of a training step: new gradients of a loss, and the optimizer's step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def mlp(device, steps, seed, hidden=784, batch=64):
    """The trainer's network: 784-784-784-784-10, SGD; validation after every hundred steps."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for inputs in (784, hidden, hidden):
        layers += [nn.Linear(inputs, hidden), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(hidden, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(batch, 784, generator=generator).to(device)
        y = torch.randint(10, (batch,), generator=generator).to(device)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 100 == 99:
            with torch.no_grad():
                for _ in range(10):
                    model(torch.randn(4 * batch, 784, generator=generator).to(device)).argmax(1)
    return model, optimizer


class Block(nn.Module):
    """A transformer block with normalisation before each layer, as in GPT-2."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """GPT-2's smallest size by default: 124 million weights, the output tied to the embedding."""

    def __init__(self, layers=12, width=768, heads=12, words=50257, longest=1024):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.last(x) @ self.words.weight.T


def gpt2(device, steps, seed, longest=1024, **size):
    """GPT-2 in mixed precision with AdamW, on batches and texts of varying length."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Gpt(longest=longest, **size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    words = model.words.num_embeddings
    for _ in range(steps):
        batch, length = draw.randint(2, 8), draw.randint(longest // 8, longest)
        text = torch.randint(words, (batch, length), generator=generator).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, words).float(), text[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        del logits, loss
    return model, optimizer


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(blocks=(3, 4, 6, 3), width=64, classes=1000):
    """ResNet-50 by default."""
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet50(device, steps, seed, batch=64, side=224, **size):
    """ResNet-50 with momentum; every eighth step has a smaller, last batch and is followed by validation."""
    generator = torch.Generator().manual_seed(seed)
    model = resnet(**size).to(device)
    classes = model[-1].out_features
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(steps):
        last = step % 8 == 7
        rows = batch * 3 // 8 if last else batch
        images = torch.randn(rows, 3, side, side, generator=generator).to(device)
        labels = torch.randint(classes, (rows,), generator=generator).to(device)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if last:
            model.eval()
            with torch.no_grad():
                model(torch.randn(2 * batch, 3, side, side, generator=generator).to(device)).argmax(1)
            model.train()
    return model, optimizer


def streams(device, steps, seed, rows=8192, width=512):
    """Batches of varying size are copied and prepared on a side stream, and used on the main stream; a third stream
    reads the results. Blocks are freed while another stream still uses them, with `record_stream`."""
    draw = random.Random(seed)
    loading, reading = torch.cuda.Stream(), torch.cuda.Stream()
    main = torch.cuda.current_stream()
    host = torch.randint(256, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).pin_memory()
    model = nn.Sequential(
        nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 16)
    )
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def load():
        count = draw.randint(rows // 8, rows)
        with torch.cuda.stream(loading):
            batch = host[:count].to(device, non_blocking=True)
            batch = batch.float().mul_(1 / 255)
            noise = torch.randn_like(batch)
            return batch.add_(noise, alpha=0.05)

    following, means = load(), []
    for _ in range(steps):
        main.wait_stream(loading)
        batch, following = following, load()
        batch.record_stream(main)
        logits = model(batch)
        loss = logits.square().mean()
        descend(optimizer, loss)
        reading.wait_stream(main)
        with torch.cuda.stream(reading):
            means.append(logits.detach().softmax(1).amax(1).mean())
        logits.record_stream(reading)
        del batch, logits, loss
    return model, optimizer, means, following


WORKLOADS = {"mlp": mlp, "gpt2": gpt2, "resnet50": resnet50, "streams": streams}
