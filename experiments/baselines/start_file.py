"""Reads the trainer's start files (`trainer start -o FILE`, `trainer --save-start FILE`) with nothing but Python.

The format is safetensors: eight bytes with the header's length, a JSON header, raw little-endian values.
`analysis/schema.md` lists the tensors and the metadata.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

VERSION = "1"
WIDTHS = {"F32": 4, "U32": 4, "U8": 1}
# What a start decides, with how its text is read.
NUMBERS = ("features", "classes", "train_rows", "validation_rows", "hidden", "layers", "batch", "epochs", "seed")


class BadInput(Exception):
    """What is wrong with what was given, and how to mend it, in one line."""


@dataclass(frozen=True)
class Tensor:
    """Values of one kind, row by row: `F32`, `U32` or `U8`."""

    dtype: str
    shape: tuple
    data: memoryview


@dataclass(frozen=True)
class Start:
    """A start file: its tensors by name, and what its metadata say."""

    path: str
    sha256: str
    tensors: dict
    metadata: dict

    def number(self, name):
        """A number in the metadata; `None` where there is none."""
        text = self.metadata.get(name)
        return None if text is None else int(text)

    @property
    def orders(self):
        """How many epochs' orders there are."""
        return sum(name.startswith("order.") for name in self.tensors)

    @property
    def folder(self):
        """Where the trainer found the data's files, if it read any."""
        files = json.loads(self.metadata["files"])
        return Path(files[0]["path"]).parent if files else None

    @property
    def widths(self):
        """Widths of the network: features, hidden layers, classes."""
        hidden = [self.number("hidden")] * (self.number("layers") - 1)
        return [self.number("features"), *hidden, self.number("classes")]


def read(path):
    """The start file at `path`. Raises `BadInput` for anything else."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; write a start file with: trainer start -o {path}") from None
    try:
        tensors, metadata = parse(content)
        if metadata.get("format") != "trainer start":
            raise ValueError("it was not written by the trainer")
        if metadata.get("schema_version") != VERSION:
            raise ValueError(f"its version is {metadata.get('schema_version')}, this program reads version {VERSION}")
        start = Start(str(path), hashlib.sha256(content).hexdigest(), tensors, metadata)
        check(start)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadInput(f"{path} is no start file: {what}; write one with: trainer start -o FILE") from None
    return start


def parse(content):
    """Tensors by name, and metadata, of a file in the safetensors format."""
    if len(content) < 8:
        raise ValueError("it is too short")
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise ValueError("it is cut short")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    values = memoryview(content)[8 + length :]
    tensors, expected = {}, 0
    for name, entry in header.items():
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] not in WIDTHS:
            raise ValueError(f"{name} has values of kind {entry['dtype']}")
        if end - begin != math.prod(shape) * WIDTHS[entry["dtype"]] or not 0 <= begin <= end <= len(values):
            raise ValueError(f"{name} does not lie where the header says, the file may be cut short")
        tensors[name] = Tensor(entry["dtype"], shape, values[begin:end])
        expected = max(expected, end)
    if expected != len(values):
        raise ValueError("it is longer than its header says")
    return tensors, metadata


def check(start):
    """Whether the tensors are those that the metadata announce."""
    for name in NUMBERS:
        if start.number(name) is None:
            raise KeyError(name)
    expected = {}
    for layer, (inputs, outputs) in enumerate(zip(start.widths, start.widths[1:])):
        expected[f"layers.{layer}.weight"] = ("F32", (outputs, inputs))
        expected[f"layers.{layer}.bias"] = ("F32", (outputs,))
    for epoch in range(1, max(start.orders, 1) + 1):
        expected[f"order.{epoch}"] = ("U32", (start.number("train_rows"),))
    for name, (dtype, shape) in expected.items():
        found = start.tensors[name]
        if (found.dtype, found.shape) != (dtype, shape):
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}")
        if name.startswith("order.") and sorted(found.data.cast("I")) != list(range(shape[0])):
            raise ValueError(f"{name} does not name each row once")
