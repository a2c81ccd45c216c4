"""The command line: one line on stderr and exit code 2 for bad input, and nothing half-written."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.conftest import summary, write_experiment, write_run
from vramlab_analysis import __main__ as cli
from vramlab_analysis import output
from vramlab_analysis.errors import AnalysisError

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = ROOT / "analysis" / "notebooks"


def ask(*words: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vramlab_analysis", *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    later = write_run(tmp_path / "later", summary(schema_version=3))
    for given, said in [
        (["steps", tmp_path / "none"], "no such directory"),
        (["steps", tmp_path / "empty"], "an empty directory"),
        (["steps", later / "steps.csv"], "a file, not a directory"),
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_cannot_be_written_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vramlab_analysis", "losses", str(write_run(tmp_path / "run"))]
    for words in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*command, *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: No space left on device\n")


def test_closed_output_and_readers_that_leave_are_no_failure(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m vramlab_analysis losses '{write_run(tmp_path / 'run')}'"
    for shell in (f"{command} >&-", f"{command} >&- 2>&-", f"({command}; echo exit $? >&2) | true"):
        done = subprocess.run(["sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.removesuffix("exit 0\n")) == (0, "", ""), shell


def test_figures_of_the_readme_match_the_results(tmp_path: Path) -> None:
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


def test_a_notebook_reads_results_named_from_the_current_directory(tmp_path: Path) -> None:
    write_experiment(tmp_path / "mine/2026-01-01-sim/an-experiment", [("naive", {}, summary())])
    cell = nbformat.v4.new_code_cell(  # type: ignore[no-untyped-call]
        "from vramlab_analysis.experiments import results\nresults('an-experiment', 'sim')"
    )
    book = tmp_path / "own.ipynb"
    book.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])))  # type: ignore[no-untyped-call]
    results = os.path.relpath(tmp_path / "mine", ROOT / "analysis")
    source = str(ROOT / "analysis/src")
    done = ask("notebooks", book, cwd=ROOT / "analysis", RESULTS=results, DEVICES="sim", PYTHONPATH=source)
    # It found the results: what it lacks is a figure.
    assert done.stdout == ("FAILED own.ipynb: drew no figure, because its results are of a GPU and DEVICES is sim.\n")


def test_notebooks_are_kept_with_their_outputs() -> None:
    import json

    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert any("image/png" in output.get("data", {}) for output in outputs), f"{path.name} has no figure in it"
        assert not any(output["output_type"] == "error" for output in outputs), f"{path.name} holds an error"
    assert sum(path.stat().st_size for path in notebooks) < 6_000_000


# A file that was asked for is written whole, or a sentence says why not; nothing else changes.


def test_a_file_appears_whole_and_replaces_a_regular_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    output.write(path, "one")
    assert path.read_text() == "one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~output._umask()
    path.chmod(0o640)
    other = tmp_path / "link"
    os.link(path, other)
    output.write(path, b"two")
    assert (path.read_text(), other.read_text()) == ("two", "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "report.html"]


def unwritable(folder: Path) -> dict[str, tuple[Path, str]]:
    """Paths that cannot be written, each with its error."""
    folder.mkdir()
    (folder / "target").write_text("kept")
    (folder / "link").symlink_to("target")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "s"))
    listening.close()
    return {
        "link": (folder / "link", "a symbolic link to target"),
        "dangling": (folder / "dangling", "a symbolic link to nowhere"),
        "fifo": (folder / "fifo", "is a pipe"),
        "folder": (folder / "folder", "is a directory"),
        "socket": (folder / "s", "is a socket"),
        "device": (Path("/dev/null"), "is a character device"),
        "stream": (Path("/dev/stdout"), "is a stream"),
        "dash": (Path("-"), "is a stream"),
        "no folder": (folder / "none" / "x", "does not exist"),
        "under a file": (folder / "target" / "x", "cannot be written"),
        "long": (folder / ("x" * 300), "cannot be written"),
    }


CASES = [
    "link",
    "dangling",
    "fifo",
    "folder",
    "socket",
    "device",
    "stream",
    "dash",
    "no folder",
    "under a file",
    "long",
]


def kinds(folder: Path) -> dict[str, tuple[int, str]]:
    """The kinds and contents of all files in a directory."""
    out = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        out[str(path.relative_to(folder))] = (stat.S_IFMT(mode), path.read_text() if stat.S_ISREG(mode) else "")
    return out


@pytest.mark.parametrize("case", CASES)
def test_other_targets_than_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    path, said = unwritable(tmp_path / "place")[case]
    monkeypatch.chdir(tmp_path / "place")
    before, null = kinds(tmp_path / "place"), os.stat("/dev/null").st_rdev
    with pytest.raises(AnalysisError, match=said):
        output.write(path, "x")
    assert kinds(tmp_path / "place") == before
    assert os.stat("/dev/null").st_rdev == null


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AnalysisError, match="No space left on device"):
        output.write(path, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "before"


def test_neighbouring_files_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "report.html.part").write_text("a user's")
    output.write(tmp_path / "report.html", "page")
    assert (tmp_path / "report.html.part").read_text() == "a user's"
