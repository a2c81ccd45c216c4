"""Optimizers."""

from torch.optim import optimizer
from torch.optim.optimizer import Optimizer

__all__ = ["Optimizer"]

# As in PyTorch.
del optimizer
