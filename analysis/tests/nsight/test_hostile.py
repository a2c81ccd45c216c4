"""Extracted captures and logged calls that lie: tables or one sentence, whatever a field says."""

from __future__ import annotations

import csv
import io
import json
import lzma
from pathlib import Path

import pytest

from tests.conftest import write_run
from tests.hostile import HOSTILE, mutations
from tests.nsight.exports import training
from vramlab_analysis.nsight.__main__ import main

CELLS = ["", "x", "-1", "1.5", "9" * 30, "9223372036854775807", HOSTILE.replace("\ud800", "").replace("\x00", "")]


def ends_well(capsys: pytest.CaptureFixture[str], what: str, *words: str) -> int:
    try:
        code = main(list(words))
    except Exception as error:
        pytest.fail(f"{what}: {type(error).__name__}: {error}")
    said = capsys.readouterr().err
    if code:
        assert code == 2, f"{what}: {said}"
        assert said.startswith("error: ")
        assert said.count("\n") == 1
    return code


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "out"
    assert main(["extract", str(training(tmp_path / "x.sqlite")), "-o", str(out)]) == 0
    capsys.readouterr()
    return out


def test_every_field_of_a_description_mutated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "capture.json"
    refused = 0
    for name, text in mutations(json.loads(path.read_text())):
        path.write_text(text)
        refused += ends_well(capsys, name, str(folder), "--json") == 2
    assert refused > 30


@pytest.mark.parametrize("table", ["calls", "work", "ranges"])
def test_every_column_of_a_table_mutated(folder: Path, capsys: pytest.CaptureFixture[str], table: str) -> None:
    path = folder / f"{table}.csv.xz"
    rows = list(csv.reader(io.StringIO(lzma.decompress(path.read_bytes()).decode())))
    refused = 0
    for row in (0, 1, len(rows) - 1):
        for column in range(len(rows[0])):
            for cell in CELLS:
                changed = [list(line) for line in rows]
                changed[row][column] = cell
                text = io.StringIO()
                csv.writer(text).writerows(changed)
                path.write_bytes(lzma.compress(text.getvalue().encode(), preset=0))
                refused += ends_well(capsys, f"{rows[0][column]} in row {row} {cell!r}", str(folder), "--json") == 2
    assert refused


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\xfd7zXZ\x00garbage", lzma.compress(b"\xff\xfe" * 9), lzma.compress(b'"' * 200_000)]
)
def test_what_is_no_table(folder: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    for file in ("calls.csv.xz", "work.csv.xz"):
        kept = (folder / file).read_bytes()
        (folder / file).write_bytes(data)
        assert ends_well(capsys, file, str(folder)) == 2
        (folder / file).write_bytes(kept)


def test_every_field_of_a_record_beside_it_mutated(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = write_run(tmp_path / "run", trace=True)
    summary, calls = record / "summary.json", record / "driver_calls.jsonl"
    kept, lines = summary.read_text(), calls.read_text().splitlines()
    told = json.loads(kept)
    told["settings"]["profile_steps"] = {"first": 1, "last": 2}
    small = {key: told[key] for key in ("settings", "blocked_method", "device")}
    for name, text in mutations(small):
        summary.write_text(text)
        ends_well(capsys, name, str(folder), "--record", str(record))
    summary.write_text(kept)
    for name, text in mutations(json.loads(lines[0])):
        calls.write_text("\n".join([text, *lines[1:]]) + "\n")
        ends_well(capsys, name, str(folder), "--record", str(record))
