"""Archives of recorded results, which are unpacked when they are read."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError


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
