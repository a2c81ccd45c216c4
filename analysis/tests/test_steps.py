"""The table of step times: medians, the ratio to PyTorch's best, and what tells rows apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import summary, write_experiment, write_run
from vramlab_analysis import losses, steps
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.records import load_run


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


def test_graphs_of_several_steps_are_told_from_those_of_one(tmp_path: Path) -> None:
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
    assert capsys.readouterr().err == f"note: {experiment} lacks 1 runs, as 02-lost-r0\n"
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
