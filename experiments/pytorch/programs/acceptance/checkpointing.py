"""Activations that are recomputed, stored on the host, or selected individually. All with dropout, so that order matters."""

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from acceptance.common import gpt, program, train


@program(gib=5.0)
def checkpoint_reentrant(run):
    """torch.utils.checkpoint in its older form, which runs a backward pass within the backward pass."""
    train(run, gpt(run, layers=10, dropout=0.1, around=lambda block, x: checkpoint(block, x, use_reentrant=True)))


@program(gib=5.0)
def checkpoint_early(run):
    """Its newer form, which stops recomputing by an exception that crosses C++ while tensors are freed."""
    train(run, gpt(run, layers=10, dropout=0.1, around=lambda block, x: checkpoint(block, x, use_reentrant=False)))


@program(gib=5.0)
def checkpoint_nested(run):
    """Checkpoints within a checkpoint, of both forms."""

    def inner(block, x, count=0):
        if count == 2:
            return block(x)
        return checkpoint(inner, block, x, count + 1, use_reentrant=False)

    train(run, gpt(run, layers=6, dropout=0.1, around=lambda block, x: checkpoint(inner, block, x, use_reentrant=False)))


@program(gib=5.0)
def checkpoint_selective(run):
    """Matrix products are stored and the remainder is recomputed, by a policy for each operation."""

    def policy(context, operation, *arguments, **named):
        kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def around(block, x):
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    train(run, gpt(run, layers=8, dropout=0.1, around=around))


@program(gib=5.0)
def saved_on_host(run):
    """Activations are moved to pinned host memory, and copied back for the backward pass."""

    def around(block, x):
        with torch.autograd.graph.save_on_cpu(pin_memory=run.on_gpu):
            return block(x)

    train(run, gpt(run, layers=6, dropout=0.1, around=around), steps=4, shapes=((4, 384), (2, 512), (6, 256)))
