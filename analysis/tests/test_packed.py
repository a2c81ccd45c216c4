"""Packed experiments are read as the folders that they were made of, and damaged ones are refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unpacked, write_experiment, write_run
from tests.hostile import mutations
from vramlab_analysis import losses, packed, records, repository, steps
from vramlab_analysis.errors import AnalysisError, printable
from vramlab_analysis.experiments import load_experiment
from vramlab_analysis.measures import measures

RECORDED = repository.root() / "experiments/results"
SIM = RECORDED / "2026-11-21-sim"


def resealed(folder: Path, name: str, data: bytes) -> None:
    """Changes a table, and the manifest so that it is the one that was packed."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / packed.MANIFEST).read_text())
    for table in manifest["tables"]:
        if table["name"] == name:
            table["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / packed.MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SIM / "where-time-goes", tmp_path / "packed"))


def as_recorded(tmp_path: Path, spec: Path) -> Path:
    """The folder of a packed experiment before it was packed."""
    tables = packed.load(spec)
    document = {**tables.manifest["experiment"], "runs": [{"id": run} for run in tables.rows]}
    place = write_experiment(tmp_path / "plain", [], **document)
    for run in tables.recorded():
        one = unpacked(spec / "runs" / run, place / "runs" / run)
        (one / "run.json").write_text(json.dumps(tables.document(run, "run")))
    return place


@pytest.mark.parametrize("spec", ["where-time-goes", "memory", "fidelity", "latency"])
def test_both_forms_say_the_same(tmp_path: Path, spec: str) -> None:
    one, other = load_experiment(SIM / spec), load_experiment(as_recorded(tmp_path, SIM / spec))
    assert (one.question, one.missing()) == (other.question, [])
    left = packed.load(SIM / spec).manifest["left_out"]
    for entry, plain in zip(one.runs, other.runs, strict=True):
        assert entry.meta == plain.meta
        assert entry.record.summary == plain.record.summary
        assert entry.record.has("trace.jsonl") == plain.record.has("trace.jsonl")
        if not any(part.startswith("steps.csv") for part in left):
            assert entry.record.steps.equals(plain.record.steps)
            assert measures(entry.record) == measures(plain.record)
    if spec == "memory":
        assert one.runs[0].record.trace.equals(other.runs[0].record.trace)
        assert one.runs[0].record.calls.equals(other.runs[0].record.calls)
    if spec == "latency":
        histograms = [[(h.path, h.counts.tolist()) for h in e.runs[0].record.histograms] for e in (one, other)]
        assert histograms[0] == histograms[1]


def test_a_run_keeps_its_name_and_commands_take_it() -> None:
    run = records.load_run(SIM / "loss-against-pytorch/runs/00-trainer-128-0.003-r0")
    assert run.ended
    assert run.steps.height > 100
    assert len(steps.gather([str(SIM / "width")])) == 15
    assert "pytorch" in losses.show([str(SIM / "loss-against-pytorch")], as_json=False)
    with pytest.raises(AnalysisError, match="no run record of that name"):
        records.load_run(SIM / "width/runs/none")
    with pytest.raises(AnalysisError, match="an experiment, no run"):
        records.load_run(SIM / "width")


def test_what_was_left_out_is_said() -> None:
    run = load_experiment(SIM / "width").runs[0].record
    with pytest.raises(AnalysisError, match=r"no steps\.csv .*left out when the experiment was packed"):
        _ = run.steps
    lean = load_experiment(SIM / "fidelity").runs[0].record
    assert {"host_ns", "loss"}.isdisjoint(lean.steps.columns)
    with pytest.raises(AnalysisError, match="losses of the steps were left out"):
        losses.frame([lean])


def test_results_of_replays_are_there() -> None:
    frame = load_experiment(SIM / "capacity").replays()
    assert frame["capacity_bytes"].min() > 0  # type: ignore[operator]


def test_a_table_of_runs_may_be_plain(folder: Path) -> None:
    before = packed.load(folder)
    plain = lzma.decompress((folder / packed.TABLE).read_bytes())
    (folder / packed.TABLE).unlink()
    manifest = json.loads((folder / packed.MANIFEST).read_text())
    next(table for table in manifest["tables"] if table["name"] == packed.TABLE)["name"] = packed.PLAIN_TABLE
    (folder / packed.MANIFEST).write_text(json.dumps(manifest))
    resealed(folder, packed.PLAIN_TABLE, plain)
    assert packed.load(folder).rows == before.rows


def test_a_table_that_was_changed_is_refused(folder: Path) -> None:
    for name in (packed.TABLE, packed.SERIES):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1])
        with pytest.raises(AnalysisError, match=f"{name}: not the file that was packed"):
            packed.load(folder)
        (folder / name).write_bytes(whole)
    (folder / packed.SERIES).unlink()
    with pytest.raises(AnalysisError, match="cannot be read"):
        packed.load(folder)


def _read(folder: Path) -> None:
    for run in steps.gather([str(folder)]):
        _ = (run.steps, run.calls)


def test_hostile_tables_are_refused_in_one_line(folder: Path) -> None:
    series = lzma.decompress((folder / packed.SERIES).read_bytes())
    table = lzma.decompress((folder / packed.TABLE).read_bytes())
    rows = (table + b"a,b\n", b'id\n"\n', table.replace(b"naive", b"[naive"), b"id\n\xff\n")
    tables: list[tuple[str, bytes]] = [
        (packed.SERIES, lzma.compress(data))
        for data in (
            b"{}\n",
            b"no line\n",
            series[: len(series) // 2],
            series.replace(b'"columns":{', b'"columns":[{', 1),
            series.replace(b'"columns":', b'"column":'),
            series.replace(b'"differences":["', b'"differences":["x'),
            series.replace(b'"epoch":[1,', b'"epoch":[', 1),
        )
    ]
    tables += [(packed.TABLE, lzma.compress(data)) for data in rows]
    tables += [(packed.SERIES, b"no xz"), (packed.TABLE, b"no xz")]
    for name, data in tables:
        whole = (folder / name).read_bytes()
        resealed(folder, name, data)
        with pytest.raises(AnalysisError) as caught:
            _read(folder)
        assert str(caught.value) == printable(str(caught.value))
        resealed(folder, name, whole)
    _read(folder)


def test_every_field_of_a_manifest_mutated(folder: Path) -> None:
    path = folder / packed.MANIFEST
    whole: dict[str, Any] = json.loads(path.read_text())
    # What is read, and of what all runs share some.
    whole["experiment"] = {"schema_version": 1, "name": "a", "question": "Why?", "spec_sha256": "aa"}
    shared = whole["same_in_all"]
    shared["summary"] = {key: shared["summary"][key] for key in ("schema_version", "settings", "device", "status")}
    shared["summary"]["settings"] = dict(list(shared["summary"]["settings"].items())[:6])
    refused = 0
    for name, text in mutations(whole):
        path.write_text(text)
        try:
            steps.gather([str(folder)])
        except AnalysisError as error:
            assert str(error) == printable(str(error))
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
    assert refused


def test_a_run_record_beside_a_packed_one_is_read(tmp_path: Path) -> None:
    run = records.load_run(write_run(tmp_path / "runs" / "mine"))
    assert run.packed is None
    assert run.steps.height == 4
