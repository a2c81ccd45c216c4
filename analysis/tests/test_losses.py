"""The table of losses: against f32 of the same program, and the other program in the same type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import summary, write_run
from vramlab_analysis import losses
from vramlab_analysis.records import load_run


def run(folder: Path, more: float, program: str = "trainer", *, begun: bool = True, **settings: Any) -> Path:
    """A record of four steps with losses of 1 over the step's number, each times `1 + more`."""
    document = summary("pytorch" if program == "pytorch" else "caching", program=program)
    document["settings"] |= settings
    if program == "pytorch" and begun:
        document["start"] = {"path": "start.safetensors", "sha256": "ab"}
    return write_run(folder, document, losses=more)


def test_shares_are_of_the_last_losses(tmp_path: Path) -> None:
    half: dict[str, Any] = {"dtype": "bf16", "weights": "half", "accumulate": "f32"}
    paths = [
        run(tmp_path / "a", 0.0, dtype="f32", weights="master", accumulate="f32", loss_scale=1.0),
        run(tmp_path / "b", 0.10, loss_scale=1.0, **half),
        run(tmp_path / "c", 0.0, "pytorch"),
        run(tmp_path / "d", 0.32, "pytorch", loss_scale=1.0, **half),
        # Another scale and another rate: nothing to compare with.
        run(tmp_path / "e", 0.5, "pytorch", loss_scale=8.0, **half),
        run(tmp_path / "f", 0.5, lr=0.2),
    ]
    rows = losses.frame([load_run(path) for path in paths]).to_dicts()
    told = [
        (row["dtype"], row["program"], row["loss_scale"], row["to_f32"], row["to_other"], row["early"]) for row in rows
    ]
    near = pytest.approx
    assert told == [
        ("f32", "pytorch", 1.0, 0.0, 0.0, 0.0),
        ("f32", "trainer", 1.0, 0.0, 0.0, 0.0),
        ("bf16", "pytorch", 1.0, near(0.32), near(0.2), near(0.2)),
        ("bf16", "trainer", 1.0, near(0.1), near(1.1 / 1.32 - 1), near(1 - 1.1 / 1.32)),
        ("bf16", "pytorch", 8.0, near(0.5), None, None),
        ("f32", "trainer", 1.0, 0.0, None, None),
    ]
    assert [row["last"] for row in rows[:3]] == [0.25, 0.25, near(0.33)]
    text = losses.show([str(path) for path in paths], as_json=False).splitlines()
    assert text[0] == "digits, 4 layers of 64, batch 64, rate 0.1, seed 42, kaiming"
    assert [cell.strip() for cell in text[6].split("|")[1:-1]] == [
        "bf16, half weights", "1", "pytorch", "a device", "4", "0.3300", "+32.00 %", "+20.00 %", "2.0e-01",
    ]  # fmt: skip
    own = [run(tmp_path / "g", 0.0), run(tmp_path / "h", 0.5, "pytorch", begun=False)]
    assert {row["to_other"] for row in losses.frame([load_run(path) for path in own]).to_dicts()} == {None}
    assert json.loads(losses.show([str(paths[0])], as_json=True))[0]["to_other"] is None
