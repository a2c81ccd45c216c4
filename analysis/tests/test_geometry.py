"""Where figures put things: no text on another, none beyond the edge, every bar and its label within its axes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from tests.conftest import CALLS, summary, write_run
from vramlab_analysis import calls, style
from vramlab_analysis.experiments import results
from vramlab_analysis.plots import bars, loss, memory, sync
from vramlab_analysis.records import load_run


def runs_of(spec: str) -> list[Path]:
    return sorted((results(spec, "sim").directories[0] / "runs").iterdir())


def texts(figure: Figure) -> list[Text]:
    """The texts: titles, labels of axes and of bars, legends, names of rows; not the numbers of ticks."""
    found: list[Text] = [text for text in figure.texts if text.get_text()]
    for legend in figure.legends:
        found += [one for one in (*legend.get_texts(), legend.get_title()) if one.get_text()]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        found += [text for text in axes.texts if isinstance(text, Annotation)]
        if axes.patches:
            found += axes.get_yticklabels()
    found += [one for one in (figure._suptitle, figure._supxlabel) if one is not None]  # type: ignore[attr-defined]
    return [one for one in found if one.get_text().strip() and one.get_visible()]


def laid_out(figure: Figure) -> None:
    """Fails where texts overlap or leave the figure, and where bars or their labels leave their axes."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    whole = figure.bbox
    boxes = [(text.get_text(), text.get_window_extent(renderer), text) for text in texts(figure)]
    for text, box, _ in boxes:
        inside = box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1 and box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1
        assert inside, f"{text!r} leaves the figure: {box} of {whole}"
    for (one, a, first), (other, b, second) in itertools.combinations(boxes, 2):
        if first is second:
            continue
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 1 or high <= 1, f"{one!r} and {other!r} overlap by {wide:.0f} × {high:.0f}"
    for axes in figure.axes:
        within(axes, renderer)


def within(axes: Axes, renderer: Any) -> None:
    frame = axes.get_window_extent(renderer)
    shapes = [patch.get_window_extent(renderer) for patch in axes.patches if isinstance(patch, Rectangle)]
    shapes += [text.get_window_extent(renderer) for text in axes.texts if isinstance(text, Annotation) and axes.patches]
    for box in shapes:
        assert box.x0 >= frame.x0 - 1, f"{box} begins left of {frame}"
        assert box.x1 <= frame.x1 + 1, f"{box} ends right of {frame}"


def runs(folder: Path, count: int) -> list[str]:
    """Records that differ in several settings, so that their names are long, and by orders of magnitude in time."""
    paths = []
    for number in range(count):
        told = summary(("naive", "caching", "stream-ordered")[number % 3])
        told["settings"] |= {"hidden": 64 << number, "sync": ("step", "never")[number % 2], "loader": "resident",
                             "lr": 0.1 / (number + 1), "seed": number}  # fmt: skip
        for epoch in told["epochs"]:
            of = {name: dict(one) for name, one in epoch["driver_calls"].items()}
            for one in of.values():
                one["total_ns"] *= 1 + 7 * ((count - number) % count)
                one["blocked_ns"] *= 1 + 7 * ((count - number) % count)
            epoch["driver_calls"] = of
        paths.append(str(write_run(folder / f"{number:02}", told, trace=number == 0)))
    return paths


def drawn(folders: list[str | Path]) -> list[Figure]:
    """The figures that the notebook for one's own run draws of several."""
    named = [(run.label, run) for run in map(load_run, folders)]
    told = [(name, run) for name, run in named if calls.counted_per(run)]
    hosts = [(n, calls.host_parts(run.driver_calls(-1), run.epochs["wall_s"][-1] * 1e3)) for n, run in told]
    losing = [(name, run.steps) for name, run in named if "loss" in run.steps.columns]
    figures = [
        bars.stacked(hosts, style.HOST_PARTS, unit="host time, ms", total=lambda value: f"{value:.4g} ms"),
        sync.account([(name, calls.account(run, per="epoch")) for name, run in told]),
        memory.over_steps([(name, run.steps) for name, run in named]),
        memory.ledger([(name, run.ledger) for name, run in named]),
    ]
    return [*figures, loss.curves(losing, over=10)] if losing else figures


@pytest.mark.parametrize("count", [1, 3, 15])
def test_the_figures_of_runs_are_laid_out(tmp_path: Path, count: int) -> None:
    for figure in drawn([*runs(tmp_path, count)]):
        laid_out(figure)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_longest_bar_of_the_sync_account_is_whole_wherever_it_stands(order: tuple[int, ...]) -> None:
    folders = runs_of("where-time-goes")
    chosen = [load_run(folders[place]) for place in order]
    figure = sync.account([(run.arm, calls.account(run)) for run in chosen])
    laid_out(figure)
    ends = [bar.get_window_extent().x1 for axes in figure.axes for bar in axes.patches]
    left = figure.axes[0].get_window_extent().x0
    # The scale is not wasted either: the longest bar takes most of what its label leaves.
    assert max(ends) - left > 0.5 * figure.axes[0].get_window_extent().width


def test_long_names_and_numbers_keep_their_bars(tmp_path: Path) -> None:
    rows = [(f"an allocator of a very long name indeed, number {number}", {"a": 10.0**number}) for number in range(9)]
    laid_out(bars.stacked(rows, {"a": style.BLUE}, unit="ms", total=lambda value: f"{value:,.0f} ms and then some"))


def test_fifteen_recorded_runs_are_laid_out() -> None:
    for figure in drawn([*runs_of("fidelity")[:15]]):
        laid_out(figure)


def test_simulated_times_of_nothing_are_not_drawn(tmp_path: Path) -> None:
    from vramlab_analysis import histograms
    from vramlab_analysis.errors import AnalysisError
    from vramlab_analysis.measures import measures
    from vramlab_analysis.plots import latency

    tagged = {"allocate.driver_alloc": [1, 900, 30_000], "allocate.hit": [1] * 90, "deallocate.hit": [1] * 80}
    histograms.write(tmp_path / "latency.hlog", tagged)
    frame = histograms.spectrum(histograms.load(tmp_path / "latency.hlog"))
    figure = latency.spectrum(frame, simulated=True)
    lowest = min(line.get_ydata().min() for axes in figure.axes for line in axes.lines)  # type: ignore[union-attr]
    assert lowest > 1
    assert [get_text.get_text() for get_text in figure.legends[0].get_texts()] == ["driver_alloc"]
    assert "not drawn, as on the simulated device only driver calls take time: hit" in (
        figure.legends[0].get_title().get_text().replace("\n", " ")
    )
    laid_out(figure)
    # On a GPU a nanosecond is a measurement.
    assert len(latency.spectrum(frame).axes[0].lines) == 2
    with pytest.raises(AnalysisError, match="no operation asked the driver"):
        latency.spectrum(frame.filter(frame["group"] == "hit"), simulated=True)

    told = summary()
    told["clock"] = "virtual"
    told["latency"] = [{"operation": "allocate", "path": "hit", "count": 9, "p50_ns": 0, "p99_ns": 0}]
    run = load_run(write_run(tmp_path / "run", told))
    assert run.simulated
    assert measures(run)["allocate_p50_ns"] is None

    # As the trainer writes it: no percentiles where none were measured.
    told["latency"] = [{"operation": "allocate", "path": "hit", "count": 9}]
    run = load_run(write_run(tmp_path / "plain", told))
    assert measures(run)["allocate_p99_ns"] is None


def test_calls_of_validation_are_excluded_from_a_step(tmp_path: Path) -> None:
    from vramlab_analysis.errors import AnalysisError
    from vramlab_analysis.measures import measures

    old = load_run(write_run(tmp_path / "old"))
    assert calls.counted_per(old) == "epoch"
    with pytest.raises(AnalysisError, match="does not separate the driver calls of training and validation"):
        calls.account(old, per="step")
    said = measures(old)
    assert (said["blocked_us"], said["driver_calls"], said["blocked_in"]) == (None, None, None)
    assert (said["epoch_blocked_us"], said["epoch_driver_calls"], said["epoch_blocked_in"]) == (40, 120, "mem_free")

    told = summary()
    for epoch in told["epochs"]:  # half of the calls are the validation's
        of = epoch["driver_calls"]
        epoch["train_driver_calls"] = {name: {key: n // 2 for key, n in of[name].items()} for name in CALLS}
    new = load_run(write_run(tmp_path / "new", told))
    said = measures(new)
    assert (said["blocked_us"], said["driver_calls"]) == (10, 30)
    assert said["blocked_us"] < said["step_us"]
    assert (said["epoch_blocked_us"], said["epoch_driver_calls"]) == (40, 120)
    assert calls.account(new)["blocked_us"].sum() == 10
