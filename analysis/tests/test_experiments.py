"""Experiments: shards, missing runs, and other directories."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import summary, write_experiment
from vramlab_analysis import experiments, inside, losses, records, repository, steps
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
    with pytest.raises(AnalysisError, match="no run of a trainer; `replays` has"):
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
    with pytest.raises(AnalysisError, match="different specs"):
        load_experiment(one, other)
    other = write_experiment(tmp_path / "c", ARMS, profile_sha256="cc")
    with pytest.raises(AnalysisError, match="different profiles of the simulated device"):
        load_experiment(one, other)


def test_results_are_the_latest_or_an_error_with_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    write_experiment(tmp_path / "2026-01-01-sim" / "an-experiment", ARMS[:1])
    write_experiment(tmp_path / "2026-01-02-sim" / "an-experiment", ARMS[1:])
    write_experiment(tmp_path / "2026-01-03-h200" / "an-experiment", ARMS[:1])
    write_experiment(tmp_path / "2026-01-04-h100-resim" / "an-experiment", ARMS[:1])
    assert experiments.results("an-experiment", "sim").frame()["name"].to_list() == ["caching"]
    # What is simulated is never of a GPU, whatever its label names.
    assert experiments.results("an-experiment", "gpu").directories == [tmp_path / "2026-01-03-h200/an-experiment"]
    assert experiments.results("an-experiment", "resim").directories[0].parent.name == "2026-01-04-h100-resim"
    (tmp_path / "2026-01-01-sim" / "table.json.xz").write_text("")
    assert experiments.newest("table.json", device="sim").name == "table.json.xz"
    with pytest.raises(AnalysisError, match=r"no table\.json in the results of gpu"):
        experiments.newest("table.json")
    with pytest.raises(AnalysisError, match=f"experiments run other --device cuda -o {tmp_path}/DATE-gpu"):
        experiments.results("other", "gpu")
    with pytest.raises(AnalysisError, match=r"on cuda, only on gpu, resim, sim \(DEVICES=gpu,resim,sim\)"):
        experiments.results("an-experiment", "cuda")
    for below in ("2026-01-03-h200", "2026-01-03-h200/an-experiment"):
        monkeypatch.setenv("RESULTS", str(tmp_path / below))
        with pytest.raises(AnalysisError, match=f"is the directory above LABEL/SPEC, here {tmp_path}\\."):
            experiments.results("an-experiment", "cuda")


def test_results_may_be_named_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Jupyter's kernel starts in the notebook's directory.
    (tmp_path / "analysis/notebooks").mkdir(parents=True)
    (tmp_path / "analysis/pyproject.toml").touch()
    (tmp_path / "experiments/specs").mkdir(parents=True)
    write_experiment(tmp_path / "runs/experiments-sim/an-experiment", ARMS)
    program = repository.built("experiments") or shutil.which("experiments")
    assert program is not None
    monkeypatch.setenv("PATH", f"{Path(program).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RESULTS", "runs")
    monkeypatch.chdir(tmp_path / "analysis/notebooks")
    assert experiments.results("an-experiment", "sim").frame()["name"].to_list() == ["naive", "caching"]


def archive(folder: Path, text: str) -> Path:
    """LABEL.tar.xz with one file."""
    (folder / "made/LABEL").mkdir(parents=True, exist_ok=True)
    (folder / "made/LABEL/table").write_text(text)
    with tarfile.open(folder / "LABEL.tar.xz", "w:xz") as tar:
        tar.add(folder / "made/LABEL", "LABEL")
    return folder / "LABEL.tar.xz"


def test_the_program_unpacks_an_archive_once_and_its_error_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    run = subprocess.run

    def counted(words: list[Any], **options: Any) -> Any:
        started.append(words)
        return run(words, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    first = archive(tmp_path, "1")
    for _ in range(3):
        assert (repository.unpack(first) / "table").read_text() == "1"
    assert len(started) == 1
    with pytest.raises(AnalysisError, match=r"LABEL has other contents"):
        repository.unpack(archive(tmp_path, "another text"))
    assert (tmp_path / "LABEL/table").read_text() == "1"


def test_without_the_program_the_error_names_its_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AnalysisError, match="run `cargo build -p experiments`"):
        experiments.labels()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("NVIDIA H100 80GB HBM3 (simulated)", "simulated H100"),
        ("a device", "a device"),
    ],
)
def test_a_machine_is_called_by_its_gpu(name: str, words: str) -> None:
    assert experiments.machine(name) == words


# Recorded results, from which some of what was recorded is left out.


def sim(spec: str) -> Path:
    """The folder of a spec's newest simulated runs."""
    return experiments.results(spec, "sim").directories[0]


def test_a_run_keeps_its_name_and_commands_take_it() -> None:
    run = records.load_run(sim("loss-against-pytorch") / "runs/00-trainer-128-0.003-r0")
    assert run.ended
    assert run.steps.height > 100
    assert len(steps.gather([str(sim("width"))])) == 15
    assert "pytorch" in losses.show([str(sim("loss-against-pytorch"))], as_json=False)
    with pytest.raises(AnalysisError, match="no such directory"):
        records.load_run(sim("width") / "runs/none")
    with pytest.raises(AnalysisError, match="an experiment, not a run"):
        records.load_run(sim("width"))


def test_omitted_files_are_named() -> None:
    run = load_experiment(sim("width")).runs[0].record
    with pytest.raises(AnalysisError, match=r"no steps\.csv .*left out when the experiment was packed"):
        _ = run.steps
    lean = load_experiment(sim("fidelity")).runs[0].record
    assert {"host_ns", "loss"}.isdisjoint(lean.steps.columns)
    with pytest.raises(AnalysisError, match="losses of the steps were left out"):
        losses.frame([lean])


def test_results_of_replays_are_there() -> None:
    frame = load_experiment(sim("capacity")).replays()
    assert frame["capacity_bytes"].min() > 0  # type: ignore[operator]


# Runs of programs under several allocators: which count, what is compared with what, and what is refused.


def run(part: str, program: str, arm: str, **facts: Any) -> dict[str, Any]:
    number = facts.get("repeat", 0)
    limit = f" at {facts['over_active']:g}" if "over_active" in facts else ""
    base = {"id": f"{part} {program} {arm}{limit} #{number}", "part": part, "program": program, "arm": arm}
    return base | {"status": "ok", "losses": ["3f800000"]} | facts


def test_of_a_run_made_twice_the_last_counts() -> None:
    machine = {"kind": "machine", "gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0"}
    first, second = (run("timed", "gpt2", "native", ms=ms) for ms in (60.0, 58.0))
    broken = run("smoke", "gpt2", "remap", status="failed")
    runs = inside.joined([machine, first, machine, second, broken])
    assert [one["ms"] for one in runs.of("timed")] == [58.0]
    assert runs.of("smoke") == []
    assert len(runs.runs) == 2
    assert runs.machine() == "NVIDIA H200, driver 580, PyTorch 2.11.0"


def session(records: list[dict[str, Any]]) -> inside.Runs:
    """Runs of one session."""
    records = [record | {"session": "one"} for record in records]
    return inside.Runs(runs=records, every=records)


def test_missing_results_have_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    assert inside.load().of() == []


def test_each_run_is_compared_with_its_own_round() -> None:
    # The machine becomes half as fast: rounds tell that from the allocator.
    times = [50.0, 60.0, 75.0, 100.0]
    records = [run("timed", "gpt2", "native", repeat=at, ms=ms) for at, ms in enumerate(times)]
    records += [run("timed", "gpt2", "remap", repeat=at, ms=1.02 * ms) for at, ms in enumerate(times)]
    runs = session(records)
    assert inside.ratio(runs, "timed", "gpt2", "remap") == pytest.approx((1.02, 1.02, 1.02))
    assert inside.ratio(runs, "timed", "gpt2", "caching") is None


def test_losses_are_compared_only_where_natives_repeat() -> None:
    native = [run("timed", "gpt2", "native", repeat=at) for at in range(2)]
    other = run("timed", "gpt2", "remap", losses=["3f800001"])
    assert inside.same_losses(session([*native, run("timed", "gpt2", "caching")]), "gpt2", "caching") == "the same"
    assert inside.same_losses(session([*native, other]), "gpt2", "remap") == "differ"
    unsteady = [*native, run("timed", "gpt2", "native", repeat=2, losses=["40000000"])]
    assert inside.same_losses(session([*unsteady, other]), "gpt2", "remap") == "native's differ from run to run"


def test_the_smallest_limit_has_no_failure_above_it() -> None:
    limits = {1.3: 60.0, 1.1: 61.0, 1.04: None, 1.01: 62.0}
    records = [
        run("curve", "gpt2", "remap", over_active=limit, limit=2**40, **({"ms": ms} if ms else {"status": "oom"}))
        for limit, ms in limits.items()
    ]
    runs = session([*records, run("curve", "gpt2", "native", ms=50.0)])
    points = inside.curve(runs, "gpt2", "remap")
    assert [point.ms for point in points] == [62.0, None, 61.0, 60.0]
    assert inside.smallest(points) == 1.1
    assert inside.over_unlimited(runs, "gpt2", "remap") == pytest.approx({1.01: 1.24, 1.1: 1.22, 1.3: 1.2})
    assert [ax.get_title(loc="left") for ax in inside.draw_curves(runs, ["gpt2"]).axes] == ["GPT-2 124 M", ""]
    with pytest.raises(AnalysisError, match="no run of native"):
        inside.draw_curves(session(records), ["gpt2"])


def test_passes_and_settled_need_both_values() -> None:
    assert inside.passes({"device_ms": [1.0] * 16 + [2.0] * 16}) == (1.0, 2.0)
    assert inside.passes({"device_ms": [1.0] * 20}) is None
    after = {"reserved_bytes.all.peak": 110, "active_bytes.all.peak": 100}
    assert inside.settled({"after_warm_up": after}) == pytest.approx(1.1)
    assert inside.settled({}) is None
