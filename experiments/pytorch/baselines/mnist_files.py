"""Finds and reads MNIST's four files as the trainer does, with the standard library only. Nothing is downloaded."""

import gzip
import hashlib
import os
import struct
import zlib
from pathlib import Path

from command_line import BadInput

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLASSES = 10
# 1/255, to the nearest f32.
SCALE = 0.003921569


def folders(data_dir, recorded=None):
    """Directories that may contain the files, in order. A directory given by the user is the only one."""
    if data_dir:
        return [Path(data_dir)]
    if os.environ.get("MNIST_DIR"):
        return [Path(os.environ["MNIST_DIR"])]
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = os.environ.get("VRAMLAB_CACHE") or Path(caches) / "vramlab"
    return [*([recorded] if recorded else []), Path(cache) / "mnist"]


def locate(data_dir, recorded=None):
    """The paths of the four files."""
    places = folders(data_dir, recorded)
    for folder in places:
        found = [next((f for f in (folder / name, folder / f"{name}.gz") if f.is_file()), None) for name in NAMES]
        if all(found):
            return found
    names = ", ".join(str(place) for place in places)
    raise BadInput(f"MNIST's four files are not in {names}: name their folder with --data-dir or MNIST_DIR")


def read_file(path):
    """A file's contents, decompressed if necessary, whatever its name."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: {error}; fetch it afresh") from None


def items(content, path, dimensions):
    """Number of items, and their values, after a header with this many dimensions."""
    size = 4 * (1 + dimensions)
    if len(content) < size or struct.unpack(">I", content[:4])[0] != 0x800 + dimensions:
        raise BadInput(f"{path} is no IDX file with {dimensions} dimensions; fetch it afresh")
    count, *shape = struct.unpack(f">{dimensions}I", content[4:size])
    width = 1
    for length in shape:
        width *= length
    if len(content) != size + count * width or count == 0 or width == 0:
        raise BadInput(f"{path} has {len(content)} bytes, its header says {size + count * width}; fetch it afresh")
    return count, width, memoryview(content)[size:]


def read(paths):
    """A dictionary: `train` and `validation` (rows, features, labels), `features`, `files`, `checksum`."""
    contents = [read_file(path) for path in paths]
    digests = [hashlib.sha256(content) for content in contents]
    splits = []
    for images, labels in ((0, 1), (2, 3)):
        rows, width, pixels = items(contents[images], paths[images], 3)
        count, _, classes = items(contents[labels], paths[labels], 1)
        if rows != count:
            raise BadInput(f"{paths[images]} has {rows} images, {paths[labels]} has {count} labels: they do not belong together")
        if max(classes) >= CLASSES:
            raise BadInput(f"{paths[labels]} has a label of {max(classes)}, digits end at 9; fetch it afresh")
        splits.append((rows, width, pixels, classes))
    if splits[0][1] != splits[1][1]:
        raise BadInput(f"images for training and validation differ in size: {paths[0].parent} holds two data sets")
    return {
        "train": splits[0],
        "validation": splits[1],
        "features": splits[0][1],
        "files": [{"path": str(p), "sha256": d.hexdigest()} for p, d in zip(paths, digests)],
        "checksum": hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest(),
    }
