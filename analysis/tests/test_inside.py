"""Runs of programs under several allocators: which count, what is compared with what, and what is refused."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramlab_analysis import inside
from vramlab_analysis.errors import AnalysisError

Write = Callable[..., Path]


def run(part: str, program: str, arm: str, **facts: Any) -> dict[str, Any]:
    number = facts.get("repeat", 0)
    limit = f" at {facts['over_active']:g}" if "over_active" in facts else ""
    base = {"id": f"{part} {program} {arm}{limit} #{number}", "part": part, "program": program, "arm": arm}
    return base | {"status": "ok", "losses": ["3f800000"]} | facts


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(*records: dict[str, Any]) -> Path:
        path = tmp_path / "2026-11-24-h200-inside.jsonl.xz"
        with lzma.open(path, "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        return path

    return write


def test_of_a_run_made_twice_the_last_counts(written: Write) -> None:
    machine = {"kind": "machine", "gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0"}
    first, second = (run("timed", "gpt2", "native", ms=ms) for ms in (60.0, 58.0))
    broken = run("smoke", "gpt2", "remap", status="failed")
    runs = inside.load(written(machine, first, machine, second, broken))
    assert [one["ms"] for one in runs.of("timed")] == [58.0]
    assert runs.of("smoke") == []
    assert len(runs.runs) == 2
    assert runs.machine() == "NVIDIA H200, driver 580, PyTorch 2.11.0"


def test_a_line_that_is_no_run_is_refused_by_its_number(written: Write) -> None:
    with pytest.raises(AnalysisError, match="line 2: no run of a campaign"):
        inside.load(written(run("timed", "gpt2", "native"), {"program": "gpt2"}))


def test_without_results_there_are_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    assert inside.load().of() == []


def test_each_run_is_compared_with_its_own_round() -> None:
    # The machine becomes half as fast: rounds tell that from the allocator.
    times = [50.0, 60.0, 75.0, 100.0]
    records = [run("timed", "gpt2", "native", repeat=at, ms=ms) for at, ms in enumerate(times)]
    records += [run("timed", "gpt2", "remap", repeat=at, ms=1.02 * ms) for at, ms in enumerate(times)]
    runs = inside.Runs(runs=records)
    assert inside.ratio(runs, "timed", "gpt2", "remap") == pytest.approx((1.02, 1.02, 1.02))
    assert inside.ratio(runs, "timed", "gpt2", "caching") is None


def test_losses_are_compared_only_where_natives_repeat() -> None:
    native = [run("timed", "gpt2", "native", repeat=at) for at in range(2)]
    other = run("timed", "gpt2", "remap", losses=["3f800001"])
    assert (
        inside.same_losses(inside.Runs(runs=[*native, run("timed", "gpt2", "caching")]), "gpt2", "caching")
        == "the same"
    )
    assert inside.same_losses(inside.Runs(runs=[*native, other]), "gpt2", "remap") == "differ"
    unsteady = [*native, run("timed", "gpt2", "native", repeat=2, losses=["40000000"])]
    assert (
        inside.same_losses(inside.Runs(runs=[*unsteady, other]), "gpt2", "remap") == "native's differ from run to run"
    )


def test_the_smallest_limit_has_no_failure_above_it() -> None:
    limits = {1.3: 60.0, 1.1: 61.0, 1.04: None, 1.01: 62.0}
    records = [
        run("curve", "gpt2", "remap", over_active=limit, **({"ms": ms} if ms else {"status": "oom"}))
        for limit, ms in limits.items()
    ]
    runs = inside.Runs(runs=[*records, run("curve", "gpt2", "native", ms=50.0)])
    points = inside.curve(runs, "gpt2", "remap")
    assert [point.ms for point in points] == [62.0, None, 61.0, 60.0]
    assert inside.smallest(points) == 1.1
    assert inside.unlimited(runs, "gpt2") == 50.0
    assert [one.get_title(loc="left") for one in inside.draw_curves(runs, ["gpt2"]).axes] == ["GPT-2 124 M", ""]
    with pytest.raises(AnalysisError, match="no run of native"):
        inside.draw_curves(inside.Runs(runs=records), ["gpt2"])


def test_passes_and_settled_need_what_they_compare() -> None:
    assert inside.passes({"device_ms": [1.0] * 16 + [2.0] * 16}) == (1.0, 2.0)
    assert inside.passes({"device_ms": [1.0] * 20}) is None
    after = {"reserved_bytes.all.peak": 110, "active_bytes.all.peak": 100}
    assert inside.settled({"after_warm_up": after}) == pytest.approx(1.1)
    assert inside.settled({}) is None
