"""The acceptance list: verdicts of runs relative to native, and tables of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import command_experiment
from vramlab_analysis import acceptance
from vramlab_analysis.experiments import load_experiment
from vramlab_analysis.pages import acceptance_list

MIB = 2**20
INFINITE = float("inf")
# Makes a directory of runs the only records.
Record = Callable[..., acceptance.Runs]


def line(*losses: float | str, rank: int = 0, peak: int = 100, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "losses": [*losses], "peak_reserved": peak * MIB, "torch": "2.11.0", **more}


def run(of: str, alloc: str, *lines: dict[str, Any], repeat: int = 0, **more: Any) -> dict[str, Any]:
    """A run that printed these lines."""
    result = {"lines": [*lines], "tolerance": 0.0} | more.pop("result", {})
    return {"program": "acceptance", "of": of, "alloc": alloc, "result": result, "meta": {"repeat": repeat}, **more}


def failed(of: str, alloc: str, error: str = "no luck", code: int | None = 1, **more: Any) -> dict[str, Any]:
    meta = {"status": "failed", "error": error, "exit_code": code}
    return {"program": "acceptance", "of": of, "alloc": alloc, "meta": meta, **more}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    monkeypatch.setenv("RESULTS", str(tmp_path))

    def only(*runs: dict[str, Any], spec: str = "acceptance") -> acceptance.Runs:
        folder = command_experiment(tmp_path / "2026-11-28-h200" / spec, *runs)
        acceptance_list._runs.cache_clear()
        return acceptance.Runs(acceptance.of_experiment(load_experiment(folder)))

    yield only
    acceptance_list._runs.cache_clear()


def test_losses_are_compared_to_the_bit_and_by_their_size() -> None:
    assert acceptance.relative_difference([1.0, "nan", "inf"], [1.0, "nan", "inf"]) == 0.0
    assert acceptance.relative_difference([1.0], [1.0 + 1e-12]) > 0.0
    assert acceptance.relative_difference([2.0], [1.0]) == 0.5
    for one, other in (([1.0], [1.0, 2.0]), (["nan"], [1.0]), (["inf"], [1.0])):
        assert acceptance.relative_difference(one, other) == INFINITE, (one, other)


def test_a_job_is_compared_rank_by_rank(record: Record) -> None:
    quiet = line(4.0, rank=1)
    del quiet["peak_reserved"]
    runs = record(
        run("p", "native", line(1.0), quiet),
        run("p", "remap", line(1.0)),
        run("p", "caching", line(1.0), line(3.0, rank=1)),
    )
    base, missing, other = runs.runs
    assert acceptance.loss_difference(missing, base) == INFINITE, "a rank is missing"
    assert acceptance.loss_difference(other, base) == 0.25
    assert base.peak_reserved == 100 * MIB, "a rank that does not say counts as nothing"
    assert other.peak_reserved == 200 * MIB


def test_losses_are_equal_in_all_bits_or_within_the_tolerance(record: Record) -> None:
    loose = {"tolerance": 0.01}
    runs = record(
        run("p", "native", line(1.0)),
        run("p", "native", line(1.5), repeat=1),
        run("p", "caching", line(1.5)),
        run("p", "remap", line(1.0 + 1e-15)),
        run("p", "bfc", line(1.001), result=loose),
        run("p", "tlsf", line(1.25), result=loose),
    )
    assert runs.differences("p", "caching") == [], "equal to one run of native"
    assert runs.differences("p", "bfc") == []
    for arm in ("remap", "tlsf"):
        (found,) = runs.differences("p", arm)
        assert found.startswith("losses differ by"), arm


def test_failure_precedes_the_comparison_of_losses(record: Record) -> None:
    runs = record(
        run("p", "native", line(1.0)),
        failed("p", "bfc", "it was ended after 200 s, its timeout_s", None),
        failed("p", "tlsf", "it left a process behind: sleep 600", 0),
        failed("p", "rmm-pool", code=7),
        run("p", "native", line(1.0), way="record", result={"recorded_files": 0}),
        run("p", "remap", line(1.0), way="record", result={"recorded_files": 2}),
        run("p", "remap", line(1.0, backend="vramlab:remap")),
        run("p", "caching", line(1.0, backend="native")),
        run("p", "expandable", line(1.0, backend="native")),
        run("q", "remap", line(1.0)),
        failed("r", "native"),
        run("p", "naive", meta={"status": "skipped", "exit_code": None}),
    )
    verdicts = {arm: runs.differences("p", arm) for arm in runs.arms(1)}
    assert verdicts == {
        "native": [],
        "bfc": ["did not end"],
        "tlsf": ["left processes behind"],
        "rmm-pool": ["ended with 7"],
        "native+run": ["was not recorded"],
        "remap+run": [],
        "remap": [],
        "caching": ["ran under native"],
        "expandable": [],
    }
    assert runs.differences("q", "remap") == ["native did not run"]
    assert runs.differences("r", "native") == ["ended with 1"]


def test_tables_and_counts_have_differences_and_peaks(record: Record) -> None:
    record(
        run("p", "native", line(1.0)),
        run("p", "native", line(1.0, peak=104), repeat=1),
        run("p", "zebra", line(1.0, peak=51, backend="vramlab:zebra")),
        run("p", "remap", line(1.0, peak=153)),
        failed("p", "remap", repeat=1),
        run("p", "remap", line(1.0, peak=102), way="record"),
        run("q", "native", line(1.0)),
        run("q", "remap", line(4.0)),
        failed("q", "remap", "it was ended after 9 s", None, way="record"),
        run("x", "native", result={"skipped": "needs cupy"}),
    )
    assert acceptance_list.one_gpu().splitlines() == [
        "| program of one GPU | `native`, MiB | `remap` | `zebra` | `remap`, recorded |",
        "|---|--:|--:|--:|--:|",
        "| `p` | 102 (100 to 104) | ended with 1 (1 of 2) | 0.50 | 1.00 |",
        "| `q` | 100 | losses differ by 7.5e-01 | – | did not end |",
    ]
    values = acceptance_list.counts()
    assert values["1"] == {"programs": 2, "runs": 6, "recorded": 0, "differences": 3, "equal": 1}
    assert values["machines"] == "NVIDIA H200, driver 580.1, PyTorch 2.11.0"
    assert (values["builds"], values["days"]) == ("abcdef01", "2026-11-28")
    assert (values["unequal"], values["natively"], values["skipped"]) == ("`q`", 0, "`x` (needs cupy)")
    assert values["repeated"] == {"programs": "none", "arms": "none", "runs": 0, "other": 0}


def test_repeated_runs_are_compared_with_the_first_of_their_program(record: Record) -> None:
    def job(of: str, alloc: str, loss: float, repeat: int) -> dict[str, Any]:
        return run(of, alloc, line(loss), repeat=repeat) | {"program": "acceptance-job"}

    record(job("a", "native", 1.0, 0), spec="acceptance-2")
    repeats = [job(of, "native", loss, 0) for of, loss in (("a", 1.0), ("b", 2.0))]
    repeats += [job("a", "remap", 1.0, 0), job("b", "remap", 2.5, 0), job("b", "remap", 2.0, 1)]
    record(*repeats, spec="acceptance-repeats")
    assert acceptance_list.counts()["repeated"] == {
        "programs": "`a` and `b`", "arms": "`native` and `remap`", "runs": 5, "other": 1
    }  # fmt: skip
    assert acceptance_list.counts()["2"]["runs"] == 0, "repeats are not runs of the list"
