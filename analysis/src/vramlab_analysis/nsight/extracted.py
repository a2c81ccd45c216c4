"""The small tables of a capture for publication: a directory of compressed CSV.

    capture.json      schema_version 1, versions, device, span, what was recorded with it
    calls.csv.xz      start, duration, name, ... of each call
    work.csv.xz       kernels, copies, fills
    ranges.csv.xz     NVTX ranges, unless left out
    marks.csv.xz      NVTX marks, unless left out
    own.csv.xz        if a run record was given: the calls of its driver_calls.jsonl that lie in the capture

A report of Nsight Systems holds the environment, the processes and the name of the machine; nothing of them is here.
Times count from the first event. Threads and processes are numbered from 0 in the order in which they appear.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vramlab_analysis import output
from vramlab_analysis.errors import AnalysisError, check_version, found, read_bytes, read_json
from vramlab_analysis.nsight.capture import Call, Capture, Mark, Overhead, Range, Work

SCHEMA_VERSION = 1

CALLS = ("start", "duration", "name", "thread", "process", "correlation", "ok", "stream", "device", "bytes", "event")
WORK = ("start", "duration", "kind", "name", "device", "stream", "process", "correlation", "bytes", "pageable")
RANGES = ("start", "duration", "text", "thread")
MARKS = ("time", "text", "thread")
AFTER = "after"
OWN = ("start", "duration", "blocked", "call", "kernel", "bytes", "stream", "pages", "path")


class _Numbers:
    """Small numbers instead of ids that identify the machine."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def __call__(self, value: int | None) -> int | None:
        return None if value is None else self._known.setdefault(value, len(self._known))


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """A compressed CSV, the same bytes for the same rows. None is an empty field.

    The first column is a time. It is written as `after`, the time after that of the row before, which is shorter.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([AFTER, *list(columns)[1:]])
    before = 0
    for time, *others in rows:
        writer.writerow([time - before, *others])
        before = time
    path.write_bytes(lzma.compress(text.getvalue().encode(), preset=6 | lzma.PRESET_EXTREME))


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Rows of a compressed CSV with exactly these columns, the first as a time again."""
    gzipped = path.with_suffix(".gz")  # extracted before `after` was written
    path = gzipped if gzipped.is_file() and not path.is_file() else path
    rows = csv.reader(io.StringIO(read_bytes(path).decode()))
    expected = columns if path == gzipped else (AFTER, *columns[1:])
    names = next(rows, [])
    if tuple(names) != expected:
        raise AnalysisError(
            f"{path}: has the columns {', '.join(names) or 'none'} and not {', '.join(expected)}; extract it again."
        )
    before = 0
    for number, row in enumerate(rows, 2):
        if len(row) != len(columns):
            raise AnalysisError(
                f"{path}: line {number} has {len(row)} fields and not {len(columns)}; was the file cut off?"
            )
        if path != gzipped:
            before += int(row[0])
            row[0] = str(before)
        yield row


def write(capture: Capture, folder: Path, own: Any = None, ranges: bool = True) -> list[Path]:
    """Writes a capture, and the own trace that was recorded with it (`own_trace.OwnTrace`); returns the files.

    Without `ranges` there are none of NVTX, which are a third of the size. The directory must not exist or be
    empty; it is written atomically.
    """
    if folder.is_symlink():
        raise AnalysisError(f"{folder}: is a symbolic link; name the directory itself.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AnalysisError(f"{folder}: already exists; choose another directory, or remove it.")
    output.folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent) as part:
        _tables(capture, Path(part) / "whole", own, ranges)
        if folder.exists():
            folder.rmdir()
        (Path(part) / "whole").rename(folder)
    return sorted(folder.iterdir())


def _tables(capture: Capture, partial: Path, own: Any, ranges: bool) -> None:
    partial.mkdir()
    zero = capture.span[0]
    thread, process = _Numbers(), _Numbers()
    for call in capture.calls:
        process(call.process)
        thread(call.thread)
    write_table(partial / "calls.csv.xz", CALLS, (
        (c.start - zero, c.duration, c.name, thread(c.thread), process(c.process), c.correlation, int(c.ok), c.stream,
         c.device, c.bytes, c.event)
        for c in capture.calls
    ))  # fmt: skip
    write_table(partial / "work.csv.xz", WORK, (
        (w.start - zero, w.end - w.start, w.kind, w.name, w.device, w.stream, process(w.process), w.correlation,
         w.bytes, int(w.pageable))
        for w in capture.work
    ))  # fmt: skip
    if ranges:
        rows = ((r.start - zero, r.end - r.start, r.text, thread(r.thread)) for r in capture.ranges)
        write_table(partial / "ranges.csv.xz", RANGES, rows)
        moments = ((m.time - zero, m.text, thread(m.thread)) for m in capture.marks if m.time >= zero)
        write_table(partial / "marks.csv.xz", MARKS, moments)
    about: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **capture.source,
        "span_ns": capture.span[1] - zero,
        "threads": {str(thread(key)): name for key, name in capture.threads.items()},
        "streams": {str(key): name for key, name in capture.streams.items()},
        # Intervals of the profiler: start, end, thread.
        "overhead": [[o.start - zero, o.end - zero, thread(o.thread)] for o in capture.overhead if o.start >= zero],
        "notes": capture.notes,
    }
    if own is not None:
        about["own"] = own.about
        number = {
            id: place
            for place, id in enumerate(dict.fromkeys(call.stream for call in own.calls if call.stream is not None))
        }
        first = own.calls[0].start if own.calls else 0
        write_table(partial / "own.csv.xz", OWN, (
            (o.start - first, o.duration, o.metered, o.call, o.kernel, o.bytes,
             None if o.stream is None else number[o.stream], int(o.pages), o.path)
            for o in own.calls
        ))  # fmt: skip
    (partial / "capture.json").write_text(json.dumps(about, indent=2) + "\n")


def read(folder: Path) -> Capture:
    """Reads a directory that `write` wrote.

    Raises AnalysisError for another directory.
    """
    about = describe(folder)

    def optional(text: str) -> int | None:
        return int(text) if text else None

    def table(name: str, columns: tuple[str, ...], make: Callable[[list[str]], Any]) -> list[Any]:
        path = folder / name
        if name in ("ranges.csv.xz", "marks.csv.xz") and found(path.with_suffix("")) is None:
            return []
        try:
            return [make(row) for row in read_table(path, columns)]
        except ValueError as error:
            raise AnalysisError(f"{path}: {error}; was the file changed by hand?") from error

    calls = table("calls.csv.xz", CALLS, lambda r: Call(
        start=int(r[0]), end=int(r[0]) + int(r[1]), name=r[2], thread=int(r[3]), process=int(r[4]),
        correlation=int(r[5]), ok=r[6] == "1",
        stream=optional(r[7]), device=optional(r[8]), bytes=optional(r[9]), event=optional(r[10]),
    ))  # fmt: skip
    work = table("work.csv.xz", WORK, lambda r: Work(
        start=int(r[0]), end=int(r[0]) + int(r[1]), kind=r[2], name=r[3], device=int(r[4]), stream=int(r[5]),
        process=int(r[6]), correlation=int(r[7]), bytes=optional(r[8]), pageable=r[9] == "1",
    ))  # fmt: skip
    ranges = table("ranges.csv.xz", RANGES, lambda r: Range(int(r[0]), int(r[0]) + int(r[1]), r[2], int(r[3])))
    marks = table("marks.csv.xz", MARKS, lambda r: Mark(int(r[0]), r[1], int(r[2])))
    notes = list(about.get("notes", []))
    if found(folder / "ranges.csv") is None:
        notes.append("The capture was extracted without NVTX ranges, so calls have no place in the run.")
    source: dict[str, Any] = {key: about[key] for key in ("nsight_systems", "export_schema", "devices") if key in about}
    overhead = [Overhead(*one) for one in about.get("overhead", [])]
    return Capture(
        overhead=overhead, calls=calls, work=work, ranges=ranges, marks=marks, source=source, notes=notes,
        threads={int(key): name for key, name in about.get("threads", {}).items()},
        streams={int(key): name for key, name in about.get("streams", {}).items()}, path=str(folder),
    )  # fmt: skip


def describe(folder: Path) -> dict[str, Any]:
    """capture.json of a directory."""
    path = folder / "capture.json"
    if not path.is_file():
        raise AnalysisError(
            f"{folder}: no tables of a capture (no capture.json); make them with "
            "`vramlab-analysis nsight extract EXPORT.sqlite -o FOLDER`."
        )
    about = check_version(path, read_json(path), "tables of a capture")
    for key, fits in _DESCRIBED.items():
        if key in about and not fits(about[key]):
            raise AnalysisError(
                f"{path}: {key} is not what `vramlab-analysis nsight extract` writes; extract it again."
            )
    return about


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _names(value: Any) -> bool:
    return isinstance(value, dict) and all(
        key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20 and isinstance(name, str)
        for key, name in value.items()
    )


# Columns used in computations, with their types.
_DESCRIBED: dict[str, Callable[[Any], bool]] = {
    "span_ns": _whole,
    "threads": _names,
    "streams": _names,
    "overhead": lambda value: (
        isinstance(value, list)
        and all(isinstance(one, list) and len(one) == 3 and all(map(_whole, one)) for one in value)
    ),
    "notes": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "own": lambda value: (
        isinstance(value, dict)
        and isinstance(value.get("settings", {}), dict)
        and isinstance(value.get("idle_costs", {}), (dict, type(None)))
    ),
}
