"""What the tests of the package share."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
