"""Programs of several processes on one GPU: data loading workers, sent tensors, shared weights."""

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset

from acceptance.common import normals, must, program


def answer(questions, answers):
    """A child process: returns the sum of each received tensor, and sends some tensors back."""
    while (got := questions.get()) is not None:
        answers.put(float(got.double().sum()))
        got.add_(1)
        del got
    answers.put("ended")


@program(cpu=False, seconds=40.0, gib=4.0)
def sent_tensors(run):
    """Tensors of many sizes are sent to a spawned process, which changes them: CUDA IPC, with memory reuse in between."""
    context = mp.get_context("spawn")
    questions, answers = context.Queue(), context.Queue()
    child = context.Process(target=answer, args=(questions, answers))
    child.start()
    for turn in range(2):
        for power in (0, 9, 16, 19, 20, 21, 22, 24):
            x = torch.full((1 << power,), float(turn + 1), device=run.device)
            questions.put(x)
            value = answers.get(timeout=60)
            must(value == (turn + 1) * (1 << power), "the child sums", 1 << power, "numbers to", value)
            run.loss(value)
            torch.cuda.synchronize()
            del x
    questions.put(None)
    must(answers.get(timeout=60) == "ended", "the child did not end")
    child.join(60)
    must(child.exitcode == 0, "the child ended with", child.exitcode)


class OnGpu(Dataset):
    """Samples that a worker creates on the GPU."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return normals(index, 64, 64).cuda().tanh().cpu()


class OnHost(Dataset):
    """Samples that a worker creates on the host."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return normals(index, 3, 64, 64)


@program(cpu=False, seconds=40.0, gib=4.0)
def gpu_workers(run):
    """A DataLoader whose spawned workers use the GPU themselves, two epochs."""
    weight = (normals(0, 64, 64) / 8).to(run.device).requires_grad_()
    loader = DataLoader(OnGpu(), batch_size=8, num_workers=2, multiprocessing_context="spawn", persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            loss = (batch.to(run.device) @ weight).square().mean()
            loss.backward()
            with torch.no_grad():
                weight -= 0.01 * weight.grad
            weight.grad = None
            run.loss(loss)


@program(seconds=20.0)
def forked_workers(run):
    """Workers that are forked while CUDA is in use but do not use it, with pinned memory, anew in each epoch."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loader = DataLoader(OnHost(), batch_size=16, num_workers=2, multiprocessing_context="fork", pin_memory=run.on_gpu)
        for batch in loader:
            loss = model(batch.to(run.device, non_blocking=True)).square().mean()
            run.step(optimizer, loss)


def add_to(weights, turns, done):
    """A child process: adds one to shared weights `turns` times."""
    for _ in range(turns):
        for weight in weights:
            weight.add_(1)
    torch.cuda.synchronize()
    del weight, weights
    done.put(True)
    # The parent owns the memory and waits for this message.


@program(cpu=False, seconds=40.0, gib=4.0)
def shared_weights(run):
    """Weights on the GPU that two spawned processes change one after the other, as in Hogwild training."""
    context = mp.get_context("spawn")
    weights = [torch.zeros(size, device=run.device) for size in (10, 1000, 1 << 20, 3 << 20)]
    for weight in weights:
        weight.share_memory_()
    for turn in range(2):
        done = context.Queue()
        child = context.Process(target=add_to, args=(weights, 3, done))
        child.start()
        must(done.get(timeout=60), "the child did not end")
        child.join(60)
        must(child.exitcode == 0, "the child ended with", child.exitcode)
        for weight in weights:
            must(bool((weight == 3.0 * (turn + 1)).all()), "the child's work is not there")
            run.loss(weight.double().sum())
