"""Stands for PyTorch in tests: the few functions that a recording uses, over a snapshot that PyTorch wrote."""

from torch import _C, cuda, optim  # noqa: F401

__version__ = "2.11.0+fake"
