"""Executes the notebooks, each in a new kernel at the repository's root, and updates their files on request.

Otherwise the output is compared with the files: sentences and tables, but not pictures, whose bytes differ with the
version of a library.
"""

from __future__ import annotations

import base64
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from vramlab_analysis import output, repository
from vramlab_analysis.errors import AnalysisError

TIMEOUT_S = 240
# Larger figures make clones slow and are slow to show on GitHub.
MOST_BYTES_FIGURE = 150_000
# Variables that select other records than the repository's.
OTHERS = ("RESULTS", "DEVICES", "RUN")


def run_one(path: Path) -> tuple[Any, float]:
    """The executed notebook and its seconds.

    Raises AnalysisError with the last line of a cell's error, or when it draws nothing.
    """
    began = time.monotonic()
    try:
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise AnalysisError(f"{path}: not a notebook ({error}).") from error
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(repository.root())}},
        record_timing=False,
    )
    # The kernel has another current directory.
    named = {name: value for name in ("RESULTS", "RUN") if (value := os.environ.get(name))}
    paths = {name: str(repository.resolve(value).resolve()) for name, value in named.items()}
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:
        manager = client.create_kernel_manager()
        # Sockets in a directory of their own, because others could connect to a port.
        manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
        try:
            client.execute(env=os.environ | paths)
        except CellExecutionError as error:
            raise AnalysisError(f"{path.name}: {error.ename}: {error.evalue}") from error
        except TimeoutError as error:
            raise AnalysisError(f"{path.name}: a cell took more than {TIMEOUT_S} s.") from error
        except RuntimeError as error:
            raise AnalysisError(f"{path.name}: its kernel failed ({error}).") from error
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    if not figures:
        devices = os.environ.get("DEVICES", "gpu")
        reason = "" if "gpu" in devices else f", because its results are of a GPU and DEVICES is {devices}"
        raise AnalysisError(f"{path.name}: drew no figure{reason}.")
    largest = max(len(base64.b64decode(figure)) for figure in figures)
    if largest > MOST_BYTES_FIGURE:
        raise AnalysisError(f"{path.name}: a figure has {largest:,} bytes, and at most {MOST_BYTES_FIGURE:,} are kept.")
    clean(notebook)
    return notebook, time.monotonic() - began


def clean(notebook: Any) -> None:
    """Removes everything that differs between machines, so that executing a notebook again gives the same file."""
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.output_type != "stream" or output.name != "stderr"
            ]
            for output in cell.outputs:
                output.get("metadata", {}).clear()
    notebook.metadata = nbformat.from_dict(  # type: ignore[no-untyped-call]
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
         "language_info": {"name": "python"}}
    )  # fmt: skip


def outputs(cell: Any) -> list[str]:
    """A cell's outputs as texts; a picture as `a picture`."""
    texts = []
    for one in cell.get("outputs", []):
        data = one.get("data", {})
        if one.output_type == "stream":
            texts.append(one.text)
        elif "image/png" in data:
            texts.append("a picture")
        else:
            texts.append(data.get("text/markdown") or data.get("text/plain", ""))
    return ["".join(text) if isinstance(text, list) else str(text) for text in texts]


def compare(path: Path, fresh: Any) -> None:
    """Compares a notebook's file with its execution.

    Raises AnalysisError that names the first cell with another output.
    """
    kept = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    for number, (old, new) in enumerate(zip(kept.cells, fresh.cells, strict=True), 1):
        for before, now in zip_longest(outputs(old), outputs(new), fillvalue="nothing"):
            if before != now:
                at = next((at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), 0)
                words = f"'{before[at : at + 40]}' instead of '{now[at : at + 40]}'".replace("\n", " ")
                raise AnalysisError(f"{path.name}: cell {number} has {words}; `notebooks --write` updates it.")


def execute(paths: list[Path], *, write: bool) -> None:
    """Executes notebooks, two at a time. With `write` successful ones are updated, otherwise outputs are compared.

    With other records than the repository's (`OTHERS`) nothing is compared.

    Raises AnalysisError that names every notebook that failed.
    """
    own = not any(os.environ.get(name) for name in OTHERS)
    folder = repository.root() / "analysis" / "notebooks"
    chosen = paths or sorted(folder.glob("*.ipynb"))
    if not chosen:
        raise AnalysisError(f"{folder}: no notebook.")

    def one(path: Path) -> str | None:
        try:
            notebook, seconds = run_one(path)
            if own and not write:
                compare(path, notebook)
        except AnalysisError as error:
            print(f"FAILED {error}", flush=True)
            return path.name
        if write:
            try:
                output.write(path, nbformat.writes(notebook) + "\n")  # type: ignore[no-untyped-call]
            except AnalysisError as error:
                print(f"FAILED {error}", flush=True)
                return path.name
        print(f"ok     {path.name}, {seconds:.0f} s", flush=True)
        return None

    with ThreadPoolExecutor(2) as pool:
        failed = [name for name in pool.map(one, chosen) if name]
    if failed:
        raise AnalysisError(f"{len(failed)} of {len(chosen)} notebooks failed: {', '.join(failed)}.")
