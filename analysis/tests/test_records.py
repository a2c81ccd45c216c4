"""Run records, and errors of unreadable ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import summary, write_experiment, write_run
from vramlab_analysis import losses, steps
from vramlab_analysis.calls import account, host_parts, with_waited_for
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import measures, step_times
from vramlab_analysis.records import load_run


def test_record_has_the_written_values(run_folder: Path) -> None:
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


def test_record_without_steps_has_its_other_values(tmp_path: Path) -> None:
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
    longest = with_waited_for(load_run(run_folder).calls).top_k(3, by="blocked_ns")
    assert longest["call"].unique().to_list() == ["stream_synchronize"]
    assert longest["waited_for"].unique().to_list() == ["gemm"]


def test_unknown_values_remain_absent(tmp_path: Path) -> None:
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
    with pytest.raises(AnalysisError, match="no counts of driver calls"):
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
def test_other_directory_than_a_record_is_refused_in_one_sentence(tmp_path: Path, kind: str, said: str) -> None:
    with pytest.raises(AnalysisError, match=said) as refused:
        load_run(broken(tmp_path / "run", kind))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_error_of_a_killed_run_names_the_reason(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", summary(status="running", epochs=0)))
    assert not run.ended
    with pytest.raises(AnalysisError, match="killed, or is still running"):
        _ = run.epochs
    failed = load_run(write_run(tmp_path / "failed", summary(status="failed", error="out of memory", epochs=0)))
    with pytest.raises(AnalysisError, match="it failed: out of memory"):
        _ = failed.epochs


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("steps.csv", None, "no steps.csv"),
        ("steps.csv", "epoch,step,rows,loss,host_ns\n1,1,64,x,5\n", "not the table of steps"),
        ("steps.csv", "epoch,step,rows,loss,host_ns\n", "no step was completed"),
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


# The table of step times: medians, the ratio to PyTorch's best, and what tells rows apart.


def timed(micros: float, program: str = "trainer", **settings: Any) -> dict[str, Any]:
    """A record whose first epoch is slow and whose second has steps of so many microseconds."""
    document = summary("pytorch" if program == "pytorch" else "caching", program=program)
    document["settings"] |= settings
    for epoch, one in zip(document["epochs"], (1000.0, micros), strict=True):
        epoch["train_s"] = 2 * one / 1e6
    return document


HALF = {"dtype": "bf16", "weights": "half", "accumulate": "f32"}
DOCUMENTS = [
    timed(30.0, hidden=128, launch="graph", dtype="f32", gemm="tiled", **{"weights": "master"}),
    timed(50.0, hidden=128, launch="eager", dtype="f32", gemm="tiled", **{"weights": "master"}),
    timed(20.0, hidden=128, launch="graph", gemm="tensor", **HALF),
    timed(90.0, "pytorch", hidden=128, mode="graph", launch="graph", fused_sgd=True),
    timed(60.0, "pytorch", hidden=128, mode="compile", launch="compile", compile_mode="max-autotune"),
    timed(80.0, "pytorch", hidden=128, mode="graph", launch="graph", **{**HALF, "weights": "master"}),
    timed(700.0, "pytorch", hidden=64, mode="eager"),
]


def table(tmp_path: Path, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    runs = [load_run(write_run(tmp_path / str(number), document)) for number, document in enumerate(documents)]
    return steps.frame(runs).to_dicts()


def test_graphs_of_several_steps_are_distinguished_from_single_steps(tmp_path: Path) -> None:
    def graph(micros: float, **more: Any) -> dict[str, Any]:
        return timed(micros, hidden=128, launch="graph", dtype="f32", **more)

    eager = timed(50.0, hidden=128, launch="eager", dtype="f32", graph_steps=None)
    rows = table(tmp_path, [graph(30.0), graph(31.0, graph_steps=1), graph(28.0, graph_steps=8), eager])
    told = [(row["launch"], row["how"], row["step_us"]) for row in rows]
    # Records of before there was the setting have one step in a graph.
    assert told == [
        ("graph", "graph steps 8", 28.0),
        ("graph", "graph steps 1", 30.5),
        ("eager", "", 50.0),
    ]


def test_the_ratio_is_to_the_fastest_mode_of_pytorch_at_the_same_work(tmp_path: Path) -> None:
    rows = table(tmp_path, DOCUMENTS)
    told = [(row["hidden"], row["dtype"], row["program"], row["launch"], row["step_us"], row["ratio"]) for row in rows]
    assert told == [
        (64, "f32", "pytorch", "eager", 700.0, 1.0),
        (128, "f32", "trainer", "graph", 30.0, 0.5),
        (128, "f32", "trainer", "eager", 50.0, pytest.approx(5 / 6)),
        (128, "f32", "pytorch", "compile", 60.0, 1.0),
        (128, "f32", "pytorch", "graph", 90.0, 1.5),
        # PyTorch's bf16 has other weights, so there is nothing to compare with.
        (128, "bf16", "trainer", "graph", 20.0, None),
        (128, "bf16", "pytorch", "graph", 80.0, 1.0),
    ]
    assert {row["best_mode"] for row in rows if row["hidden"] == 128 and row["dtype"] == "f32"} == {"compile"}
    assert [row["how"] for row in rows[3:5]] == ["max-autotune, fused sgd off", "fused sgd on"]
    assert rows[1]["how"] == "", "the product of a type is no difference between runs of it"


def test_repeats_are_one_row_with_their_median(tmp_path: Path) -> None:
    (row,) = table(tmp_path, [timed(us, hidden=128) for us in (40.0, 10.0, 20.0)])
    assert (row["step_us"], row["low_us"], row["high_us"], row["repeats"]) == (20.0, 10.0, 40.0, 3)
    rows = table(tmp_path / "other", [timed(40.0, loss_scale=1.0), timed(10.0, loss_scale=1024.0)])
    assert [row["how"] for row in rows] == ["loss scale 1024.0", "loss scale 1.0"]


def test_experiments_and_records_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = [("trainer", {"hidden": 128}, DOCUMENTS[0]), ("pytorch", {"hidden": 128}, DOCUMENTS[3])]
    experiment = write_experiment(tmp_path / "e", arms, runs=["00-trainer-r0", "01-pytorch-r0", "02-lost-r0"])
    other = write_run(tmp_path / "compiled", DOCUMENTS[4])
    text = steps.show([str(experiment), str(other)], as_json=False)
    assert capsys.readouterr().err == f"note: {experiment} lacks 1 runs, such as 02-lost-r0\n"
    lines = text.splitlines()
    assert lines[0] == "a device: digits, 4 layers, batch 64, resident batches"
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == [
        "128", "f32", "trainer", "graph", "30.0", "–", "0.50 (compile)",
    ]  # fmt: skip
    assert len({len(line) for line in lines[2:]}) == 1
    rows = json.loads(steps.show([str(experiment), str(other)], as_json=True))
    assert [row["step_us"] for row in rows] == [30.0, 60.0, 90.0]
    with pytest.raises(AnalysisError, match="no such directory"):
        steps.show([str(tmp_path / "none")], as_json=False)


# The table of losses: against f32 of the same program, and the other program in the same type.


def run(folder: Path, more: float, program: str = "trainer", *, begun: bool = True, **settings: Any) -> Path:
    """A record of four steps with losses of 1 over the step's number, each times `1 + more`."""
    document = summary("pytorch" if program == "pytorch" else "caching", program=program)
    document["settings"] |= settings
    if program == "pytorch" and begun:
        document["start"] = {"path": "start.safetensors", "sha256": "ab"}
    return write_run(folder, document, losses=more)


def test_shares_are_of_the_last_losses(tmp_path: Path) -> None:
    half: dict[str, Any] = {"dtype": "bf16", "weights": "half", "accumulate": "f32"}
    paths = [
        run(tmp_path / "a", 0.0, dtype="f32", weights="master", accumulate="f32", loss_scale=1.0),
        run(tmp_path / "b", 0.10, loss_scale=1.0, **half),
        run(tmp_path / "c", 0.0, "pytorch"),
        run(tmp_path / "d", 0.32, "pytorch", loss_scale=1.0, **half),
        # Another scale and another rate: nothing to compare with.
        run(tmp_path / "e", 0.5, "pytorch", loss_scale=8.0, **half),
        run(tmp_path / "f", 0.5, lr=0.2),
    ]
    rows = losses.frame([load_run(path) for path in paths]).to_dicts()
    told = [
        (row["dtype"], row["program"], row["loss_scale"], row["to_f32"], row["to_other"], row["early"]) for row in rows
    ]
    near = pytest.approx
    assert told == [
        ("f32", "pytorch", 1.0, 0.0, 0.0, 0.0),
        ("f32", "trainer", 1.0, 0.0, 0.0, 0.0),
        ("bf16", "pytorch", 1.0, near(0.32), near(0.2), near(0.2)),
        ("bf16", "trainer", 1.0, near(0.1), near(1.1 / 1.32 - 1), near(1 - 1.1 / 1.32)),
        ("bf16", "pytorch", 8.0, near(0.5), None, None),
        ("f32", "trainer", 1.0, 0.0, None, None),
    ]
    assert [row["last"] for row in rows[:3]] == [0.25, 0.25, near(0.33)]
    text = losses.show([str(path) for path in paths], as_json=False).splitlines()
    assert text[0] == "digits, 4 layers of 64, batch 64, rate 0.1, seed 42, kaiming"
    assert [cell.strip() for cell in text[6].split("|")[1:-1]] == [
        "bf16, half weights", "1", "pytorch", "a device", "4", "0.3300", "+32.00 %", "+20.00 %", "2.0e-01",
    ]  # fmt: skip
    own = [run(tmp_path / "g", 0.0), run(tmp_path / "h", 0.5, "pytorch", begun=False)]
    assert {row["to_other"] for row in losses.frame([load_run(path) for path in own]).to_dicts()} == {None}
    assert json.loads(losses.show([str(paths[0])], as_json=True))[0]["to_other"] is None


def test_the_loss_of_a_run_that_diverged_is_null_in_json(tmp_path: Path) -> None:
    paths = [run(tmp_path / "a", float("nan")), run(tmp_path / "b", 0.0, lr=0.2)]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    rows = json.loads(losses.show([str(path) for path in paths], as_json=True), parse_constant=refuse)
    assert [(row["last"], row["to_f32"]) for row in rows] == [(None, None), (0.25, 0.0)]
    diverged = losses.show([str(paths[0])], as_json=False).splitlines()[-1]
    assert [cell.strip() for cell in diverged.split("|")[6:-1]] == ["nan", "–", "–", "–"]
