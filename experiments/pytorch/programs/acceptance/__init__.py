"""Programs that use PyTorch in its various forms; each must run under every allocator as under PyTorch's own.

A file is a family. A program is a function with the decorator `program`; `run.py` runs it. No program refers to an allocator.
"""
