"""The acceptance list: verdicts of runs relative to native, and tables of records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vramlab_analysis import acceptance
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.pages import acceptance_list

MIB = 2**20
NAN, INFINITE = float("nan"), float("inf")


def run(program: str, arm: str, *losses: float | str, repeat: int = 0, peak: int = 100, **more: Any) -> dict[str, Any]:
    ranks = [{"rank": 0, "losses": [*losses], "peak_reserved": peak * MIB}]
    base = {"id": f"{program} {arm} #{repeat}", "program": program, "arm": arm, "repeat": repeat, "gpus": 1}
    return base | {"tolerance": 0.0, "status": "ok", "code": 0, "ranks": ranks} | more


def failed(program: str, arm: str, status: str = "failed", **more: Any) -> dict[str, Any]:
    return run(program, arm) | {"status": status, "code": 1, "ranks": []} | more


def file(path: Path, *lines: dict[str, Any], build: str = "0123456789abcdef") -> Path:
    machine = {"kind": "machine", "gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "build": build}
    machine |= {"at": "2026-11-27T07:00:00Z"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (machine, *lines)))
    return path


def test_losses_are_compared_to_the_bit_and_by_their_size() -> None:
    assert acceptance.relative_difference([1.0, "nan", "inf"], [1.0, "nan", "inf"]) == 0.0
    assert acceptance.relative_difference([1.0], [1.0 + 1e-12]) > 0.0
    assert acceptance.relative_difference([2.0], [1.0]) == 0.5
    for one, other in (([1.0], [1.0, 2.0]), (["nan"], [1.0]), (["inf"], [1.0])):
        assert acceptance.relative_difference(one, other) == INFINITE, (one, other)


def test_a_job_is_compared_rank_by_rank() -> None:
    one, other = run("p", "native", 1.0), run("p", "remap", 1.0)
    other["ranks"].append({"rank": 1, "losses": [3.0]})
    assert acceptance.loss_difference(one, other) == INFINITE, "a rank is missing"
    one["ranks"].append({"rank": 1, "losses": [4.0]})
    assert acceptance.loss_difference(one, other) == 0.25
    assert acceptance.peak_reserved(one) == 100 * MIB, "a rank that does not say counts as nothing"


def test_spread_of_native_is_not_a_difference() -> None:
    natives = [run("p", "native", 1.0), run("p", "native", 1.01, repeat=1)]
    assert acceptance.verdict(run("p", "remap", 1.015), natives) == ""
    assert acceptance.verdict(run("p", "remap", 1.2), natives) == "losses differ by 1.6e-01"
    # The second and the third differ most.
    assert acceptance.spread([run("p", "native", loss) for loss in (3.0, 2.0, 4.0)]) == 0.5
    alike = [run("p", "native", 1.0), run("p", "native", 1.0, repeat=1)]
    assert acceptance.verdict(run("p", "remap", 1.0 + 1e-15), alike).startswith("losses differ by")
    assert acceptance.verdict(run("p", "remap", 1.001, tolerance=0.01), alike) == ""
    assert acceptance.verdict(run("p", "remap", 1.1, tolerance=0.01), alike).startswith("losses differ by")


def test_failure_precedes_the_comparison_of_losses() -> None:
    natives = [run("p", "native", 1.0)]
    assert acceptance.verdict(failed("p", "remap"), natives) == "ended with 1"
    assert acceptance.verdict(failed("p", "remap", status="hung"), natives) == "did not end"
    assert acceptance.verdict(failed("p", "remap", code=0, left_behind=["7: x"]), natives) == "left processes behind"
    assert acceptance.verdict(run("p", "remap+run", 1.0, recorded={"files": 0}), natives) == "was not recorded"
    assert acceptance.verdict(run("p", "remap+run", 1.0, recorded={"files": 2}), natives) == ""
    assert acceptance.verdict(run("p", "remap", 1.0), [failed("p", "native")]) == "native did not run"
    for backend, told in (("native", "ran under native"), ("vramlab:remap", "")):
        under = run("p", "remap", 1.0) | {"ranks": [{"rank": 0, "losses": [1.0], "backend": backend}]}
        assert acceptance.verdict(under, natives) == told
    assert acceptance.verdict(failed("p", "remap", status="skipped"), natives) == ""


def test_of_a_program_the_newest_file_counts_whole(tmp_path: Path) -> None:
    old = file(tmp_path / "1.jsonl", run("p", "native", 1.0), run("p", "remap", 2.0), run("q", "native", 5.0))
    new = file(tmp_path / "2.jsonl", run("p", "native", 7.0), run("p", "caching", 7.0), failed("p", "caching"))
    runs = acceptance.load(old, new)
    assert [one["arm"] for one in runs.of("p")] == ["native", "caching"]
    assert runs.differences("p", "caching") == ["ended with 1"], "the last of two runs of one name"
    assert runs.programs(1) == ["p", "q"]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"a\.jsonl: line 2: not a run of the acceptance list"):
        acceptance.load(file(tmp_path / "a.jsonl", {"id": "x", "status": "ok"}))


Record = Callable[..., None]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Makes some runs the only recorded ones."""

    def only(*lines: dict[str, Any]) -> None:
        path = file(tmp_path / "a.jsonl", *lines)
        monkeypatch.setattr(acceptance, "files", lambda: [path])
        monkeypatch.setattr(acceptance, "_recorded", list)
        acceptance_list._runs.cache_clear()

    yield only
    acceptance_list._runs.cache_clear()


def test_table_and_counts_have_differences_and_peaks(record: Record) -> None:
    record(
        run("p", "native", 1.0),
        run("p", "native", 1.0, repeat=1),
        run("p", "zebra", 1.0, peak=50),
        run("p", "remap", 1.0, peak=125),
        run("p", "remap+run", 1.0, peak=100),
        run("q", "native", 1.0),
        run("q", "remap", 3.0),
        failed("q", "remap+run", status="hung"),
        failed("x", "native", status="skipped", why="needs cupy"),
    )
    assert acceptance_list.one_gpu().splitlines() == [
        "| program of one GPU | `native`, MiB | `remap` | `zebra` | `remap`, recorded |",
        "|---|--:|--:|--:|--:|",
        "| `p` | 100 | 1.25 | 0.50 | 1.00 |",
        "| `q` | 100 | losses differ by 6.7e-01 | – | did not end |",
    ]
    values = acceptance_list.counts()
    assert values["1"] == {"programs": 2, "runs": 5, "recorded": 0, "differences": 2, "bits": 2}
    assert values["machines"] == "NVIDIA H200, driver 580.1, PyTorch 2.11.0"
    assert (values["builds"], values["days"]) == ("01234567", "2026-11-27")
    assert values["skipped"] == "`x` (needs cupy)"
    assert values["repeated"]["runs"] == 0


def test_rare_failures_are_counted(record: Record) -> None:
    lines = [run("p", "native", 1.0), *(run("p", "remap+run", 1.0, repeat=repeat) for repeat in range(9))]
    record(*lines, failed("p", "remap+run", status="hung", id="p remap+run #9", repeat=9))
    assert acceptance_list.counts()["repeated"] == {
        "programs": "`p`", "arms": "`remap`, recorded", "runs": 10, "hung": 1, "failed": 0
    }  # fmt: skip
    assert acceptance_list.one_gpu().splitlines()[-1] == "| `p` | 100 | did not end (1 of 10) |"
