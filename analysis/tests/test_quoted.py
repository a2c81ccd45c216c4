"""The README's computed sentences are what the records say."""

from __future__ import annotations

import pytest

from vramlab import quoted, repository
from vramlab.errors import AnalysisError


@pytest.fixture(scope="module")
def readme() -> str:
    return (repository.root() / "README.md").read_text()


def test_the_readme_says_what_the_records_say(readme: str) -> None:
    assert quoted.rewritten(readme) == readme


def test_a_figure_that_was_changed_by_hand_is_put_right(readme: str) -> None:
    answer = quoted.width()
    assert answer in readme
    assert quoted.rewritten(readme.replace(answer, "nowhere")) == readme


def test_a_sentence_that_is_gone_is_named(readme: str) -> None:
    with pytest.raises(AnalysisError, match="and copying each batch"):
        quoted.rewritten(readme.replace("and copying each batch?", "and copying?"))


def test_what_was_fitted_is_not_counted_as_agreement() -> None:
    told = quoted.unfitted()
    assert "fidelity" not in quoted.UNFITTED
    assert told["cells"] >= 40
    assert 0 < told["within"] < 1
    assert told["contrast"] > 1
