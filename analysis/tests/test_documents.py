"""What documents say and show is what the records say: computed sentences, and the picture of three steps."""

from __future__ import annotations

import dataclasses
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vramlab_analysis import experiments, quoted, readme_figure, repository, samples, style
from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.measures import train_pace
from vramlab_analysis.nsight import attribute, load, timeline


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


def test_the_readme_shows_what_the_programs_print() -> None:
    if missing := samples.check():
        pytest.skip(f"not built, so the README's samples were NOT compared: {', '.join(missing)}; cargo build")


def test_a_sample_that_a_program_does_not_print_is_named() -> None:
    printed = "What happened\n  At most 7 GiB were reserved, and more.\nWhat would help\n  nothing\n"
    assert samples.stale("What happened\n  At most 7 GiB were reserved, ...\n...\n  nothing\n", printed) is None
    assert (
        samples.stale("What happened\n  At most 8 GiB were reserved, ...\n", printed)
        == "  At most 8 GiB were reserved, ..."
    )
    assert samples.stale("What would help\nWhat happened\n", printed) == "What happened", "out of turn"
    with pytest.raises(AnalysisError, match="shows what 'vramlab unheard of' prints"):
        samples.check("# Page\n\n```sh\nvramlab unheard of\n```\n```text\na\n```\n")
    with pytest.raises(AnalysisError, match="does not follow"):
        samples.check("# Page\n\nA sample:\n\n```text\na\n```\n")


def test_the_readme_is_short() -> None:
    readme = (repository.root() / "README.md").read_text()
    assert len(readme.split()) <= 900


def test_what_was_fitted_is_not_counted_as_agreement() -> None:
    told = quoted.unfitted()
    assert "fidelity" not in quoted.UNFITTED
    assert told["cells"] >= 40
    assert 0 < told["within"] < 1
    assert told["contrast"] > 1


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


# Archives of recorded results, which are unpacked when they are read.


def archive(folder: Path, text: str) -> Path:
    """LABEL.tar.xz with one file, which nothing has unpacked yet."""
    (folder / "made/LABEL").mkdir(parents=True, exist_ok=True)
    (folder / "made/LABEL/table").write_text(text)
    with tarfile.open(folder / "LABEL.tar.xz", "w:xz") as tar:
        tar.add(folder / "made/LABEL", "LABEL")
    repository.unpack.cache_clear()
    return folder / "LABEL.tar.xz"


def test_an_archive_is_unpacked_once_and_never_over_other_files(tmp_path: Path) -> None:
    first = archive(tmp_path, "1")
    repository.unpack(first)
    assert (tmp_path / "LABEL/table").read_text() == "1"
    (tmp_path / "LABEL/added").write_text("a user's")
    repository.unpack.cache_clear()
    repository.unpack(first)
    assert (tmp_path / "LABEL/added").read_text() == "a user's"
    # Another archive does not replace what is there.
    with pytest.raises(AnalysisError, match=r"LABEL: not what LABEL\.tar\.xz holds"):
        repository.unpack(archive(tmp_path, "2"))
    assert (tmp_path / "LABEL/table").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LABEL", "LABEL.tar.xz", "made"]


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "LABEL.tar.xz"
    path.write_bytes(b"no archive")
    with pytest.raises(AnalysisError, match="not an archive of results"):
        repository.unpack(path)
    assert not (tmp_path / "LABEL").exists()
