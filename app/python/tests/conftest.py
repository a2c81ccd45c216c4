"""Shared fixtures of the package's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import Place
from with_torch import environment


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def torch_variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with the real PyTorch."""
    return environment(tmp_path_factory.mktemp("fake"))
