"""Records of the program `command`: unchanged CUDA programs, and checks inside PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import command_experiment, summary, write_run
from vramlab_analysis import pytorch_comparison
from vramlab_analysis.experiments import load_experiment
from vramlab_analysis.measures import Interval
from vramlab_analysis.pages import any_program, inside_pytorch


def times(program: str, us: float, **options: Any) -> dict[str, Any]:
    return {"program": program, **options, "result": {"us": us, "values": {}, "results": {}}}


def turn(program: str, values: dict[str, float]) -> dict[str, Any]:
    return {"program": program, "way": "ordered", "result": {"values": values}}


def test_runs_of_the_spec_become_cells_by_program_and_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = {"own": 32.0, "ratio": 1.01, "low": 1.0, "high": 1.02, "pairs": 15}
    launches = {"default": 3.0, "default-more": 0.1, "non-blocking": 2.0, "non-blocking-more": 0.2}
    results = tmp_path / "results"
    pytorch = (
        times("gpt2", 41.0, **{"own-pool": True, "way": "record"}),
        times("gpt2", 40.0, **{"own-pool": True, "way": "plain"}),
        times("gpt2", 90.0, way="plain"),
    )
    command_experiment(
        results / "2026-11-28-h200" / "any-program",
        times("matrices", 100.0, way="plain"),
        times("matrices", 120.0, way="plain"),
        times("matrices", 110.0, way="plain"),
        times("matrices", 60.0, way="ordered"),
        times("cupy", 30.0, **{"own-pool": True}),
        {"program": "launches", "way": "plain", "result": {"values": launches}},
        {"program": "matrices", "way": "waits", "meta": {"status": "failed", "error": "it broke"}},
    )
    command_experiment(results / "2026-11-28-h200" / "any-program-pytorch", *pytorch, turn("gpt2-in-turn", ratio))
    command_experiment(
        results / "2026-11-28-h200" / "any-program-remainder",
        times("matrices", 50.0, way="ordered"),
        *(turn("cupy-in-turn", ratio | {"ratio": value}) for value in (1.0, 1.3, 1.2)),
    )
    monkeypatch.setenv("RESULTS", str(results))
    cells = any_program.values()
    assert (cells["gpu"], cells["driver"], cells["days"]) == ("NVIDIA H200", "580.1", "2026-11-28")
    assert cells["matrices"] == {
        "plain": {"median": 110.0, "min": 100.0, "max": 120.0, "runs": 3, "low": 100.0, "high": 120.0},
        "ordered": {"median": 60.0, "min": 60.0, "max": 60.0, "runs": 1, "low": 60.0, "high": 60.0},
    }
    assert cells["cupy"]["own-pool"]["median"] == 30.0
    assert any_program.over("gpt2", "record", "own-cache") == Interval(41 / 40, 41 / 40, 41 / 40)
    assert {name: cell["median"] for name, cell in cells["gpt2"].items()} == {
        "record": 41.0, "own-cache": 40.0, "no-cache": 90.0,
    }  # fmt: skip
    assert {name: cells["launches"][f"plain-{name}"]["median"] for name in launches} == launches
    assert cells["in-turn"] == {"gpt2": ratio}
    remainder = cells["remainder"]
    assert remainder["in-turn"]["cupy"] == ratio | {"ratio": 1.2, "pairs": 45}, "medians of the runs, and all pairs"
    assert remainder["matrices"]["ordered"]["median"] == 50.0, "its runs are apart from those of the same program"
    rows = any_program.times().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| raw loop, default stream",
        "| CuPy without its pool",
        "| GPT-2 in PyTorch without its cache",
    ], "programs that were not measured have no row"


def test_programs_with_different_results_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: str, total: float, **options: Any) -> dict[str, Any]:
        return {"program": program, **options, "result": {"values": {}, "results": {"total": total}}}

    runs = [run("two", 1.0, way=way) for way in ("plain", "record", "ordered")]
    runs += [
        run("jax", 2.0, way="plain", of="a"),
        run("jax", 3.0, way="plain", of="b"),
        run("jax", 4.0, way="record", of="b"),
    ]
    monkeypatch.setenv("RESULTS", str(tmp_path))
    command_experiment(tmp_path / "2026-11-28-h200" / "any-program-checks", *runs)
    assert any_program.checks() == {"runs": 5, "programs": 2, "differ": 1}, "one run is compared with nothing"


def test_recorders_are_compared_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: str, recorder: str, *ms: float, **more: Any) -> dict[str, Any]:
        result = {"gpu": "NVIDIA H200", "turn_ms": [*ms], **more}
        return {"program": program, "recorder": recorder, "result": result, "meta": {"program": "inside"}}

    runs = []
    for program in ("gpt2", "resnet50", "events"):
        # The machine becomes half as fast: turns tell that from the recorder.
        runs.append(run(program, "none", 1.0, 1.0, 2.0, 2.0, 2.0))
        runs += [run(program, recorder, 1.5, 1.5, 3.0, 3.0, 3.0) for recorder in list(inside_pytorch.RECORDERS)[1:]]
        runs.append(run(program, "own", 1.0, 1.0, 2.0, 2.5, 2.5, events=10, bytes=2_000_000))
    monkeypatch.setenv("RESULTS", str(tmp_path))
    command_experiment(tmp_path / "2026-11-28-h200" / "inside-recording", *runs)
    first, second, *_ = inside_pytorch.recorders().splitlines()[2:]
    assert first.endswith(" | 1.000 (1.000 to 1.250) |")
    assert second.endswith(" | 1.500 (1.500 to 1.500) |")
    values = inside_pytorch.recording()
    assert values["gpt2.own"] == {"step": 1.0, "turns": 5, "events": 10, "mb": 2.0}
    assert (values["gpu"], values["build"]) == ("NVIDIA H200", "abcdef01")


def test_checks_and_costs_are_read_from_their_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(alloc: str, *lines: tuple[str, str]) -> dict[str, Any]:
        found = [{"torch_test": f"test_cuda.TestCuda.{name}", "outcome": outcome} for name, outcome in lines]
        return {"program": "torch-tests", "of": "a", "alloc": alloc, "result": {"lines": found}}

    def sanitized(program: str, of: str, code: int, **values: Any) -> dict[str, Any]:
        run = {"program": f"sanitized-{program}", "of": of, "result": {"values": values}, "meta": {"exit_code": code}}
        return run | ({"alloc": "remap"} if program.startswith("pytorch") else {})

    label = tmp_path / "results" / "2026-11-28-h200"
    command_experiment(
        label / "torch-tests",
        outcomes("native", ("a", "passed"), ("b", "failed"), ("c", "passed")),
        outcomes("caching", ("a", "passed"), ("b", "failed"), ("c", "timed out")),
    )
    command_experiment(
        label / "sanitizer",
        sanitized("pytorch", "on", 9, errors=1.0),
        sanitized("pytorch-inside", "off", 0, errors=0.0),
        sanitized("overrun", "caching", 9, errors=1.0, invalid="write", block="4,000"),
        sanitized("overrun", "remap", 9, errors=1.0, call="cuMemMap"),
        sanitized("overrun", "bfc", 9, errors=1.0, invalid="write"),
        sanitized("overrun-off", "caching", 0, errors=0.0),
        sanitized("training", "bfc", 0, errors=0.0),
    )
    costs = {"ns": [3000.0, 5000.0, 4000.0], "ns_large": [4500.0], "buffers": True, "all_freed": False}
    lines = [{"program": "rmm", "rmm": "26.08", "cupy": "14", "callback": costs, "caching": costs}]
    command_experiment(label / "rmm-costs", {"program": "rmm-costs", "of": "caching", "result": {"lines": lines}})
    monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
    rows = [line.split(" | ") for line in inside_pytorch.torch_tests().splitlines()[2:]]
    assert [[cell.strip("|` ") for cell in row[1:]] for row in rows] == [
        ["native", "3", "2", "0", "1", "0"],
        ["caching", "3", "1", "0", "1", "1"],
    ]
    rows = [line.strip("| ").split(" | ") for line in inside_pytorch.sanitizer().splitlines()[2:]]
    assert rows == [
        ["PyTorch", "`remap`", "yes", "yes", "another error"],
        ["PyTorch", "`remap`", "no", "no", "no error"],
        ["example `overrun`", "`caching`", "yes", "yes", "the write, with the bounds of the block"],
        ["example `overrun`", "`remap`", "yes", "yes", "an error of `cuMemMap`"],
        ["example `overrun`", "`bfc`", "yes", "yes", "the write"],
        ["example `overrun`", "`caching`", "no", "yes", "no error"],
        ["a short training", "`bfc`", "yes", "no", "no error"],
    ]
    rows = [line.strip("| ").split(" | ") for line in inside_pytorch.rmm().splitlines()[2:]]
    assert rows[1] == ["`caching`", "4.0", "4.5", "yes", "not tested", "no"]
    facts = {key: value for key, value in inside_pytorch.rmm_machine().items() if key != "build"}
    assert facts == {
        "rmm": "26.08", "cupy": "14", "gpu": "NVIDIA H200", "day": "2026-11-28", "rounds": 3,
    }  # fmt: skip


def test_steps_beside_pytorch_are_compared_by_their_medians(tmp_path: Path) -> None:
    def run(arm: str, us: float, **more: Any) -> dict[str, Any]:
        return {"hidden": 128, "dtype": "f16", "us": us, "meta": {"arm": arm, "program": "trainer"} | more}

    runs = [run("ours-half", us, repeat=repeat) for repeat, us in enumerate((4.0, 5.0, 6.0))]
    runs += [run("ours-streams-half", 3.0), run("captured-half", 6.0)]
    runs += [run("compiled-half", us, repeat=repeat) for repeat, us in ((1, 10.0), (2, 8.0))]
    runs += [run("autotune-half", 0.0, status="failed", error="it does not compile")]
    folder = command_experiment(tmp_path / "training-beside", *({**one} for one in runs))
    for number, one in enumerate(runs):
        record = summary("caching")
        record["epochs"][-1] |= {"train_device_s": one["us"] * 300 / 1e6, "steps": 300}
        made = write_run(tmp_path / f"{number}", record)
        shutil.copytree(made, folder / "runs" / f"{number:02}", dirs_exist_ok=True)
    machine, cells = pytorch_comparison.of_experiment(load_experiment(folder))
    cell = cells[128, "f16"]
    assert {arm: round(one["median"], 6) for arm, one in cell["arms"].items()} == {
        "ours": 5.0, "ours-streams": 3.0, "captured": 6.0, "compiled": 9.0,
    }  # fmt: skip
    assert (cell["arms"]["ours"]["low"], cell["arms"]["ours"]["high"]) == (4.5, 5.5)
    assert (cell["ratio"], cell["failed"]) == (0.5, {"autotune": "it does not compile"})
    assert (machine["gpu"], cell["rounds"]) == ("NVIDIA H200", 1)
    # The first run has no counterpart.
    found = pytorch_comparison.over(cell, "ours", "compiled")
    assert (found.value, found.low, found.high) == pytest.approx((5.5 / 9, 0.5, 0.75))
