"""Packed experiments: what `experiments pack` makes of the folder that `experiments run` leaves.

`schema.md` describes the three files: `manifest.json` says what was run and holds what all runs share, `runs.csv.xz`
has a row a run, `series.jsonl.xz` has the longer tables of the runs, a line a run and table.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramlab_analysis import schema
from vramlab_analysis.errors import MOST_BYTES, AnalysisError, parse_json, printable, read_bytes

MANIFEST = "manifest.json"
TABLE = "runs.csv.xz"
# The same table as earlier versions packed it.
PLAIN_TABLE = "runs.csv"
SERIES = "series.jsonl.xz"
# Documents of a run besides `run.json`: the first part of the pointers of what they say.
DOCUMENTS = ("summary", "result")
# A cell is JSON if it begins as a text, list or object does, or is one of these; else it is a text.
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_LINE = re.compile(rb'\{"run":("(?:[^"\\]|\\.)*"),"table":("(?:[^"\\]|\\.)*"),"from":"([a-z]+)"')


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a packed experiment."""
    return not (folder / "experiment.json").is_file() and (folder / MANIFEST).is_file()


@dataclass(frozen=True)
class Packed:
    """The tables of an experiment. Those of `series.jsonl.xz` are taken apart when they are asked for."""

    folder: Path
    manifest: dict[str, Any]
    # Cells by the run's id and the column.
    rows: dict[str, dict[str, Any]]
    # Lines by the run's id and the table, with what the table was before.
    lines: dict[str, dict[str, tuple[str, bytes]]] = field(repr=False)

    @property
    def experiment(self) -> dict[str, Any]:
        """`experiment.json`, with the ids of the planned runs."""
        return {**self.manifest["experiment"], "runs": list(self.rows)}

    def recorded(self) -> list[str]:
        """Ids of the runs of which there is a record."""
        return [run for run, row in self.rows.items() if "status" in row]

    def document(self, run: str, name: str) -> Any:
        """A document of a run: `run`, `summary` or `result`; None where it has none."""
        document: dict[str, Any] = {}
        if name in self.manifest["same_in_all"]:
            document[name] = deepcopy(self.manifest["same_in_all"][name])
        for pointer, value in self.rows[run].items():
            if _document(pointer) == name:
                _insert(document, _place(pointer), value)
        for table, (was, line) in self.lines.get(run, {}).items():
            if was in ("array", "object", "list") and _document(table) == name:
                _insert(document, _place(table), self._value(was, line))
        return document.get(name)

    def has(self, run: str, name: str) -> bool:
        """Whether the record of a run holds a file."""
        return name in self.lines.get(run, {})

    def file(self, run: str, name: str) -> bytes:
        """A file of a run's record, as its program wrote it."""
        was, line = self.lines[run][name]
        table = self._parsed(line)
        if was == "text" and isinstance(table.get("text"), str):
            # As it was, its ends of lines included; its readers look at what it says.
            return str(json.loads(line)["text"]).encode("utf-8", "replace")
        columns = self._columns(table)
        out = io.StringIO(newline="")
        if was == "csv":
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        else:
            for row in self._rows(table, columns):
                out.write(json.dumps(row, separators=(",", ":")) + "\n")
        return out.getvalue().encode()

    def _parsed(self, line: bytes) -> dict[str, Any]:
        table: dict[str, Any] = parse_json(line, str(self.folder / SERIES))
        return table

    def _columns(self, table: dict[str, Any]) -> dict[str, list[Any]]:
        """The columns with their true values."""
        columns = table.get("columns")
        if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
            raise AnalysisError(f"{self.folder / SERIES}: a line has no columns.")
        if len({len(values) for values in columns.values()}) > 1:
            raise AnalysisError(f"{self.folder / SERIES}: the columns of a line are of different lengths.")
        for name in table.get("differences", []):
            if name not in columns or not all(type(value) is int for value in columns[name]):
                raise AnalysisError(f"{self.folder / SERIES}: differences of what are no whole numbers.")
            columns[name] = list(itertools.accumulate(columns[name]))
        return columns

    def _rows(self, table: dict[str, Any], columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
        """The rows, without the keys that they did not have."""
        absent = {name for name in table.get("absent", []) if isinstance(name, str)}
        parts = {name: _parts(name) for name in columns}
        rows: list[dict[str, Any]] = []
        for values in zip(*columns.values(), strict=True):
            row: dict[str, Any] = {}
            for name, value in zip(columns, values, strict=True):
                if value is not None or name not in absent:
                    _insert(row, parts[name], value)
            rows.append(row)
        return rows

    def _value(self, was: str, line: bytes) -> Any:
        table = self._parsed(line)
        rows = self._rows(table, self._columns(table))
        if was == "list":
            return [row.get("value") for row in rows]
        return rows if was == "array" else {str(row.pop("key", "")): row for row in rows}


def load(folder: Path) -> Packed:
    """The packed experiment in a folder.

    Raises AnalysisError when it is none, or its tables are not those that were packed.
    """
    manifest = schema.read(folder / MANIFEST, "a packed experiment", schema.MANIFEST)
    plain, packed, series = (_checked(folder, manifest, name) for name in (PLAIN_TABLE, TABLE, SERIES))
    rows: dict[str, dict[str, Any]] = {}
    path, table = (folder / PLAIN_TABLE, plain) if plain is not None else (folder / TABLE, packed)
    if table is None:
        raise AnalysisError(f"{folder / MANIFEST}: names no {TABLE}.")
    csv.field_size_limit(2**27)
    try:
        reader = csv.reader(io.StringIO(table.decode(), newline=""), strict=True)
        names = next(reader, [])
        for cells in reader:
            if len(cells) != len(names):
                raise AnalysisError(f"{path}: line {reader.line_num}: has {len(cells)} cells.")
            row = {
                printable(name): _cell(cell, f"{path}: line {reader.line_num}")
                for name, cell in zip(names, cells, strict=True)
                if cell
            }
            rows[str(row.get("id"))] = row
    except (csv.Error, UnicodeDecodeError) as error:
        raise AnalysisError(f"{path}: not a table of comma-separated values ({error}).") from error
    lines: dict[str, dict[str, tuple[str, bytes]]] = {}
    for number, line in enumerate((series or b"").splitlines(), 1):
        found = _LINE.match(line)
        if found is None:
            raise AnalysisError(f"{folder / SERIES}: line {number}: not what `experiments pack` writes.")
        run, name = (str(parse_json(found[group], str(folder / SERIES))) for group in (1, 2))
        lines.setdefault(run, {})[name] = (found[3].decode(), line)
    return Packed(folder, manifest, rows, lines)


def _checked(folder: Path, manifest: dict[str, Any], name: str) -> bytes | None:
    """The contents of a table, None where there is none; those that were packed, by their sum."""
    table = next((table for table in manifest["tables"] if table["name"] == name), None)
    if table is None:
        return None
    path = folder / name
    try:
        if path.stat().st_size > MOST_BYTES:
            raise AnalysisError(f"{path}: holds more than {MOST_BYTES >> 30} GiB, which no table does.")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read ({error.strerror}).") from error
    if digest != table["sha256"]:
        raise AnalysisError(f"{path}: not the file that was packed, by its SHA-256; take it from where it came from.")
    return read_bytes(path)


def _cell(cell: str, where: str) -> Any:
    if cell[0] in '"[{' or _PLAIN.fullmatch(cell):
        return parse_json(cell.encode(), where)
    return printable(cell)


def _document(pointer: str) -> str:
    """The document that a pointer leads into."""
    first = pointer.partition("/")[0]
    return first if first in DOCUMENTS else "run"


def _place(pointer: str) -> list[str]:
    """The keys that lead to what a column or table says: the document's name first."""
    parts = _parts(pointer)
    return parts if parts[0] in DOCUMENTS else ["run", *parts]


def _parts(pointer: str) -> list[str]:
    """The keys of a pointer."""
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")]


def _insert(root: dict[str, Any], parts: list[str], value: Any) -> None:
    """Puts a value where the keys lead."""
    at = root
    for part in parts[:-1]:
        below = at.get(part)
        if not isinstance(below, dict):
            below = at[part] = {}
        at = below
    at[parts[-1]] = value
