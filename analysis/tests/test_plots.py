"""Every figure: axes have labels and contents, allocators have their colours, and missing data are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.conftest import summary, write_run
from vramlab_analysis import calls, histograms, histories, style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.plots import apart, bars, flame, latency, lines, loss, memory, sync
from vramlab_analysis.plots.cells import fidelity
from vramlab_analysis.records import Run, load_run


def colours(figure: Figure) -> set[str]:
    """Colours of lines and bars."""
    found = set()
    for axes in figure.axes:
        found |= {to_hex(line.get_color()).upper() for line in axes.lines}
        found |= {to_hex(patch.get_facecolor()).upper() for patch in axes.patches}
    return found


def check(figure: Figure, *names: str) -> Figure:
    """Draws it and looks at it."""
    drawn = style.svg(figure)
    assert "<svg" in drawn
    # Formulas are not set, so none may be written.
    assert "mathdefault" not in drawn
    assert not [text.get_text() for text in figure.findobj(Text) if "$" in text.get_text()]
    labelled_x = labelled_y = False
    for axes in figure.axes:
        assert axes.lines or axes.patches or axes.collections or axes.images, "empty axes"
        labelled_x |= bool(axes.get_xlabel())
        labelled_y |= bool(axes.get_ylabel() or axes.get_yticklabels())
    assert labelled_x
    assert labelled_y
    for name in names:
        assert style.ALLOCATORS[name] in colours(figure), f"{name} has not its colour"
    return figure


@pytest.fixture
def runs(tmp_path: Path) -> list[tuple[str, Run]]:
    return [
        (name, load_run(write_run(tmp_path / name, summary(name), trace=True)))
        for name in ("naive", "caching", "stream-ordered")
    ]


def frame(values: dict[str, list[float]], by: str = "hidden") -> pl.DataFrame:
    rows = [
        {"name": name, by: 128 * 2**place, "step_us": value + repeat}
        for name, one in values.items()
        for place, value in enumerate(one)
        for repeat in range(3)
    ]
    return pl.DataFrame(rows)


def test_steps_and_parts(runs: list[tuple[str, Run]]) -> None:
    data = frame({"naive": [400.0, 500.0], "caching": [100.0, 200.0]})
    figure = check(bars.grouped(data, value="step_us", unit="step, µs", group="hidden"), "naive", "caching")
    heights = sorted(patch.get_height() for patch in figure.axes[0].patches)  # type: ignore[attr-defined]
    assert heights == [101, 201, 401, 501]
    check(bars.grouped(data, value="step_us", unit="step, µs"), "naive", "caching")
    parts = [(name, calls.host_parts(run.driver_calls(-1), 1.0)) for name, run in runs]
    check(bars.stacked(parts, style.HOST_PARTS, unit="ms"))
    check(bars.allocations([(name, run.steps) for name, run in runs]), "naive", "caching", "stream-ordered")
    figure = check(bars.allocations_by_epoch(runs), "naive", "caching")
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()][:3] == ["0", "1", "10"]
    # The allocators count the same here: of lines on each other each is seen.
    widths = [line.get_linewidth() for line in figure.axes[0].lines]
    assert widths == sorted(set(widths), reverse=True)


def test_memory(runs: list[tuple[str, Run]]) -> None:
    run = runs[0][1]
    check(memory.over_steps([(name, one.steps) for name, one in runs]))
    check(memory.ledger([(name, one.ledger) for name, one in runs]))
    check(memory.within_steps(run.trace, histories.reserved(run.calls), 0, 1_000_000))
    figure = memory.block_map(histories.lives(run.trace), histories.segments(run.calls), 0, 300_000)
    check(figure)
    rectangles = [len(collection.get_paths()) for collection in figure.axes[0].collections]
    assert rectangles == [1, 4]
    with pytest.raises(AnalysisError, match="too many for one block map"):
        memory.block_map(histories.lives(run.trace), None, 0, 300_000, most=2)


def test_latency(runs: list[tuple[str, Run]]) -> None:
    check(latency.spectrum(histograms.spectrum(runs[0][1].histograms)))
    together = [histograms.spectrum(run.histograms, "all").with_columns(group=pl.lit(name)) for name, run in runs]
    figure = check(latency.spectrum(pl.concat(together)), "naive", "caching", "stream-ordered")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["allocate", "deallocate"]


def test_losses(tmp_path: Path, runs: list[tuple[str, Run]]) -> None:
    other = load_run(write_run(tmp_path / "other", losses=1e-5))
    apart = loss.difference(runs[0][1].steps, other.steps)
    assert apart["relative"].to_list() == pytest.approx([1e-5] * 4, rel=1e-3)
    check(loss.curves([("a", other.steps), ("b", runs[0][1].steps)], over=2))
    check(loss.differences([("hidden 64", apart)], bound=1e-4))
    with pytest.raises(AnalysisError, match="no common step"):
        loss.difference(other.steps, other.steps.with_columns(epoch=pl.lit(9, pl.Int64)))


def test_the_time_graph_has_the_ratio_below() -> None:
    data = frame({"caching": [100.0, 200.0], "naive": [400.0, 400.0], "pytorch-eager": [300.0, 300.0]})
    figure = check(lines.width(data), "naive", "caching", "pytorch-eager")
    assert len(figure.axes) == 2
    ratios = {to_hex(line.get_color()).upper(): list(line.get_ydata()) for line in figure.axes[1].lines}  # type: ignore[arg-type]
    assert ratios[style.ALLOCATORS["naive"]] == pytest.approx([401 / 101, 401 / 201])
    # A line that ends before the others says where.
    short = lines.width(data.filter((pl.col("name") != "naive") | (pl.col("hidden") == 128)))
    assert [text.get_text() for text in short.axes[0].texts] == ["caching", "pytorch-eager", "naive (to 128)"]
    with pytest.raises(AnalysisError, match="no run of arena"):
        lines.width(data, reference="arena")


def test_sweeps_the_account_and_fidelity(runs: list[tuple[str, Run]]) -> None:
    data = frame({"caching": [1.0, 2.0], "naive": [2.0, 3.0]})
    check(
        lines.sweep(data, by="hidden", by_label="width", value="step_us", unit="µs", series="name"), "naive", "caching"
    )
    accounts = [(name, calls.account(run)) for name, run in runs]
    check(sync.account(accounts), "naive", "caching")
    check(sync.timeline(runs[0][1].calls, 0, 400_000))
    cells = pl.DataFrame(
        {"name": ["naive", "caching"], "cell": ["step", "step"], "gpu": [100.0, 50.0], "sim": [90.0, 55.0]}
    )
    figure = check(fidelity(cells, machine="a GPU"), "naive", "caching")
    # Each tick of the logarithmic axes is a plain number.
    figure.draw_without_rendering()
    named = [text.get_text() for text in figure.axes[0].get_xticklabels() + figure.axes[0].get_yticklabels()]
    assert "50" in named
    assert all(not name or float(name) for name in named)


def test_sweeps_in_panels() -> None:
    parts = [frame({"caching": [1.0, 2.0], "naive": [2.0, 3.0]}).with_columns(width=width, kind=pl.lit(kind))
             for width in (128, 1024) for kind in ("pinned", "resident")]  # fmt: skip
    told: dict[str, Any] = {
        "row": "width",
        "column": "kind",
        "by": "hidden",
        "by_label": "streams",
        "value": "step_us",
        "unit": "µs",
    }
    figure = check(lines.sweeps(pl.concat(parts), series="name", **told), "naive", "caching")
    titles = ["width 128, pinned", "width 128, resident", "width 1024, pinned", "width 1024, resident"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["caching", "naive"]
    with pytest.raises(AnalysisError, match="with width 1024 and kind resident"):
        lines.sweeps(pl.concat(parts[:3]), series="name", **told)


def test_ratios_are_to_the_fastest_of_a_group() -> None:
    told = apart.ratios(frame({"naive": [400.0, 100.0], "caching": [100.0, 200.0]}), ["hidden"])
    assert told.select("hidden", "name", "value").rows() == [
        (128, "naive", 401.0), (256, "naive", 101.0), (128, "caching", 101.0), (256, "caching", 201.0),
    ]  # fmt: skip
    assert told["ratio"].to_list() == pytest.approx([401 / 101, 1.0, 1.0, 201 / 101])
    assert told["low"].to_list() == pytest.approx([400 / 101, 100 / 101, 100 / 101, 200 / 101])
    assert told["high"].to_list() == pytest.approx([402 / 101, 102 / 101, 102 / 101, 202 / 101])
    figure = check(apart.fastest([("all", told)], bound=0.02, group="hidden", title="Ratios"), "naive", "caching")
    (bound,) = (line for line in figure.axes[0].lines if line.get_linestyle() == "--")
    assert list(bound.get_ydata()) == [2.0, 2.0]  # type: ignore[arg-type]
    heights = [height for line in figure.axes[0].lines for height in line.get_ydata()]  # type: ignore[union-attr]
    assert any(height == pytest.approx(100 * (401 / 101 - 1)) for height in heights)


def test_a_change_is_clear_where_the_repeats_do_not_overlap() -> None:
    data = frame({"naive": [400.0, 401.0], "caching": [100.0, 90.0]}).rename({"hidden": "streams"})
    told = apart.changes(data, ["name"], "streams", 128)
    assert told.select("name", "streams", "value", "clear").rows() == [
        ("naive", 256, 402.0, False), ("caching", 256, 91.0, True),
    ]  # fmt: skip
    assert told["change"].to_list() == pytest.approx([402 / 401 - 1, 91 / 101 - 1])
    assert apart.changes(data.filter(pl.col("streams") == 256), ["name"], "streams", 128).is_empty()


def test_losses_against_those_of_f32(tmp_path: Path) -> None:
    rows = [("f32", "trainer", 0.0, -0.002), ("f32", "pytorch", 0.0, 0.0021), ("bf16", "trainer", 0.1, None)]
    table = pl.DataFrame(rows, schema=["dtype", "program", "to_f32", "to_other"], orient="row")
    assert apart.noise_of(table) == 0.0021
    assert apart.noise_of(table.tail(1)) is None
    figure = check(apart.from_f32(table.with_columns(kind="dtype")))
    drawn = {tuple(line.get_xdata()) for line in figure.axes[0].lines}  # type: ignore[arg-type]
    assert {(0.0, 10.0), (0.0,)} <= drawn
    check(apart.from_f32(table.tail(1).with_columns(kind="dtype")))
    base, more = (load_run(write_run(tmp_path / name, losses=add)).steps for name, add in (("a", 0.0), ("b", 0.1)))
    figure = check(loss.against(base, [("bf16", more)], over=2))
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([10.0] * 3)  # type: ignore[arg-type]
    with pytest.raises(AnalysisError, match="bf16 has 2 steps and f32 4"):
        loss.against(base, [("bf16", more.head(2))])


def test_flames(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    path.write_text("main;step;launch 60\nmain;step;alloc 30\nmain;load 10\n")
    root = flame.load(path)
    assert flame.share(root, "alloc") == pytest.approx(0.3)
    assert flame.share(root, "step", "alloc") == pytest.approx(0.9)
    figure = flame.icicle(root)
    style.png(figure)
    assert sorted(round(patch.get_width(), 3) for patch in figure.axes[0].patches) == [0.1, 0.3, 0.6, 0.9, 1.0, 1.0]  # type: ignore[attr-defined]
    path.write_text("main;step launch\n")
    with pytest.raises(AnalysisError, match="line 1: not a collapsed stack"):
        flame.load(path)
    with pytest.raises(AnalysisError, match="no such file"):
        flame.load(tmp_path / "none")


def test_figure_without_data_is_refused(runs: list[tuple[str, Run]]) -> None:
    empty = frame({"naive": [1.0]}).clear()
    for draw in (
        lambda: bars.grouped(empty, value="step_us", unit="µs"),
        lambda: bars.stacked([], style.HOST_PARTS, unit="ms"),
        lambda: bars.allocations([]),
        lambda: memory.over_steps([]),
        lambda: memory.ledger([]),
        lambda: memory.block_map(histories.lives(runs[0][1].trace).clear(), None, 0, 1),
        lambda: loss.curves([]),
        lambda: loss.differences([]),
        lambda: loss.against(empty, []),
        lambda: lines.sweeps(
            empty, row="name", column="name", by="hidden", by_label="width", value="step_us", unit="µs", series="name"
        ),
        lambda: apart.fastest([], bound=0.02),
        lambda: apart.fastest([("all", empty)], bound=0.02, group="hidden"),
        lambda: apart.from_f32(pl.DataFrame(schema={"kind": pl.String, "to_f32": pl.Float64})),
        lambda: lines.width(empty),
        lambda: sync.account([]),
        lambda: fidelity(pl.DataFrame({"name": [], "cell": [], "gpu": [], "sim": []}), machine="a GPU"),
    ):
        with pytest.raises(AnalysisError, match="no data"):
            draw()  # type: ignore[no-untyped-call]


def test_a_figure_is_the_same_text_each_time() -> None:
    data = frame({"naive": [1.0, 2.0], "caching": [2.0, 3.0]})
    once, again = (style.svg(bars.grouped(data, value="step_us", unit="µs", group="hidden")) for _ in range(2))
    assert once == again
    assert style.png(lines.width(data)) == style.png(lines.width(data))


def test_words_for_options() -> None:
    data = pl.DataFrame({"a": ["on", "off", "on"], "b": ["on", "off", "off"]})
    words = data.select(bars.joined(data, {"a": "events", "b": "internal"})).to_series().to_list()
    assert words == ["events +\ninternal", "none", "events"]
    with pytest.raises(AnalysisError, match="the runs have no c"):
        bars.joined(data, {"c": "chance"})
    runs = pl.DataFrame(
        {"program": ["trainer", "pytorch", "pytorch"], "loader": ["copy", "workers", "workers"],
         "workers": [None, 2, 2], "pin": [None, "on", "off"]}
    )  # fmt: skip
    said = [to_sery.replace("\n", " ") for to_sery in runs.select(bars.loaders(runs)).to_series()]
    assert said == ["ours: copy", "PyTorch: 2 workers, pinned", "PyTorch: 2 workers"]
    assert bars.loaders(runs.select("program", "loader").head(1)) is not None


def test_units() -> None:
    assert [style.si_bytes(value) for value in (0, 512, 2**20, 1.5 * 2**30, 1000 * 2**20)] == [
        "0 B", "512 B", "1 MiB", "1.5 GiB", "1000 MiB",
    ]  # fmt: skip
    assert [style.si_time(value) for value in (0, 12, 1500, 2.5e6, 3e9)] == ["0 ns", "12 ns", "1.5 µs", "2.5 ms", "3 s"]
    assert style.order(["x", "pytorch-eager", "caching", "naive"]) == ["naive", "caching", "pytorch-eager", "x"]
    assert style.colour("caching, hidden 64") == style.colour("caching")
