"""Output of notebooks: refuted statements are red, and nothing is shown twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import polars as pl
import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.conftest import summary, write_experiment
from vramlab_analysis import execute, measures, notebook
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import Interval

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the output: a paragraph's text, a picture as its kind."""
    shown: list[str] = []
    monkeypatch.setattr(
        notebook, "display", lambda one: shown.append(one.data if isinstance(one.data, str) else type(one).__name__)
    )
    return shown


def test_a_table_that_refutes_a_statement_turns_it_red(page: list[str]) -> None:
    cells = {"first fit, a": 0.01, "next fit, b": -0.02}
    bounds: dict[str, Any] = {"least": -0.02, "most": 0.02, "number": notebook.percent}
    notebook.verdict("it hardly matters", cells, **bounds)
    assert "#1a7f37" in page[-1]
    assert (
        "🟢 **Confirmed:** it hardly matters (at least -2 % and at most 2 %). "
        "2 values; nearest to the bound -2 %, next fit, b." in page[-1]
    )

    notebook.verdict("it hardly matters", cells | {"first fit, b": 1.02, "c": -0.5}, **bounds)
    assert "#c81e1e" in page[-1]
    assert "🔴 **Refuted:** it hardly matters" in page[-1]
    assert "2 of 4 outside; farthest 102 %, first fit, b." in page[-1]

    notebook.verdict("a pool is as good", {"width 784": 0.109}, most=0.05, number=notebook.percent)
    assert "(at most 5 %). 11 %, width 784." in page[-1]


def test_an_interval_across_a_bound_decides_nothing(page: list[str]) -> None:
    def shown(low: float, high: float) -> str:
        cells: dict[str, float | Interval] = {"width 512": 1.00, "width 4,096": Interval(1.14, low, high)}
        notebook.verdict("a pool is as good", cells, most=1.02, number="{:.2f}".format)
        return page[-1]

    undecided = shown(0.69, 1.93)
    assert "#9a6700" in undecided
    assert (
        "🟡 **Not decided:** a pool is as good (at most 1.02). 1 of 2 have intervals across a bound; widest"
        in undecided
    )
    assert "widest 1.14 (0.69 to 1.93), width 4,096." in undecided
    refuted = shown(1.03, 1.93)
    assert "🔴 **Refuted:** a pool is as good (at most 1.02). 1 of 2 outside; farthest 1.14 (1.03 to 1.93)" in refuted
    assert "🟢 **Confirmed:** a pool is as good (at most 1.02). 2 values; nearest to the bound" in shown(0.69, 1.02)


def test_a_ratio_compares_runs_of_one_repeat_on_one_host() -> None:
    # The second repeat ran on a host that is ten times as slow. Of the third each run is on a host of its own.
    hosts = ["x", "x", "y", "y", "x", "y"]
    frame = pl.DataFrame(
        {
            "repeat": [0, 0, 1, 1, 2, 2],
            "host": hosts,
            "name": ["a", "b"] * 3,
            "step_us": [10.0, 20.0, 100.0, 210.0, 55.0, 900.0],
        }
    )
    ratio = measures.over(frame, "step_us", {"name": "b"}, {"name": "a"})
    assert ratio.value == pytest.approx(115 / 55)
    assert ratio.low == pytest.approx(2.0)
    assert ratio.high == pytest.approx(2.1)
    assert ((ratio - 1).low, (ratio - 1).value) == (ratio.low - 1, ratio.value - 1)
    with pytest.raises(AnalysisError, match="no repeat in common"):
        measures.over(frame, "step_us", {"name": "b"}, {"name": "c"})


def test_a_skipped_run_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it the advice to run the spec again leads nowhere: the run is skipped again.
    monkeypatch.setenv("RESULTS", str(tmp_path))
    folder = tmp_path / "2026-01-01-sim" / "an-experiment"
    planned = ["00-naive-r0", "01-pytorch-r0"]
    write_experiment(folder, [("naive", {}, summary()), ("pytorch", {}, summary())], runs=planned)
    path = folder / "runs" / "01-pytorch-r0" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "skipped", "error": "no PyTorch here"}))
    with pytest.raises(AnalysisError, match=r"1 of the planned runs .* 01-pytorch-r0 \(no PyTorch here\); "):
        notebook.complete("an-experiment", "sim")


def test_an_error_for_users_is_one_line_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell()  # type: ignore[no-untyped-call]
    shell.user_ns["fail"] = notebook.verdict
    shell.run_cell("fail('it holds', {})")  # type: ignore[no-untyped-call]
    assert capsys.readouterr().out == "error: 'it holds': 0 of its 0 values are missing.\n"


@pytest.mark.parametrize("figures", [{}, {"a": float("nan")}, {"a": 1.0, "b": None}])
def test_verdict_needs_values(figures: dict[str, float]) -> None:
    with pytest.raises(AnalysisError, match="are missing"):
        notebook.verdict("it holds", figures, most=1)


def test_the_same_matrix_is_not_drawn_twice(page: list[str]) -> None:
    frame = pl.DataFrame({"rule": ["a", "b"], "history": ["x", "x"], "change": [0.1, 0.2]})
    drawing: dict[str, Any] = {"row": "rule", "column": "history", "value": "change", "best": 0.0, "worst": 0.5}
    drawing |= {"title": "peak", "number": lambda value: f"{value:.1f}"}
    notebook.matrices({"gpu": frame, "sim": frame.reverse().with_columns(pl.col("change") + 1e-4)}, **drawing)
    assert page == ["Image", "**sim: peak.** All cells equal those above."]
    page.clear()
    notebook.matrices({"gpu": frame, "sim": frame.with_columns(pl.col("change") * 2)}, **drawing)
    assert page == ["Image", "Image"]


def test_a_table_is_repeated_only_where_it_differs(page: list[str]) -> None:
    notebook.tables(["rule", "calls"], {"gpu": [["a", 1], ["b", 2]], "sim": [["a", 1], ["b", 3]], "c": [["a", 1]]})
    assert [text.splitlines()[-1] for text in page] == [
        "**gpu**.", "| b | 2 |", "**sim**, rows that differ.", "| b | 3 |", "**c**: all rows are equal.",
    ]  # fmt: skip


def kept(*outputs: tuple[str, str]) -> Any:
    """A notebook with one cell and these outputs, each a kind and a text."""
    cell = nbformat.v4.new_code_cell("say()")  # type: ignore[no-untyped-call]
    cell.outputs = [
        nbformat.v4.new_output("display_data", {kind: text})  # type: ignore[no-untyped-call]
        for kind, text in outputs
    ]
    return nbformat.v4.new_notebook(cells=[cell])  # type: ignore[no-untyped-call]


def test_outputs_in_the_file_match_the_execution(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    table, picture = ("text/markdown", "| a |\n|---|\n| 12 |"), ("image/png", "aGVsbG8=")
    nbformat.write(kept(table, picture), path)  # type: ignore[no-untyped-call]
    execute.compare(path, kept(table, ("image/png", "b3RoZXI=")))
    for other in (kept(("text/markdown", "| a |\n|---|\n| 13 |"), picture), kept(table), kept(picture, table)):
        with pytest.raises(AnalysisError, match=r"a\.ipynb: cell 1 has .*`notebooks --write` updates it"):
            execute.compare(path, other)


def test_a_notebook_whose_outputs_are_stale_is_named(tmp_path: Path) -> None:
    # The smallest of all, with one figure of its kept outputs changed by hand.
    notebook_file = json.loads((NOTEBOOKS / "12_inside_real_programs.ipynb").read_text())
    told = [one["data"]["text/markdown"] for cell in notebook_file["cells"] for one in cell.get("outputs", [])
            if "text/markdown" in one.get("data", {})]  # fmt: skip
    line = next(line for text in told for line in text if any(one.isdigit() for one in line))
    at = next(at for at, one in enumerate(line) if one.isdigit())
    told_in = next(text for text in told if line in text)
    told_in[told_in.index(line)] = line[:at] + str((int(line[at]) + 1) % 10) + line[at + 1 :]
    (tmp_path / "stale.ipynb").write_text(json.dumps(notebook_file))
    with pytest.raises(AnalysisError, match=r"1 of 1 notebooks failed: stale\.ipynb"):
        execute.execute([tmp_path / "stale.ipynb"], write=False)


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_claims_of_notebooks_are_computed(path: Path) -> None:
    # What stands there as text stays true whatever is recorded: a claim among it would not be tested.
    assert not [text for text in cells(path, "markdown") if "**Claim" in text]
    measured = re.compile(r"\d\s*(?:[µumn]s|MiB|GiB|times)\b")
    assert not [text for text in cells(path, "markdown") if measured.search(text)]
    # The first is a form for a run of one's own, and claims nothing.
    assert any("verdict(" in text for text in cells(path, "code")) or path.stem == "00_your_own_run"
