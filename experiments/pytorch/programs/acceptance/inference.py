"""Inference: generation with caches, drafts, quantised weights, several models in one process."""

import torch
from torch import nn
from torch.nn import functional as F

from acceptance.common import Gpt, close, normals, gpt, must, program, tokens


def llama(run, layers=6):
    """transformers' Llama in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=run.size(32000, 200), hidden_size=run.size(1024, 32), intermediate_size=run.size(2816, 64),
        num_hidden_layers=run.size(layers, 2), num_attention_heads=run.size(16, 2),
    )  # fmt: skip
    with run.device:
        return LlamaForCausalLM(config).bfloat16().eval()


@program(needs=("transformers",), gib=4.0, seconds=25.0)
def generate(run):
    """transformers' greedy generation for batches and lengths that vary, with its growing cache."""
    model = llama(run)
    for number, (rows, length) in enumerate(((4, 64), (16, 160), (8, 96), (32, 48))):
        rows, length = run.size((rows, length), (2, 8))
        text = tokens(number, model.config.vocab_size, rows, length // 2).to(run.device)
        told = model.generate(text, max_new_tokens=run.size(length // 2, 4), do_sample=False, pad_token_id=0)
        run.loss(told.double().mean())


@program(needs=("transformers", "accelerate"), gib=3.0, seconds=25.0)
def weights_on_host(run):
    """accelerate's offload: each layer's weights are copied to the GPU when it is called, and freed afterwards."""
    from accelerate import cpu_offload

    model = llama(run, 4).float().cpu()
    if run.on_gpu:
        cpu_offload(model, run.device)
    with torch.no_grad():
        for number in range(3):
            text = tokens(number, model.config.vocab_size, 2, run.size(512, 8)).to(run.device)
            run.loss(model(text).logits.double().mean())


@program()
def paged_cache(run):
    """One large cache of keys and values, parts of which are copied out, concatenated with new ones, and written back."""
    rows, length, heads, width = run.size((64, 1024, 16, 128), (4, 16, 2, 8))
    cache = torch.zeros(rows, length, heads, width, device=run.device, dtype=torch.half)
    for step in range(run.size(40, 8)):
        some, new = 1 + (17 * step) % (rows - 1), 1 + (61 * step) % (length // 2)
        keys = normals(step, some, new, heads, width, device=run.device).half()
        cache[:some, :new] = keys
        joined = torch.cat([cache[:some], keys], 1)
        if step % 8 == 7:
            run.loss(joined.float().mean())


@program(tolerance=2e-2, gib=4.0)
def diffusion(run):
    """Half precision at many resolutions, for which cuDNN times its algorithms and uses the fastest."""
    width = run.size(320, 32)

    def layer():
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(32, width), nn.SiLU())

    model = nn.Sequential(nn.Conv2d(4, width, 3, padding=1), *[layer() for _ in range(8)], nn.Conv2d(width, 4, 3, padding=1))
    kind = torch.half if run.on_gpu else torch.float
    model = model.to(run.device, kind).eval()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    with torch.inference_mode():
        for number, side in enumerate((64, 96, 128, 72, 160, 64, 112)):
            x = normals(number, run.size(4, 1), 4, run.size(side, 8), run.size(side, 8)).to(run.device, kind)
            for _ in range(3):
                x = x + 0.01 * model(x)
            run.loss(x.float().square().mean())


@program(gib=3.0)
def speculative(run):
    """Speculative decoding: a small model drafts words, a large one verifies them, and caches are truncated at differences."""
    draft, target = gpt(run, layers=2, width=256, heads=4).eval(), gpt(run, layers=8, width=512).eval()
    with torch.no_grad():
        text = tokens(0, target.vocabulary, run.size(1, 1), run.size(32, 8)).to(run.device)
        wanted, drafted, accepted = text.shape[1] + run.size(96, 16), 0, 0
        while text.shape[1] < wanted:
            guess = text
            for ahead in range(4):
                # An untrained draft is never right: use the target for some guesses, so that drafts of all lengths are accepted.
                model = target if (guess.shape[1] + ahead) % 3 else draft
                guess = torch.cat([guess, model(guess)[:, -1:].argmax(-1)], 1)
            judged = target(guess)[:, text.shape[1] - 1 :].argmax(-1)
            right = (judged[:, :-1] == guess[:, text.shape[1] :]).int().cumprod(1).sum().item()
            text = torch.cat([text, guess[:, text.shape[1] : text.shape[1] + right], judged[:, right : right + 1]], 1)
            drafted, accepted = drafted + 4, accepted + right
    run.loss(accepted / drafted)
    run.loss(text.double().mean())
    # The verified text equals the target's own.
    with torch.no_grad():
        alone = target(text)[:, :-1].argmax(-1)
    start = run.size(32, 8)
    same = (alone[:, start - 1 :] == text[:, start:]).float().mean()
    must(same > 0.95, "of the words", float(same), "are the target's")


class Int8Linear(nn.Module):
    """A layer whose weights are 8-bit integers with a scale per row; its inputs are rounded in between."""

    def __init__(self, layer):
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale.flatten())
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x):
        flat = x.flatten(0, -2)
        scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        rounded = (flat / scale).round().to(torch.int8)
        out = torch._int_mm(rounded, self.weight.T).float() * scale * self.scale
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def quantised(model):
    """Replaces a model's layers by integer layers, one at a time, and frees each replaced layer."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, Int8Linear(child))
        else:
            quantised(child)
    return model


@program(gib=4.0)
def int8(run):
    """Handwritten 8-bit weights and integer matrix products, next to the original model."""
    model = gpt(run, layers=6).eval()
    with torch.inference_mode():
        texts = [tokens(at, model.vocabulary, run.size(4 + at, 2), run.size(256 + 64 * at, 16)).to(run.device) for at in range(4)]
        whole = [model(text) for text in texts]
        small = quantised(model)
        for text, wanted in zip(texts, whole, strict=True):
            told = small(text)
            run.loss(told.double().square().mean())
            off = (told - wanted).norm() / wanted.norm()
            must(off < 0.2, "the quantised model is off by", float(off))


@program(gib=4.0)
def fp8(run):
    """Weights stored as 8-bit floats and widened for each layer, and activations stored the same way between layers."""
    width = run.size(4096, 32)
    weights = [normals(at, width, width, device=run.device) / width**0.5 for at in range(6)]
    small = [weight.to(torch.float8_e4m3fn) for weight in weights]
    del weights
    with torch.inference_mode():
        for step in range(8):
            x = normals(100 + step, run.size(512 + 128 * (step % 3), 4), width).to(run.device)
            for weight in small:
                stored = torch.tanh(x).to(torch.float8_e4m3fn)
                x = stored.bfloat16() @ weight.bfloat16().T
            run.loss(x.double().square().mean())


@program(gib=7.0)
def several_models(run):
    """Five models of different sizes, loaded, moved to the host, called in turn and deleted, as in a server."""
    there, made = {}, 0
    with torch.inference_mode():
        for turn in range(14):
            wanted = (turn * 3) % 5
            if wanted not in there:
                torch.manual_seed(wanted)
                there[wanted] = gpt(run, layers=3 + 2 * wanted, width=256 + 128 * wanted, heads=4).eval().to("cpu")
                made += 1
            if len(there) > 3:
                oldest = next(name for name in there if name != wanted)
                del there[oldest]
                if run.on_gpu and turn % 2:
                    torch.cuda.empty_cache()
            model = there[wanted].to(run.device)
            text = tokens(turn, model.vocabulary, run.size(6 + 2 * wanted, 2), run.size(256, 8)).to(run.device)
            with run.autocast():
                run.loss(model(text).double().square().mean())
            if turn % 3 == 0:
                model.to("cpu")
    run.loss(made)


@program()
def traced(run):
    """A model traced, frozen and called at other sizes, and one converted to a graph by torch.export."""
    width = run.size(1024, 16)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)).eval()
    model = model.to(run.device)
    x = normals(0, run.size(64, 4), width).to(run.device)
    with torch.no_grad():
        frozen = torch.jit.freeze(torch.jit.trace(model, x))
        for step in range(5):
            y = normals(step, run.size(64 * (step + 1), 4), width).to(run.device)
            run.loss(frozen(y).double().square().mean())
        exported = torch.export.export(model, (x,)).module()
        must(close(exported(x).double().mean(), model(x).double().mean(), 1e-3), "the exported model says something else")
        run.loss(exported(x).double().square().mean())


@program(gib=3.0)
def beams(run):
    """Beam search over a cache that is reordered by index each step, and shrinks when beams end."""
    model = Gpt(layers=2, width=run.size(512, 32), heads=run.size(8, 2), words=run.size(8000, 100)).to(run.device).eval()
    rows = run.size(12, 2)
    with torch.no_grad():
        text = tokens(0, model.vocabulary, rows, run.size(16, 4)).to(run.device)
        score, beams = torch.zeros(rows, 1, device=run.device), 1
        for _ in range(run.size(40, 4)):
            told = F.log_softmax(model(text)[:, -1], -1).view(rows, beams, -1) + score.unsqueeze(-1)
            score, best = told.flatten(1).topk(4)
            source = best // model.vocabulary + beams * torch.arange(rows, device=run.device).unsqueeze(1)
            text = torch.cat([text.index_select(0, source.flatten()), (best % model.vocabulary).view(-1, 1)], 1)
            beams = 4
        run.loss(score.double().mean())
        run.loss(text.double().mean())
