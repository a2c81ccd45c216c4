"""Reads the trainer's start files (`trainer start -o FILE`, `trainer --save-start FILE`) with the standard library only.

The format is safetensors: eight bytes with the header's length, a JSON header, raw little-endian values.
`analysis/schema.md` lists the tensors and the metadata.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from command_line import BadInput

VERSION = "1"
# The format's own limit.
MOST_HEADER = 100_000_000
WIDTHS = {"F32": 4, "U32": 4, "U8": 1}
# Numbers in a start file's metadata.
NUMBERS = ("features", "classes", "train_rows", "validation_rows", "hidden", "layers", "batch", "epochs", "seed")


@dataclass(frozen=True)
class Tensor:
    """Values of one type, row by row: `F32`, `U32` or `U8`."""

    dtype: str
    shape: tuple
    data: memoryview


@dataclass(frozen=True)
class Start:
    """A start file: its tensors by name, and its metadata."""

    path: str
    sha256: str
    tensors: dict
    metadata: dict

    def number(self, name):
        """A number in the metadata; `None` if it is absent."""
        text = self.metadata.get(name)
        if text is None:
            return None
        # int() also accepts signs, blanks and other scripts' digits.
        if not (text.isascii() and text.isdigit() and len(text) <= 20):
            raise ValueError(f"{name} is {text[:40]!r} and no number")
        return int(text)

    @property
    def orders(self):
        """The number of epochs with an order."""
        return sum(name.startswith("order.") for name in self.tensors)

    @property
    def folder(self):
        """The directory of the data files that the trainer read, if any."""
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
    except (ValueError, KeyError) as error:
        # Escaped, because text quoted from the file may contain terminal control sequences.
        what = f"{error} is missing" if isinstance(error, KeyError) else ascii(str(error))[1:-1]
        raise BadInput(f"{path} is no start file: {what}; write one with: trainer start -o FILE") from None
    return start


def parse(content):
    """Tensors by name, and metadata, of a file in the safetensors format."""
    if len(content) < 8:
        raise ValueError("it is too short")
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise ValueError("it is cut short")
    if length > MOST_HEADER:
        raise ValueError(f"its header has {length} bytes, which none has")
    try:
        header = json.loads(content[8 : 8 + length])
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata are not texts by name")
    values = memoryview(content)[8 + length :]
    tensors, expected = {}, 0
    for name, entry in header.items():
        dtype, shape, (begin, end) = described(name, entry)
        if end - begin != math.prod(shape) * WIDTHS[dtype] or not 0 <= begin <= end <= len(values):
            raise ValueError(f"{name[:80]} does not lie where the header says, the file may be cut short")
        tensors[name] = Tensor(dtype, shape, values[begin:end])
        expected = max(expected, end)
    if expected != len(values):
        raise ValueError("it is longer than its header says")
    return tensors, metadata


def described(name, entry):
    """A tensor's type, shape and offsets, if the header has them as numbers."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name[:80]} is not described by an object")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in tuple(WIDTHS):
        raise ValueError(f"{name[:80]} has values of kind {str(dtype)[:40]}")
    for what, numbers in (("shape", shape), ("data_offsets", place)):
        if not isinstance(numbers, list) or not all(type(one) is int and 0 <= one < 2**48 for one in numbers):
            raise ValueError(f"{what} of {name[:80]} is no list of numbers")
    if len(shape) > 2 or len(place) != 2:
        raise ValueError(f"{name[:80]} has not two numbers for its place, or more than two dimensions")
    return dtype, tuple(shape), place


def check(start):
    """Checks that the tensors match the metadata."""
    for name in NUMBERS:
        if start.number(name) is None:
            raise KeyError(name)
    # Before anything is sized by the number of layers: each has two tensors in the file.
    if not 1 <= start.number("layers") <= len(start.tensors):
        raise ValueError(f"it has {len(start.tensors)} tensors, which are not those of {start.number('layers')} layers")
    files = json.loads(start.metadata["files"])
    if not isinstance(files, list) or not all(isinstance(one, dict) and isinstance(one.get("path"), str) for one in files):
        raise ValueError("its files are no list of objects with a path")
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
