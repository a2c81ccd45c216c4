"""Run records, and what is wrong with those that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.conftest import summary, write_run
from vramlab_analysis.calls import account, host_parts, longest_blocks
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import measures, step_times
from vramlab_analysis.records import load_run


def test_a_record_says_what_was_written(run_folder: Path) -> None:
    run = load_run(run_folder)
    assert (run.allocator, run.arm, run.ended, run.device) == ("naive", "naive", True, "a device")
    assert run.epochs.select("epoch", "steps").rows() == [(1, 2), (2, 2)]
    assert run.steps["index"].to_list() == [0, 1, 2, 3]
    assert run.steps["loss"].to_list() == [1.0, 0.5, pytest.approx(1 / 3), 0.25]
    told = {row["call"]: row["count"] for row in run.driver_calls().iter_rows(named=True)}
    assert told["mem_alloc"] == 23
    assert told["mem_alloc_async"] == 0
    assert run.driver_calls(-1).filter(call="mem_free")["blocked_ns"].item() == 40_000
    assert load_run(run_folder / "summary.json").summary == run.summary


def test_gzipped_files_are_read_too(tmp_path: Path) -> None:
    plain = load_run(write_run(tmp_path / "plain"))
    zipped = load_run(write_run(tmp_path / "zipped", zipped=True))
    assert plain.steps.equals(zipped.steps)
    told = tmp_path / "zipped" / "summary.json"
    (tmp_path / "zipped" / "summary.json.gz").write_bytes(gzip.compress(told.read_bytes()))
    told.unlink()
    assert load_run(tmp_path / "zipped").summary == plain.summary


def test_measures_are_those_of_the_epochs_after_the_first(run_folder: Path) -> None:
    run = load_run(run_folder)
    told = measures(run)
    assert step_times(run).to_list() == [250_000, 250_000][: step_times(run).len()]
    assert told["step_us"] == 250
    assert told["epoch_blocked_us"] == 40
    assert told["epoch_blocked_in"] == "mem_free"
    assert told["epoch_driver_calls"] == 120
    assert told["utilisation"] == 0.75
    assert told["deallocate_p50_ns"] is None


def test_a_record_without_its_table_of_steps_tells_the_rest(tmp_path: Path) -> None:
    document = summary()
    document["settings"]["sync"] = "never"
    document["allocator_stats"]["allocation.all.allocated"] = 62
    for epoch in document["epochs"]:
        epoch["train_s"] = 0.0008
    whole, lean = (load_run(write_run(tmp_path / name, document)) for name in ("whole", "lean"))
    (tmp_path / "lean" / "steps.csv").unlink()
    assert (whole.has_steps, lean.has_steps) == (True, False)
    told = measures(lean)
    assert told == measures(whole)
    assert (told["step_us"], told["steps_done"], told["allocations"]) == (400, 4, 62)
    # Single steps are known only from the table.
    for run in (whole, lean):
        run.settings["sync"] = "step"
    assert measures(whole)["step_p10_us"] == 250
    assert measures(lean)["step_p10_us"] is None


def test_parts_of_the_hosts_time_add_up(run_folder: Path) -> None:
    run = load_run(run_folder)
    parts = host_parts(run.driver_calls(-1), 1.0)
    assert parts["waiting inside alloc and free"] == pytest.approx(0.04)
    assert parts["alloc and free themselves"] == pytest.approx(0.03)
    assert parts["launching kernels"] == pytest.approx(0.2)
    assert sum(parts.values()) == pytest.approx(1.0)
    told = account(run)
    assert told["call"].to_list() == ["kernel_launch", "mem_free", "mem_alloc"]
    assert told["blocked_us"].to_list() == [0, 40, 0]


def test_a_wait_names_the_kernel_that_was_launched_last(run_folder: Path) -> None:
    longest = longest_blocks(load_run(run_folder).calls, 3)
    assert longest["call"].unique().to_list() == ["stream_synchronize"]
    assert longest["waited_for"].unique().to_list() == ["gemm"]


def test_what_a_program_cannot_tell_stays_absent(tmp_path: Path) -> None:
    told = summary("pytorch")
    told["settings"]["mode"] = "graph"
    for key in ("driver_calls", "latency", "fragmentation", "allocator_stats"):
        del told[key]
    for epoch in told["epochs"]:
        del epoch["driver_calls"]
    run = load_run(write_run(tmp_path / "run", told))
    assert run.arm == "pytorch-graph"
    said = measures(run)
    assert said["peak_reserved_bytes"] is None
    assert (said["blocked_us"], said["epoch_blocked_us"]) == (None, None)
    assert run.driver_calls().is_empty()
    with pytest.raises(AnalysisError, match="counts no driver calls"):
        account(run)


def broken(folder: Path, kind: str) -> Path:
    if kind == "absent":
        return folder
    if kind == "empty":
        folder.mkdir()
        return folder
    write_run(folder, trace=True)
    told = folder / "summary.json"
    match kind:
        case "other files":
            told.unlink()
        case "cut off":
            told.write_text(told.read_text()[:100])
        case "version":
            told.write_text(json.dumps(summary(schema_version=2)))
        case "no version":
            told.write_text("[1]")
        case "no settings":
            told.write_text(json.dumps({"schema_version": 1, "status": "finished"}))
        case "experiment":
            told.rename(folder / "experiment.json")
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("absent", "no such directory"),
        ("empty", "an empty directory"),
        ("other files", "no summary.json"),
        ("cut off", "not JSON"),
        ("version", "schema version 2"),
        ("no version", "no schema_version"),
        ("no settings", "settings: is missing, and 2 more"),
        ("experiment", "give one of its runs"),
    ],
)
def test_what_is_no_record_is_refused_in_one_sentence(tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(AnalysisError, match=said) as refused:
        load_run(broken(tmp_path / "run", kind))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_killed_run_says_that_it_was_killed(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", summary(status="running", epochs=0)))
    assert not run.ended
    with pytest.raises(AnalysisError, match="killed, or still runs"):
        _ = run.epochs
    failed = load_run(write_run(tmp_path / "failed", summary(status="failed", error="out of memory", epochs=0)))
    with pytest.raises(AnalysisError, match="it failed: out of memory"):
        _ = failed.epochs


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("steps.csv", None, "no steps.csv"),
        ("steps.csv", "epoch,step,rows,loss,host_ns\n1,1,64,x,5\n", "not the table of steps"),
        ("steps.csv", "epoch,step,rows,loss,host_ns\n", "no step was finished"),
        ("steps.csv", "a,b\n1,2\n", "columns epoch, host_ns, loss, step are missing"),
    ],
)
def test_a_broken_table_of_steps(run_folder: Path, name: str, text: str | None, said: str) -> None:
    (run_folder / name).unlink() if text is None else (run_folder / name).write_text(text)
    with pytest.raises(AnalysisError, match=said):
        _ = load_run(run_folder).steps


def test_a_trace_that_is_missing_or_cut_off(run_folder: Path) -> None:
    path = run_folder / "trace.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-30])
    with pytest.raises(AnalysisError, match=r"trace\.jsonl: a line"):
        _ = load_run(run_folder).trace
    path.write_text('{"start_ns": 1}\n')
    with pytest.raises(AnalysisError, match="line 1 has no time_ns"):
        _ = load_run(run_folder).trace
    path.unlink()
    with pytest.raises(AnalysisError, match="run it again with --trace"):
        _ = load_run(run_folder).trace
