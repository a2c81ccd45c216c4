"""Programs in the forms that PyTorch is used in, each of which must run under every allocator as under PyTorch's own.

A file is a family. A program is a function with the decorator `program`; `run.py` runs one. Nothing in them knows of an allocator.
"""
