"""Experiments: shards, what is missing, and directories that hold none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import summary, write_experiment
from vramlab_analysis import experiments
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import load_experiment
from vramlab_analysis.plots.cells import matrix

ARMS = [(name, {"alloc": name, "release-threshold": "0"}, summary(name)) for name in ("naive", "caching")]


def test_a_frame_has_options_and_measures(tmp_path: Path) -> None:
    experiment = load_experiment(write_experiment(tmp_path / "e", ARMS))
    frame = experiment.frame()
    assert frame.select("name", "alloc", "release_threshold", "step_us").rows() == [
        ("naive", "naive", "0", 250.0),
        ("caching", "caching", "0", 250.0),
    ]
    assert [one.arm for one in experiment.select(alloc="caching", release_threshold=0)] == ["caching"]
    with pytest.raises(AnalysisError, match="no finished run with alloc arena"):
        experiment.select(alloc="arena")
    assert experiment.question == "Why?"


def test_shards_are_put_together(tmp_path: Path) -> None:
    whole = write_experiment(tmp_path / "whole", ARMS, runs=["00-naive-r0", "01-caching-r0", "02-lost-r0"])
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(whole, one)
    shutil.copytree(whole, two)
    shutil.rmtree(one / "runs" / "01-caching-r0")
    shutil.rmtree(two / "runs" / "00-naive-r0")
    assert load_experiment(one, two).frame().equals(load_experiment(whole).frame())
    assert load_experiment(one).missing() == ["01-caching-r0", "02-lost-r0"]
    assert load_experiment(one, two).missing() == ["02-lost-r0"]


def test_a_failed_run_does_not_count(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "e", ARMS)
    meta = folder / "runs" / "00-naive-r0" / "run.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "status": "failed", "error": "no memory"}))
    assert load_experiment(folder).frame()["name"].to_list() == ["caching"]


def test_replays_are_a_frame_and_a_matrix(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "e", [])
    for number, (alloc, history) in enumerate([("caching", "a.pickle.xz"), ("bfc", "a.pickle.xz"), ("bfc", "b.jsonl")]):
        for repeat, reserved in enumerate((12, 14, 16)):
            one = folder / "runs" / f"{number:02}-r{repeat}"
            one.mkdir(parents=True)
            meta = {"schema_version": 1, "id": one.name, "arm": "replay", "program": "replay", "repeat": repeat,
                    "options": {"alloc": alloc, "history": history}, "status": "done"}  # fmt: skip
            (one / "run.json").write_text(json.dumps(meta))
            result = {"peak_reserved_bytes": reserved * (number + 1), "lower_bound_bytes": 10}
            (one / "result.json").write_text(json.dumps([result]))
    experiment = load_experiment(folder)
    ratios = experiment.ratios()
    assert ratios.rows() == [("caching", "a", 1.4), ("bfc", "a", 2.8), ("bfc", "b.jsonl", pytest.approx(4.2))]
    figure = matrix(ratios, row="alloc", column="history", value="over", number=str, best=1.0, worst=1.6)
    assert "none" in [text.get_text() for text in figure.axes[0].texts], "no history under every allocator"
    with pytest.raises(AnalysisError, match="no run of a trainer in it; `replays` has"):
        experiment.frame()


def test_other_directories_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match="no such directory"):
        load_experiment(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AnalysisError, match="an empty directory"):
        load_experiment(tmp_path / "empty")
    with pytest.raises(AnalysisError, match="no run is finished yet"):
        load_experiment(write_experiment(tmp_path / "begun", []))
    with pytest.raises(AnalysisError, match="schema version 7"):
        load_experiment(write_experiment(tmp_path / "later", ARMS, schema_version=7))
    one, other = write_experiment(tmp_path / "a", ARMS), write_experiment(tmp_path / "b", ARMS, spec_sha256="bb")
    with pytest.raises(AnalysisError, match="of different specs"):
        load_experiment(one, other)


def test_results_are_the_latest_and_say_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    write_experiment(tmp_path / "2026-01-01-sim" / "an-experiment", ARMS[:1])
    write_experiment(tmp_path / "2026-01-02-sim" / "an-experiment", ARMS[1:])
    write_experiment(tmp_path / "2026-01-03-h200" / "an-experiment", ARMS[:1])
    assert experiments.results("an-experiment", "sim").frame()["name"].to_list() == ["caching"]
    with pytest.raises(AnalysisError, match="experiments run other --device cuda"):
        experiments.results("other", "h200")
