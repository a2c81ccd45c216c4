"""What notebooks say: a statement turns red where its figures refute it, and nothing is shown twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from vramlab_analysis import notebook
from vramlab_analysis.errors import AnalysisError

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is put on the page: a paragraph's text, a picture as its kind."""
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
        "🟢 **Holds:** it hardly matters (at least -2 % and at most 2 %). Of 2 the nearest is -2 %, next fit, b."
        in page[-1]
    )

    notebook.verdict("it hardly matters", cells | {"first fit, b": 1.02, "c": -0.5}, **bounds)
    assert "#c81e1e" in page[-1]
    assert "🔴 **Does not hold:** it hardly matters" in page[-1]
    assert "In 2 of 4 it is not; the farthest is 102 %, first fit, b." in page[-1]

    notebook.verdict("a pool is as good", {"width 784": 0.109}, most=0.05, number=notebook.percent)
    assert "(at most 5 %). 11 %, width 784." in page[-1]


@pytest.mark.parametrize("figures", [{}, {"a": float("nan")}, {"a": 1.0, "b": None}])
def test_what_was_not_measured_is_no_verdict(figures: dict[str, float]) -> None:
    with pytest.raises(AnalysisError, match="are not there"):
        notebook.verdict("it holds", figures, most=1)


def test_the_same_matrix_is_not_drawn_twice(page: list[str]) -> None:
    frame = pl.DataFrame({"rule": ["a", "b"], "history": ["x", "x"], "change": [0.1, 0.2]})
    drawing: dict[str, Any] = {"row": "rule", "column": "history", "value": "change", "best": 0.0, "worst": 0.5}
    drawing |= {"title": "peak", "number": lambda value: f"{value:.1f}"}
    notebook.matrices({"gpu": frame, "sim": frame.reverse().with_columns(pl.col("change") + 1e-4)}, **drawing)
    assert page == ["Image", "**sim: peak.** Each cell is as above."]
    page.clear()
    notebook.matrices({"gpu": frame, "sim": frame.with_columns(pl.col("change") * 2)}, **drawing)
    assert page == ["Image", "Image"]


def test_a_table_is_repeated_only_where_it_differs(page: list[str]) -> None:
    notebook.tables(["rule", "calls"], {"gpu": [["a", 1], ["b", 2]], "sim": [["a", 1], ["b", 3]], "c": [["a", 1]]})
    assert [text.splitlines()[-1] for text in page] == [
        "**gpu**.", "| b | 2 |", "**sim**, where it differs.", "| b | 3 |", "**c** says the same in each row.",
    ]  # fmt: skip


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_a_notebook_claims_is_computed(path: Path) -> None:
    # What stands there as text stays true whatever is recorded: a claim among it would not be tested.
    assert not [text for text in cells(path, "markdown") if "**Claim" in text]
    # The first is a form for a run of one's own, and claims nothing.
    assert any("verdict(" in text for text in cells(path, "code")) or path.stem == "00_your_own_run"
