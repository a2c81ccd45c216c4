"""The reader of start files: any invalid header gives a one-line error, and claimed sizes are not allocated."""

import json
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import start_file  # noqa: E402

METADATA = {
    "format": "trainer start", "schema_version": "1", "features": "2", "classes": "2", "train_rows": "3",
    "validation_rows": "1", "hidden": "2", "layers": "1", "batch": "1", "epochs": "1", "seed": "42", "files": "[]",
}  # fmt: skip
TENSORS = {
    "layers.0.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "layers.0.bias": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
    "order.1": {"dtype": "U32", "shape": [3], "data_offsets": [24, 36]},
}
VALUES = struct.pack("<6f3I", *range(6), 2, 0, 1)
WRONG = [None, [], {}, [1], {"x": 1}, "x", "", "-1", "1e3", "9" * 400, "100000000", "\x1b[2J", 1, -1, 1.5, True, 10**30, [[[]]],
         [None, 1], [-1, 5], [0, 2**80], [1] * 60]


def written(path, header, values=VALUES):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return path


def whole():
    return {"__metadata__": dict(METADATA), **{name: dict(entry) for name, entry in TENSORS.items()}}


def refused(path):
    """True if the file is refused, in one line without control characters."""
    try:
        start_file.read(path)
    except start_file.BadInput as error:
        assert "\n" not in str(error)
        assert str(error).isprintable()
        return True
    return False


def test_the_whole_one_is_read(tmp_path):
    start = start_file.read(written(tmp_path / "s", whole()))
    assert (start.widths, start.orders, start.folder) == ([2, 2], 1, None)


def test_every_field_mutated(tmp_path):
    path, refusals, tried = tmp_path / "s", 0, 0
    for wrong in WRONG:
        header = whole()
        cases = [wrong, {**header, "__metadata__": wrong}, {**header, "extra": wrong}]
        cases += [{**header, "__metadata__": {**METADATA, key: wrong}} for key in METADATA]
        cases += [{**header, name: wrong} for name in TENSORS]
        cases += [{**header, name: {**entry, key: wrong}} for name, entry in TENSORS.items() for key in entry]
        for case in cases:
            tried += 1
            refusals += refused(written(path, case))
    for key in METADATA:
        header = whole()
        del header["__metadata__"][key]
        assert refused(written(path, header)), key
    assert refusals > 0.9 * tried


@pytest.mark.parametrize(
    "header", [b"null", b"[]", b"1", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"{}", b"NaN"]
)
def test_what_is_no_header(tmp_path, header):
    assert refused(written(tmp_path / "s", header))


def test_cut_anywhere(tmp_path):
    content = written(tmp_path / "s", whole()).read_bytes()
    for length in range(len(content)):
        (tmp_path / "s").write_bytes(content[:length])
        assert refused(tmp_path / "s"), length


def test_a_hundred_million_layers_take_no_memory(tmp_path):
    header = whole()
    header["__metadata__"]["layers"] = "100000000"
    path = written(tmp_path / "s", header)
    tracemalloc.start()
    try:
        assert refused(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
