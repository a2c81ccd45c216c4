"""The picture of three steps: small, without bitmaps, and it says how much of it is the profiler's own time."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from vramlab_analysis import experiments, readme_figure, style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import train_pace
from vramlab_analysis.nsight import attribute, load, timeline


def test_the_profilers_own_time_is_what_runs_without_it_do_not_take() -> None:
    drawn = style.svg(readme_figure.three_timelines())
    assert len(drawn) < 150_000
    assert "<image" not in drawn
    said = re.findall(
        r">([a-z-]+): (\d+) µs as captured, of which (\d+) µs \((\d+) %\) are .* a step takes (\d+) µs", drawn
    )
    assert [one[0] for one in said] == ["naive", "caching", "stream-ordered"]
    for allocator, *numbers in said:
        captured, own, share, plain = map(int, numbers)
        runs = experiments.results("latency", "h200").select(alloc=allocator)
        paces = sorted(pace for run in runs if (pace := train_pace(run.record)) is not None)
        assert paces[0] <= plain + 1
        assert paces[-1] >= plain - 1
        assert abs(captured - own - plain) <= 1
        assert abs(100 * own / captured - share) <= 1


def test_runs_of_other_work_are_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    result = attribute(load(readme_figure.recorded() / "nsight" / "naive-sync-never"))
    wide = result.capture.path.replace("naive-sync-never", "naive-sync-never-hidden-2048")
    assert Path(wide).is_dir()
    other = dataclasses.replace(result, capture=load(Path(wide)))
    with pytest.raises(AnalysisError, match=r"not the work of .* \(hidden\)"):
        readme_figure.under_the_profiler("naive", other, timeline.window(result).length)
