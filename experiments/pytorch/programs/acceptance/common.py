"""Shared code of the programs: the decorator, the context, and common models."""

import math
import os
import random
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F


def program(**options):
    """Marks a function as a program; `catalogue.py` documents and reads the arguments."""

    def mark(function):
        function.options = options
        return function

    return mark


@dataclass
class Run:
    """The context of a program, and its losses."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    small: bool = False
    losses: list = field(default_factory=list)

    def size(self, large, small):
        """A size: the first on a GPU, the second if the program is only tried."""
        return small if self.small else large

    def loss(self, value):
        """Records one result of the program. Waits for the device, as `item` does."""
        self.losses.append(float(value.detach()) if isinstance(value, torch.Tensor) else float(value))

    def step(self, optimizer, loss):
        """Steps the optimizer down the gradient of a loss, frees the gradients and records the loss."""
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.loss(loss)

    @property
    def on_gpu(self):
        """True if it runs on a GPU."""
        return self.device.type == "cuda"

    def autocast(self):
        """Mixed precision as used for training language models."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def normals(seed, *shape, device="cpu"):
    """Normal random numbers, reproducible on each kind of device."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def tokens(seed, words, *shape):
    """Random words on the host, the same each time."""
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.project(attended.transpose(1, 2).reshape(rows, length, width)), self.dropout, self.training)
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """A small language model; `around`, if given, calls each block."""

    def __init__(self, layers=6, width=512, heads=8, words=16000, longest=1024, dropout=0.0, around=None):
        super().__init__()
        self.around = around
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, text):
        x = self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return self.head(self.last(x))

    @property
    def vocabulary(self):
        """The number of words."""
        return self.words.num_embeddings


def gpt(run, **size):
    """A language model on the run's device, smaller if it is only tried."""
    tiny = {"layers": 2, "width": 32, "heads": 2, "words": 200, "longest": 64}
    # Weights are generated on the device: on the host that takes seconds.
    with run.device:
        return Gpt(**({**size, **tiny} if run.small else size))


def text_loss(model, text):
    """The loss of predicting each next word."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


def train(run, model, optimizer=None, *, steps=6, shapes=((8, 512), (4, 768), (6, 256)), words=None, own=True):
    """Trains a language model on texts of varying shape under mixed precision, and records each loss.

    `own` gives each rank its own texts.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-4)
    words = words or model.vocabulary
    for step in range(steps):
        rows, length = (2, 17) if run.small else shapes[step % len(shapes)]
        text = tokens(step * run.ranks + (run.rank if own else 0), words, rows, length).to(run.device)
        with run.autocast():
            loss = text_loss(model, text)
        run.step(optimizer, loss)
    return optimizer


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(width=64, classes=100):
    """A small convolutional network."""
    stages = [Residual(width * 2 ** max(0, at - 1), width * 2**at, 2 if at else 1) for at in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes)
    )


def seed_all(seed=0):
    """Seeds all random number generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in __import__("sys").modules:
        __import__("numpy").random.seed(seed)


def rank_of_job():
    """The rank of this process in its job, and the job's size."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def must(condition, *said):
    """Ends the program if the condition is false."""
    if not condition:
        raise AssertionError(" ".join(map(str, said)))


def close(value, wanted, tolerance=1e-4):
    """True if two numbers are nearly equal."""
    return math.isclose(float(value), float(wanted), rel_tol=tolerance, abs_tol=tolerance)
