"""torch.compile in its modes. Kernel selection by timing may differ from run to run, so losses are only nearly equal."""

import torch
from torch import nn
from torch.nn import functional as F

from acceptance.common import normals, gpt, program, resnet, text_loss, tokens


def as_users_do():
    """Disables deterministic kernels: with them the compiler does not use CUDA graphs."""
    torch.use_deterministic_algorithms(False)


@program(tolerance=1e-2, gib=5.0, seconds=60.0)
def compiled_default(run):
    """A language model in the default mode, with texts of changing length, so that it is compiled for any length."""
    as_users_do()
    model = gpt(run, layers=3)
    called = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(8):
        length = run.size((256, 256, 384, 512)[step % 4], 17 + step % 3)
        text = tokens(step, model.vocabulary, run.size(6, 2), length + 1).to(run.device)
        with run.autocast():
            logits = called(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        run.step(optimizer, loss)


@program(tolerance=1e-2, gib=5.0, seconds=60.0)
def compiled_graphs(run):
    """A convolutional network in mode reduce-overhead: CUDA graphs of training and of two sizes of evaluation share a pool."""
    as_users_do()
    width, side = run.size(64, 4), run.size(64, 8)
    model = resnet(width).to(run.device).to(memory_format=torch.channels_last)
    called = torch.compile(model, mode="reduce-overhead", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batch(seed, rows):
        return normals(seed, rows, 3, side, side).to(run.device).to(memory_format=torch.channels_last)

    for step in range(9):
        torch.compiler.cudagraph_mark_step_begin()
        rows = run.size(32, 4)
        with run.autocast():
            loss = F.cross_entropy(called(batch(step, rows)), tokens(step, 100, rows).to(run.device))
        run.step(optimizer, loss)
        if step % 3 == 2:
            with torch.no_grad(), run.autocast():
                for some in (rows, rows // 2):
                    torch.compiler.cudagraph_mark_step_begin()
                    run.loss(called(batch(50 + step, some)).float().square().mean())


@program(tolerance=1e-2, gib=4.0, seconds=60.0, cpu=False)
def compiled_tuned(run):
    """Mode max-autotune: candidate kernels of a matrix product are timed, in temporary memory, and the fastest is used."""
    as_users_do()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()).to(run.device, torch.bfloat16)
    called = torch.compile(model, mode="max-autotune", dynamic=False)
    with torch.no_grad():
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            x = normals(step, 1024, 1024).to(run.device, torch.bfloat16)
            run.loss(called(x).double().square().mean())


@program(tolerance=1e-2, gib=4.0, seconds=60.0)
def compiled_breaks(run):
    """Graph breaks, a data-dependent branch in Python, an exception out of compiled code, and a compiled optimizer."""
    as_users_do()
    width = run.size(768, 16)
    first, second = (nn.Linear(width, width).to(run.device) for _ in range(2))
    weights = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=torch.tensor(1e-3), capturable=run.on_gpu)

    @torch.compile
    def forward(x, limit):
        x = torch.tanh(first(x))
        if x.abs().mean().item() > limit:
            raise ValueError("too much")
        return second(x).square().mean()

    @torch.compile
    def update():
        optimizer.step()

    for step in range(6):
        x = normals(step, run.size(256, 4), width).to(run.device)
        try:
            forward(x, 0.0)
        except ValueError:
            run.loss(0.0)
        loss = forward(x, 10.0)
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        run.loss(loss)


@program(tolerance=1e-2, gib=4.0, seconds=60.0)
def compiled_checkpoint(run):
    """Compiled blocks within checkpoints with dropout."""
    as_users_do()
    from torch.utils.checkpoint import checkpoint

    compiled = {}

    def around(block, x):
        if block not in compiled:
            compiled[block] = torch.compile(block, dynamic=False)
        return checkpoint(compiled[block], x, use_reentrant=False)

    model = gpt(run, layers=2, dropout=0.1, around=around)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(4):
        text = tokens(step, model.vocabulary, run.size(6, 2), run.size(385, 17)).to(run.device)
        with run.autocast():
            loss = text_loss(model, text)
        run.step(optimizer, loss)
