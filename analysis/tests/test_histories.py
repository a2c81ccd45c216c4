"""Lives of blocks, segments and levels, and latency histograms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vramlab_analysis import histograms, histories
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.records import load_run

BASE = 0x7F00_0000_0000


def test_each_allocation_finds_its_own_free(run_folder: Path) -> None:
    blocks = histories.lives(load_run(run_folder).trace)
    assert blocks.height == 11
    assert blocks["end_ns"].null_count() == 1
    assert blocks.filter(addr=BASE)["end_ns"].to_list() == [None]
    returning = blocks.filter(addr=BASE + 2**20)
    assert (returning["end_ns"] - returning["start_ns"]).unique().to_list() == [50_000]


def test_levels_follow_the_operations(run_folder: Path) -> None:
    run = load_run(run_folder)
    levels = histories.levels(run.trace)
    assert levels["requested"].to_list() == [1_000_000, *[1_004_000, 1_000_000] * 10]
    assert levels["allocated"].max() == 2**20 + 4096
    assert histories.segments(run.calls).rows() == [(BASE, 2 * 2**20, 1500, None)]
    assert histories.reserved(run.calls).rows() == [(1500, 2 * 2**20)]


def test_address_space_that_nothing_uses_is_left_out() -> None:
    place, regions = histories.compacted([BASE, 0x1000, BASE + 512, 0x1200], [512, 512, 512, 512])
    assert place.tolist() == [1024, 0, 1536, 512]
    assert [(start, length, at) for start, length, at in regions] == [(0x1000, 1024, 0), (BASE, 1024, 1024)]


def test_a_window_that_is_not_in_the_run(run_folder: Path) -> None:
    steps = load_run(run_folder).steps
    assert histories.window(steps, 1, 2) == (250_000, 750_000)
    with pytest.raises(AnalysisError, match="the run has 4 steps"):
        histories.window(steps, 8, 9)


def test_histograms_come_back_as_they_were_recorded(run_folder: Path) -> None:
    recorded = load_run(run_folder).histograms
    assert [(one.operation, one.path, one.count) for one in recorded] == [
        ("allocate", "driver_alloc", 20),
        ("allocate", "hit", 80),
        ("deallocate", "hit", 100),
    ]
    allocate = [one for one in recorded if one.operation == "allocate"]
    assert histograms.percentile(allocate, 0.5) == 50
    assert histograms.percentile(allocate, 0.99) == pytest.approx(1000, rel=1e-3)
    assert histograms.percentile(allocate, 1.0) == pytest.approx(30_000, rel=1e-3)


def test_a_spectrum_is_a_step_function_of_the_share(run_folder: Path) -> None:
    recorded = load_run(run_folder).histograms
    whole = histograms.spectrum(recorded, "all").filter(operation="allocate")
    assert whole["percentile"].to_list() == pytest.approx([0, 0.8, 0.8, 0.99, 0.99, 1.0])
    assert np.diff(whole["value_ns"].to_numpy()).min() >= 0
    phases = histograms.spectrum(recorded, "phase").filter(operation="allocate")
    assert dict(phases.select("group", "count").unique().rows()) == {"cold": 20, "steady": 80}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no histogram"),
        ("Tag=a.b,0.000,1.000\n", "is it cut off"),
        ("Tag=a.b,0.000,1.000,5.000,HISTFAAAAnonsense\n", "no histogram"),
        ("Tag=a.b,zero,1.000,5.000,HISTFAAAA\n", "no number"),
    ],
)
def test_a_log_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "latency.hlog"
    path.write_text(text)
    with pytest.raises(AnalysisError, match=said):
        histograms.load(path)
