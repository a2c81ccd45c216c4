"""A stand-in for PyTorch: the functions that a recording uses, over a snapshot written by PyTorch."""

from torch import _C, cuda, optim  # noqa: F401

__version__ = "2.11.0+fake"
