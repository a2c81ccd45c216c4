"""The README's computed sentences are what the records say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vramlab_analysis import quoted
from vramlab_analysis.errors import AnalysisError


@pytest.fixture(scope="module")
def documents() -> dict[str, str]:
    return quoted.pages()


def changed(documents: dict[str, str], old: str, new: str) -> dict[str, str]:
    assert any(old in text for text in documents.values())
    return {name: text.replace(old, new) for name, text in documents.items()}


def test_the_documents_say_what_the_records_say(documents: dict[str, str]) -> None:
    assert quoted.rewritten(documents) == documents


@pytest.mark.parametrize("figure", [quoted.width, lambda: quoted.epochs().splitlines()[2]])
def test_a_figure_that_was_changed_by_hand_is_put_right(documents: dict[str, str], figure: Callable[[], str]) -> None:
    by_hand = changed(documents, figure(), "| nowhere |" if figure().startswith("|") else "nowhere")
    assert quoted.rewritten(by_hand) == documents


def test_a_sentence_that_is_gone_is_named(documents: dict[str, str]) -> None:
    with pytest.raises(AnalysisError, match="0 places for the row 'and copying each batch"):
        quoted.rewritten(changed(documents, "and copying each batch?", "and copying?"))


def test_a_sentence_that_stands_twice_is_named(documents: dict[str, str]) -> None:
    twice = documents | {"README.md": documents["README.md"] + documents["experiments/answers.md"]}
    with pytest.raises(AnalysisError, match="2 places"):
        quoted.rewritten(twice)


def test_what_was_fitted_is_not_counted_as_agreement() -> None:
    told = quoted.unfitted()
    assert "fidelity" not in quoted.UNFITTED
    assert told["cells"] >= 40
    assert 0 < told["within"] < 1
    assert told["contrast"] > 1
