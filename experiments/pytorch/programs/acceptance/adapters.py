"""Large frozen models with a few trained weights."""

import torch
from torch import nn
from torch.nn import functional as F

from acceptance.common import gpt, must, program, text_loss, tokens


@program(needs=("transformers",), gib=14.0, seconds=25.0)
def lora(run):
    """LoRA on transformers' GPT-2 with its gradient checkpointing and dropout, by hooks, texts of varying length."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width, words, longest = run.size(1024, 32), run.size(50257, 200), run.size(2048, 64)
    config = GPT2Config(
        n_layer=run.size(16, 2), n_embd=width, n_head=run.size(16, 2), n_positions=longest, vocab_size=words,
        bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    with run.device:
        model = GPT2LMHeadModel(config).bfloat16()
    model.train()
    model.requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    learnt = []
    for block in model.transformer.h:
        for name in ("c_attn", "c_proj"):
            layer = getattr(block.attn, name)
            down = nn.Parameter((torch.randn(width, 16) * 0.01).to(run.device, torch.bfloat16))
            up = nn.Parameter(torch.zeros(16, layer.nf, device=run.device, dtype=torch.bfloat16))
            learnt += [down, up]
            layer.register_forward_hook(lambda _, inputs, out, down=down, up=up: out + (inputs[0] @ down) @ up)
    optimizer = torch.optim.AdamW(learnt, lr=1e-3)
    shapes = [(2, 1900), (8, 300), (4, 1100), (6, 700), (2, 1500)]
    for step in range(run.size(12, 4)):
        rows, length = run.size(shapes[step % len(shapes)], (2, 17))
        text = tokens(step, words, rows, length).to(run.device)
        loss = model(text, labels=text).loss / 4
        loss.backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        run.loss(loss)


class Adapter(nn.Module):
    """A frozen layer with several pairs of small factors, of which one is active at a time."""

    def __init__(self, layer, count, rank):
        super().__init__()
        self.layer, self.active = layer, 0
        self.down = nn.ParameterList(nn.Parameter(torch.randn(rank, layer.in_features) * 0.02) for _ in range(count))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(layer.out_features, rank)) for _ in range(count))

    def forward(self, x):
        return self.layer(x) + F.linear(F.linear(x, self.down[self.active]), self.up[self.active])

    @torch.no_grad()
    def merge(self, sign=1.0):
        """Adds the factors to the frozen weights, or subtracts them again."""
        self.layer.weight.add_(self.up[self.active] @ self.down[self.active], alpha=sign)


@program(gib=4.0)
def adapters(run):
    """Three handwritten adapters on one frozen model: each is trained in turn, merged into the weights, and removed again."""
    model = gpt(run, layers=8)
    model.requires_grad_(False)
    layers = []
    for block in model.blocks:
        block.qkv = Adapter(block.qkv, 3, 8).to(run.device)
        layers.append(block.qkv)
    for turn in range(6):
        for layer in layers:
            layer.active = turn % 3
        learnt = [weight for layer in layers for weight in (layer.down[layer.active], layer.up[layer.active])]
        optimizer = torch.optim.AdamW(learnt, lr=1e-2)
        for step in range(2):
            text = tokens(10 * turn + step, model.vocabulary, run.size(6, 2), run.size(400 + 100 * turn, 17)).to(run.device)
            with run.autocast():
                loss = text_loss(model, text)
            run.step(optimizer, loss)
        before = layers[0].layer.weight.clone()
        for layer in layers:
            layer.merge()
        with torch.inference_mode(), run.autocast():
            run.loss(text_loss(model, tokens(turn, model.vocabulary, run.size(8, 2), run.size(256, 17)).to(run.device)))
        for layer in layers:
            layer.merge(-1.0)
        must(torch.allclose(before, layers[0].layer.weight, atol=1e-5), "the weights are not what they were")
