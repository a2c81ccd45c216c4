"""More workloads of `record_settings.py`, besides those of `history_workloads.py`: programs of varying sizes, in plain PyTorch.

Each is a function of device and seed that returns the objects to keep alive until the snapshot.
"""

import random

import torch
from history_workloads import Gpt, descend, resnet, streams
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def generate(device, seed, width=1024, heads=16, layers=12, requests=14):
    """Text generation with a cache of keys and values that grows by a token a step; batches and prompts vary."""
    draw = random.Random(seed)
    model = Gpt(layers=layers, width=width, heads=heads).to(device).bfloat16().eval()
    words, longest = model.words.num_embeddings, model.places.num_embeddings
    with torch.no_grad():
        for _ in range(requests):
            batch, prompt, tokens = draw.randint(4, 48), draw.randint(32, 600), draw.randint(8, 60)
            text = torch.randint(words, (batch, prompt), device=device)
            caches = [None] * layers
            x = model.words(text) + model.places(torch.arange(prompt, device=device))
            for token in range(tokens):
                for index, block in enumerate(model.blocks):
                    rows, length, _ = x.shape
                    parts = block.qkv(block.before_attention(x)).split(width, 2)
                    q, k, v = (part.view(rows, length, heads, width // heads).transpose(1, 2) for part in parts)
                    if caches[index] is not None:
                        k, v = torch.cat([caches[index][0], k], 2), torch.cat([caches[index][1], v], 2)
                    caches[index] = (k, v)
                    attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
                    x = x + block.project(attended.transpose(1, 2).reshape(rows, length, width))
                    x = x + block.mlp(block.before_mlp(x))
                logits = model.last(x[:, -1:]) @ model.words.weight.T
                place = torch.full((1,), min(longest - 1, prompt + token), device=device)
                x = model.words(logits.argmax(-1)) + model.places(place)
            del caches
    return model


def moe(device, seed, width=512, experts=16, layers=6, steps=14):
    """A mixture of experts: the number of tokens per expert differs from step to step."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers)).to(device)

    def expert():
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    layer_experts = nn.ModuleList(nn.ModuleList(expert() for _ in range(experts)) for _ in range(layers)).to(device)
    optimizer = torch.optim.AdamW([*gates.parameters(), *layer_experts.parameters()], lr=1e-3)
    for _ in range(steps):
        x = torch.randn(draw.randint(4000, 30000), width, generator=generator).to(device)
        for gate, chosen in zip(gates, layer_experts, strict=True):
            weight, index = gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, network in enumerate(chosen):
                rows = (index == number).nonzero(as_tuple=True)[0]
                if rows.numel():
                    out = out.index_add(0, rows, network(x[rows]) * weight[rows, None])
            x = x + out
        loss = x.square().mean()
        descend(optimizer, loss)
    return gates, layer_experts, optimizer


def scales(device, seed, steps=16):
    """ResNet-50 in mixed precision on images and batches of varying size."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        side, batch = draw.choice(range(128, 321, 32)), draw.randint(16, 48)
        images = torch.randn(batch, 3, side, side, generator=generator).to(device)
        labels = torch.randint(1000, (batch,), generator=generator).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        descend(optimizer, loss)
    return model, optimizer


class Unet(nn.Module):
    """A U-Net of four levels."""

    def __init__(self, widths=(64, 128, 256, 512)):
        super().__init__()
        self.down = nn.ModuleList(self.pair(i, o) for i, o in zip((3, *widths), widths, strict=False))
        rising = widths[::-1]
        self.up = nn.ModuleList(self.pair(i + o, o) for i, o in zip(rising, rising[1:], strict=False))
        self.last = nn.Conv2d(widths[0], 3, 1)

    @staticmethod
    def pair(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x):
        kept = []
        for level, down in enumerate(self.down):
            x = down(x)
            if level + 1 < len(self.down):
                kept.append(x)
                x = F.max_pool2d(x, 2)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.last(x)


def unet(device, seed, steps=24):
    """A U-Net trained to denoise images of varying size, with averaged weights and occasional samples."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Unet().to(device)
    average = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch, side = draw.randint(4, 16), draw.choice([64, 96, 128, 160, 192])
        images = torch.randn(batch, 3, side, side, generator=generator).to(device)
        noise = torch.randn_like(images)
        loss = F.mse_loss(model(images + noise), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.01)
            if step % 8 == 7:
                model(torch.randn(32, 3, 128, 128, device=device))
    return model, optimizer, average


def prefetch(device, seed):
    """The workload `streams` with larger, narrower batches."""
    return streams(device, 120, seed, rows=12000, width=384)


class Adapted(nn.Module):
    """A frozen layer plus a trained product of two narrow matrices."""

    def __init__(self, frozen, rank=16):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


def adapters(device, seed, steps=10, parts=3):
    """Adapters for a frozen language model: blocks are recomputed in the backward pass, three texts' gradients accumulated."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Gpt(layers=16, width=1024, heads=16).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.project = Adapted(block.qkv), Adapted(block.project)
    model = model.to(device)
    words = model.words.num_embeddings
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(parts):
            batch, length = draw.randint(1, 6), draw.randint(100, 1000)
            text = torch.randint(words, (batch, length), generator=generator).to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                x = model.words(text) + model.places(torch.arange(length, device=device))
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                # The loss is computed in pieces of the text, as the words' scores are the largest tensors.
                pieces = zip(model.last(x).split(256, 1), text.split(256, 1), strict=True)
                loss = sum(F.cross_entropy((x @ model.words.weight.T).flatten(0, 1).float(), y.flatten()) for x, y in pieces)
            (loss / parts).backward()
        optimizer.step()
    return model, optimizer


def adversaries(device, seed, steps=20):
    """An image generator against a discriminator; the image size grows during the training."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    widths = (512, 256, 128, 64, 32)
    rising, falling = [nn.Linear(128, 512 * 16), nn.Unflatten(1, (512, 4, 4))], []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        rising += [nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        falling = [nn.Conv2d(outputs, inputs, 4, 2, 1), nn.LeakyReLU(0.2), *falling]
    makes = nn.Sequential(*rising, nn.Conv2d(widths[-1], 3, 3, 1, 1)).to(device)
    judges = nn.Sequential(nn.Conv2d(3, widths[-1], 3, 1, 1), *falling, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(8192, 1))
    judges = judges.to(device)
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (makes, judges)]
    for step in range(steps):
        batch, side = draw.randint(32, 160), 64 * (1 + step * 3 // steps)
        real = torch.randn(batch, 3, side, side, generator=generator).to(device)
        made = F.interpolate(makes(torch.randn(batch, 128, generator=generator).to(device)), size=side, mode="bilinear")
        loss = F.softplus(judges(made.detach())).mean() + F.softplus(-judges(real)).mean()
        optimizers[1].zero_grad(set_to_none=True)
        loss.backward()
        optimizers[1].step()
        loss = F.softplus(-judges(made)).mean()
        optimizers[0].zero_grad(set_to_none=True)
        loss.backward()
        optimizers[0].step()
    return makes, judges, optimizers


def rollouts(device, seed, rounds=6, width=512):
    """Reinforcement learning: games of differing length are stored as they are played, then learnt from in shuffled parts."""
    draw = random.Random(seed)
    body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(64 * 9 * 9, width), nn.ReLU(), nn.Linear(width, 19)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    for _ in range(rounds):
        seen, told = [], []
        games, turns = draw.randint(16, 96), draw.randint(40, 160)
        state = torch.rand(games, 4, 84, 84, device=device)
        with torch.no_grad():
            for turn in range(turns):
                out = model(state)
                seen.append(state)
                told.append(out)
                state = torch.cat([state[:, 1:], torch.rand(games, 1, 84, 84, device=device)], 1)
                if turn % 16 == 15 and games > 8:
                    # Some games have ended.
                    games -= draw.randint(0, games // 4)
                    state = state[:games].clone()
        states, scores = torch.cat(seen), torch.cat(told)
        del seen, told, state
        for _ in range(2):
            for rows in torch.randperm(len(states), device=device).split(draw.randint(500, 2000)):
                loss = F.mse_loss(model(states[rows]), scores[rows] + 0.1)
                descend(optimizer, loss)
        del states, scores
    return model, optimizer


WORKLOADS = {
    "generate": generate,
    "moe": moe,
    "scales": scales,
    "unet": unet,
    "prefetch": prefetch,
    "adapters": adapters,
    "adversaries": adversaries,
    "rollouts": rollouts,
}
