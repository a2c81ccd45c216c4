"""Exports that lack something, the command line, extracted folders, the report for nsys stats."""

from __future__ import annotations

import ast
import csv
import io
import json
import lzma
import sqlite3
import statistics
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.conftest import write_run
from tests.hostile import HOSTILE, mutations
from tests.nsight.exports import NEW, OLD, Export, training
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight import attribute, extracted, load
from vramlab_analysis.nsight.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize(
    ("table", "said", "waiting"),
    [
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "no CUDA calls", 0),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "no kernels", 0),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", None, 25),
        ("NVTX_EVENTS", "no NVTX ranges", 25),
        ("StringIds", "no table StringIds", 25),  # without names, but what is seen is enough
        ("CUDA_GPU_MEMORY_USAGE_EVENTS", None, 25),
        ("META_DATA_EXPORT", None, 25),
    ],
)
def test_a_missing_table_leaves_the_rest(
    tmp_path: Path, capsys: Any, version: str, table: str, said: str | None, waiting: int
) -> None:
    path = training(tmp_path / "x.sqlite", version)
    with sqlite3.connect(path) as db:
        db.execute(f"DROP TABLE IF EXISTS {table}")
    capture = load(path)
    assert len(attribute(capture).blocked) == waiting
    if said:
        assert any(said in note for note in capture.notes)
    assert main([str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Calls")
    assert not said or said in err


def test_kernels_without_their_launches_are_counted(tmp_path: Path) -> None:
    export = Export(tmp_path / "x.sqlite")
    export.run("before", 5, (0, 100))
    export.call("cuCtxSynchronize", 20, 110)
    capture = load(export.done())
    assert any("1 of 1 kernels" in note for note in capture.notes)
    assert [row["waited_ns"] for row in attribute(capture).rows()] == [80]


@pytest.mark.parametrize("kind", ["nothing", "text", "database", "report", "folder"])
def test_other_file_than_an_export_is_refused_in_one_line(tmp_path: Path, capsys: Any, kind: str) -> None:
    path = tmp_path / ("x.nsys-rep" if kind == "report" else "x.sqlite")
    if kind in ("text", "report"):
        path.write_text("no database, whatever its name says " * 100)
    elif kind == "database":
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE t (a)")
    elif kind == "folder":
        path.mkdir()
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(path) in err


def test_machines_get_json_and_csv(tmp_path: Path, capsys: Any) -> None:
    path = training(tmp_path / "x.sqlite")
    assert main([str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == 25
    assert len(document["tables"]["blocked_calls"]) == 25
    assert document["tables"]["waited_for"] == [
        {"call": "cuMemFree", "waited_for": "relu", "count": 25, "waited_ns": 25 * 150, "blocked_ns": 25 * 156}
    ]
    assert main([str(path), "--csv", str(tmp_path / "csv")]) == 0
    lines = (tmp_path / "csv" / "blocked_calls.csv").read_text().splitlines()
    assert len(lines) == 26
    assert lines[0].startswith("start_ns,duration_ns,waited_ns")


def test_extracted_directory_equals_its_export(tmp_path: Path) -> None:
    path = training(tmp_path / "x.sqlite")
    capture = load(path)
    extracted.write(capture, tmp_path / "a")
    extracted.write(load(path), tmp_path / "b")
    again = load(tmp_path / "a")
    assert attribute(again).rows() == attribute(capture).rows()
    assert [one.path for one in again.ranges] == [one.path for one in capture.ranges]
    assert again.source == capture.source
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    with pytest.raises(AnalysisError, match="already exists"):
        extracted.write(capture, tmp_path / "a")
    # Of an extracted folder no id of a thread or process is left.
    assert {call.thread for call in again.calls} == {0}
    assert {call.process for call in again.calls} == {0}


def test_directory_without_ranges_has_a_note(tmp_path: Path) -> None:
    capture = load(training(tmp_path / "x.sqlite"))
    extracted.write(capture, tmp_path / "a", ranges=False)
    again = load(tmp_path / "a")
    assert any("without NVTX ranges" in note for note in again.notes)
    assert [one.blocked_ns for one in attribute(again).blocked] == [
        one.blocked_ns for one in attribute(capture).blocked
    ]


def test_a_folder_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    extracted.write(load(training(tmp_path / "x.sqlite")), tmp_path / "a")
    calls = tmp_path / "a" / "calls.csv.xz"
    calls.write_bytes(calls.read_bytes()[:200])
    with pytest.raises(AnalysisError, match=r"calls\.csv\.xz"):
        load(tmp_path / "a")


class _Median:
    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, value: float) -> None:
        self.values.append(value)

    def finalize(self) -> float:
        return statistics.median(self.values)


class _StatsReport:
    """The part of Nsight Systems' module that a report uses."""

    _arg_opts: ClassVar[list[Any]] = []

    def __init__(self, path: Path, calls: bool = False) -> None:
        self._dbfile = str(path)
        self._dbcon = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True, isolation_level=None)
        self._dbcon.create_aggregate("median", 1, _Median)  # type: ignore[arg-type]
        self._parsed_args = types.SimpleNamespace(calls=calls)

    def setup(self) -> str | None:
        return None


@pytest.mark.parametrize("calls", [False, True])
def test_the_report_for_nsys_stats(tmp_path: Path, monkeypatch: Any, calls: bool) -> None:
    module = types.ModuleType("nsysstats")
    module.StatsReport = _StatsReport  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nsysstats", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = ROOT / "experiments/nsight/reports/sync_attribution.py"
    space: dict[str, Any] = {"__name__": "report", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), space)
    report = space["SyncAttribution"](training(tmp_path / "x.sqlite"), calls)
    assert report.setup() is None
    rows = report._dbcon.execute(report.query).fetchall()
    if calls:
        assert len(rows) == 25
        assert rows[0][:5] == (50, "cuMemFree", 4096, 150, 156)
    else:
        assert rows == [("cuMemFree", "relu", 25, 3750, 3900, 156.0, 156, "epoch/step/forward/layer 1")]


@pytest.mark.parametrize("name", ["__init__", "names", "capture", "export", "attribution", "allocator"])
def test_report_for_nsys_runs_on_its_python(name: str) -> None:
    """Nsight Systems 2023.4 brings Python 3.8."""
    path = ROOT / "analysis/src/vramlab_analysis/nsight" / f"{name}.py"
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    words = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not words & {"slots", "strict", "kw_only"}
    assert not imported & {"cache", "pairwise", "Self"}
    assert not called & {"removesuffix", "removeprefix", "bit_count"}


def test_the_command_runs_from_the_root(tmp_path: Path) -> None:
    path = training(tmp_path / "x.sqlite")
    command = [sys.executable, "-m", "vramlab_analysis.nsight", str(path), "--top", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "What was waited for" in done.stdout


# Extracted captures and logged calls that lie: tables or one sentence, whatever a field says.


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
def test_other_contents_than_a_table_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    for file in ("calls.csv.xz", "work.csv.xz"):
        kept = (folder / file).read_bytes()
        (folder / file).write_bytes(data)
        assert ends_well(capsys, file, str(folder)) == 2
        (folder / file).write_bytes(kept)


def test_record_next_to_a_capture_with_every_field_mutated(
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
