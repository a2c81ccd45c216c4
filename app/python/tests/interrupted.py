"""Programs that exceptions interrupt, in the middle of operators and of the backward pass.

    python interrupted.py [RECORDING]

A recorder must not have side effects: each program prints the same line with and without a recording. No result
depends on kernels, so that the programs also run over a stand-in for CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import vramlab
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

PROGRAMS: list[Callable[[], Any]] = []


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS.append(run)
    return run


class Left(Exception):
    """The exception that interrupts these programs."""


def parameter(size: int = 64) -> torch.Tensor:
    return torch.empty(size, size, device="cuda", requires_grad=True)


def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout(x * weight, 0.1).relu() * 2, 0.1)


def train(**how: Any) -> int:
    """Recomputes forward passes in the backward pass; an exception stops each recomputation early."""
    weight, x = parameter(), parameter()
    for _ in range(3):
        out = x
        for _ in range(4):
            out = checkpoint(block, out, weight, **how)
        out.sum().backward()
    return 3


@program
def checkpoints() -> int:
    return train(use_reentrant=False)


@program
def checkpoints_that_do_not_stop_early() -> int:
    return train(use_reentrant=False, early_stop=False)


@program
def reentrant_checkpoints() -> int:
    return train(use_reentrant=True)


@program
def checkpoints_in_checkpoints() -> int:
    weight, x = parameter(), parameter()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, checkpoint(block, x, weight, use_reentrant=False), weight, use_reentrant=False)

    checkpoint(outer, x, use_reentrant=False).sum().backward()
    return 1


@program
def hooks_on_saved_tensors() -> list[str]:
    told = []
    for where in ("pack", "unpack"):

        def pack(tensor: torch.Tensor, where: str = where) -> torch.Tensor:
            if where == "pack":
                raise Left("packed")
            return tensor.clone()

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            raise Left("unpacked")

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                block(parameter(), parameter()).sum().backward()
        except Left as error:
            told.append(str(error))
    return told


@program
def hooks_of_modules() -> list[str]:
    told = []
    for kind in ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"):
        layer = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.1)).cuda()

        def leave(*_: Any, kind: str = kind) -> None:
            torch.empty(1 << 20, device="cuda")
            raise Left(kind)

        getattr(layer[1], kind)(leave)
        try:
            layer(parameter()).sum().backward()
        except Left as error:
            told.append(str(error))
    return told


@program
def hooks_of_gradients() -> str:
    x = parameter()
    out = block(x, parameter())

    def leave(gradient: torch.Tensor) -> None:
        gradient.clone()
        raise Left("gradient")

    out.register_hook(leave)
    try:
        out.sum().backward()
    except Left as error:
        return str(error)
    return "not left"


class Own(torch.autograd.Function):
    """An operator in Python that an exception interrupts in the forward or the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        kept = x.clone()
        ctx.save_for_backward(kept)
        if where == "forward":
            raise Left(where)
        return kept * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        (kept * gradients[0]).relu()
        raise Left(ctx.where)


@program
def operators_in_python() -> list[str]:
    told = []
    for where in ("forward", "backward"):
        try:
            Own.apply(parameter() * 1, where).sum().backward()
        except Left as error:
            told.append(str(error))
    return told


@program
def dispatch_modes() -> int:
    """Interrupts the n-th operator of an expression, for each n."""
    left = 0

    class Count(TorchDispatchMode):
        def __init__(self, leave_at: int) -> None:
            super().__init__()
            self.left = leave_at

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = operator(*args, **(kwargs or {}))
            self.left -= 1
            if self.left == 0:
                raise Left
            return out

    for at in range(1, 12):
        try:
            with Count(at):
                block(parameter(), parameter()).sum().backward()
        except Left:
            left += 1
    return left


@program
def generators() -> list[str]:
    told = []

    def batches() -> Iterator[torch.Tensor]:
        kept = parameter()
        try:
            while True:
                yield block(kept, parameter())
        except GeneratorExit:
            # Frees and allocates while the generator is closed.
            del kept
            parameter()
            told.append("closed")
            raise

    first = batches()
    next(first)
    first.close()
    second = batches()
    next(second)
    del second
    third = batches()
    next(third)
    try:
        third.throw(Left("thrown"))
    except Left as error:
        told.append(str(error))
    return told


@program
def frees_in_finalizers() -> int:
    left = 0

    class Holder:
        def __init__(self) -> None:
            self.tensor = parameter()

        def __del__(self) -> None:
            del self.tensor
            parameter()

    for _ in range(20):
        try:
            kept = [Holder(), Holder()]
            block(kept[0].tensor, kept[1].tensor).reshape(7, 7, 7)
        except RuntimeError:
            left += 1
    return left


@program
def out_of_memory() -> str:
    try:
        block(parameter(), parameter()).expand(1 << 16, 64, 64).contiguous().expand(1 << 20, 1 << 16, 64, 64).clone()
    except RuntimeError:
        return "refused"
    return "served"


def main() -> None:
    recording = vramlab.record(sys.argv[1]) if len(sys.argv) > 1 else nullcontext()
    with recording:
        for run in PROGRAMS:
            try:
                told = run()
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            print(run.__name__, told, flush=True)


if __name__ == "__main__":
    torch.cuda.init()
    main()
