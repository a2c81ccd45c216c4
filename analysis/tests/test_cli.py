"""The command line: one line on stderr and exit code 2 for bad input, and nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import summary, write_run
from vramlab_analysis import __main__ as cli

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = ROOT / "analysis" / "notebooks"


def ask(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vramlab_analysis", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    later = write_run(tmp_path / "later", summary(schema_version=3))
    for given, said in [
        (["steps", tmp_path / "none"], "no such directory"),
        (["steps", tmp_path / "empty"], "an empty directory"),
        (["losses", later], "schema version 3"),
        (["notebooks", tmp_path / "none.ipynb"], "notebooks failed"),
    ]:
        monkeypatch.setattr(sys, "argv", ["vramlab-analysis", *map(str, given)])
        assert cli.main() == 2
        err = capsys.readouterr().err.strip()
        assert err.startswith("error: ")
        assert said in err
        assert "\n" not in err
    assert not list(tmp_path.glob("**/*.part"))


def test_from_the_root_of_the_repository(tmp_path: Path) -> None:
    done = ask("losses", write_run(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "| trainer | a device |" in done.stdout
    done = ask("losses", tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_figures_of_the_readme_are_what_the_results_say(tmp_path: Path) -> None:
    done = ask("readme-figures", "-o", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for path in sorted(tmp_path.iterdir()):
        kept = ROOT / "analysis" / "figures" / path.name
        assert kept.read_bytes() == path.read_bytes(), (
            f"{path.name}: draw it again with `vramlab-analysis readme-figures`"
        )


def test_a_notebook_without_its_data_fails(tmp_path: Path) -> None:
    before = (NOTEBOOKS / "04_width_and_time.ipynb").read_bytes()
    done = ask("notebooks", "--write", NOTEBOOKS / "04_width_and_time.ipynb", RESULTS=str(tmp_path))
    assert done.returncode == 2
    assert "no results of 'width'" in done.stdout
    assert done.stderr.strip() == "error: 1 of 1 notebooks failed: 04_width_and_time.ipynb."
    assert (NOTEBOOKS / "04_width_and_time.ipynb").read_bytes() == before


def test_notebooks_are_kept_with_their_outputs() -> None:
    import json

    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert any("image/png" in output.get("data", {}) for output in outputs), f"{path.name} has no figure in it"
        assert not any(output["output_type"] == "error" for output in outputs), f"{path.name} holds an error"
    assert sum(path.stat().st_size for path in notebooks) < 6_000_000
