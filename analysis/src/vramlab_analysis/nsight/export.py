"""Reads an SQLite export of Nsight Systems, schema of 2023.4 to 2025.6.

Tables exist only if something was recorded for them, and columns differ between versions, so both are looked
up before they are asked for. Order of rows is never relied on.

Source: "SQLite Schema Reference" of the Nsight Systems user guide <https://docs.nvidia.com/nsight-systems/UserGuide/>.
"""

from __future__ import annotations

import sqlite3
import urllib.parse
from pathlib import Path
from typing import Any

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight import names
from vramlab_analysis.nsight.capture import Call, Capture, Mark, Overhead, Range, Work

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
EVENT = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
MEMORY = "CUDA_GPU_MEMORY_USAGE_EVENTS"
NVTX = "NVTX_EVENTS"
# Names of streams from programs, in exports of 2023.4.
NVTX_STREAMS = "TARGET_INFO_NVTX_CUDA_STREAM"
OVERHEAD = "PROFILER_OVERHEAD"

# Of ENUM_NSYS_EVENT_TYPE.
MARK, THREAD_NAME, PUSH_POP, STREAM_NAME = 34, 39, 59, 99
# Of ENUM_CUDA_MEM_KIND.
PAGEABLE, DEVICE_MEMORY = 0, 2
# Numbers that mean no stream.
NO_STREAM = 0xFFFFFFFF
COPIES = {1: "copy host to device", 2: "copy device to host", 8: "copy device to device", 10: "copy between devices"}

CALLS_SQL = """
SELECT r.start, r.end, {name} AS name, r.globalTid AS thread, r.globalTid >> 24 AS process,
       r.correlationId AS correlation, {result} AS result
FROM CUPTI_ACTIVITY_KIND_RUNTIME AS r {join}
WHERE r.end IS NOT NULL
ORDER BY r.start, r.correlationId
"""

WORK_SQL = """
SELECT w.start, w.end, {name} AS name, w.deviceId AS device, w.streamId AS stream, {process} AS process,
       w.correlationId AS correlation, {bytes} AS bytes, {copy} AS copy, {pageable} AS pageable
FROM {table} AS w {join}
WHERE w.end IS NOT NULL
ORDER BY w.start, w.correlationId
"""

# The record of the synchronise names the awaited event; handles of events are reused, so newer exports number the uses.
SYNC_SQL = """
SELECT {process} AS process, s.correlationId AS correlation, s.streamId AS stream, s.deviceId AS device,
       {event} AS event
FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION AS s
"""

EVENT_SQL = """
SELECT {process} AS process, e.correlationId AS correlation, e.streamId AS stream, e.deviceId AS device,
       {event} AS event
FROM CUPTI_ACTIVITY_KIND_CUDA_EVENT AS e
"""

# One call may have several records; only device memory counts.
MEMORY_SQL = """
SELECT {process} AS process, m.correlationId AS correlation, MAX(m.bytes) AS bytes, MAX(m.deviceId) AS device
FROM CUDA_GPU_MEMORY_USAGE_EVENTS AS m
WHERE m.correlationId <> 0 AND m.memKind = {kind}
GROUP BY 1, 2
"""

RANGES_SQL = """
SELECT n.start, n.end, n.eventType AS type, {text} AS text, n.globalTid AS thread, {end_thread} AS end_thread,
       {stream} AS stream
FROM NVTX_EVENTS AS n {join}
WHERE n.eventType IN ({types})
ORDER BY n.start
"""


OVERHEAD_SQL = """
SELECT o.start, o.end, o.globalTid AS thread
FROM PROFILER_OVERHEAD AS o
WHERE o.end IS NOT NULL
ORDER BY o.start
"""


class _Tables:
    """The tables and columns of an export."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
            "UNION SELECT name FROM sqlite_temp_master WHERE type IN ('table', 'view')"
        )
        self.names = {row[0] for row in found}
        self._columns: dict[str, set[str]] = {}

    def __contains__(self, table: str) -> bool:
        return table in self.names

    def has(self, table: str, column: str) -> bool:
        if table not in self._columns:
            rows = self.connection.execute(f'PRAGMA table_info("{table}")')
            self._columns[table] = {row[1] for row in rows}
        return column in self._columns[table]

    def first(self, table: str, alias: str, *columns: str, otherwise: str = "NULL") -> str:
        """SQL of the first of these columns that the table has."""
        return next((f"{alias}.{column}" for column in columns if self.has(table, column)), otherwise)

    def process(self, table: str, alias: str) -> str:
        """SQL of the process that a record belongs to."""
        for column in ("globalPid", "globalTid"):
            if self.has(table, column):
                return f"{alias}.{column} >> 24"
        return "0"

    def rows(self, sql: str) -> list[dict[str, Any]]:
        cursor = self.connection.execute(sql)
        keys = [column[0] for column in cursor.description]
        return [{key: row[place] for place, key in enumerate(keys)} for row in cursor]


def read(path: str | Path) -> Capture:
    """Reads an export.

    Raises AnalysisError when the file is not an SQLite database or not an export of Nsight Systems.
    """
    path = Path(path)
    uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(uri, uri=True)
        try:
            return read_connection(connection, str(path))
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        hint = (
            " (.nsys-rep is not read: `nsys export --type sqlite` makes a file that is)"
            if path.suffix == ".nsys-rep"
            else ""
        )
        raise AnalysisError(f"{path}: cannot be read as an SQLite export of Nsight Systems: {error}{hint}.") from error


def read_connection(connection: sqlite3.Connection, path: str = "") -> Capture:
    """Reads an open export."""
    tables = _Tables(connection)
    known = [table for table in (RUNTIME, KERNEL, MEMCPY, MEMSET, NVTX) if table in tables]
    if not known:
        raise AnalysisError(
            f"{path}: has neither calls nor kernels nor ranges, so it is no SQLite export of Nsight Systems or of a "
            "capture in which nothing happened; capture with experiments/nsight/capture.sh."
        )
    notes = [sentence for table, sentence in _MISSING.items() if table not in tables]
    strings = "StringIds" in tables
    if not strings:
        notes.append(
            "The export has no table StringIds, so calls and kernels have no names; export it again with all tables."
        )
    calls = _calls(tables, strings)
    work = [
        one
        for table, kind in ((KERNEL, "kernel"), (MEMCPY, "memcpy"), (MEMSET, "memset"))
        for one in _work(tables, table, kind, strings)
    ]
    ranges, marks, threads, streams = _nvtx(tables, strings)
    if NVTX in tables and not ranges:
        notes.append("There are no NVTX ranges in the capture, so calls have no place in the run.")
    overhead = [Overhead(**row) for row in tables.rows(OVERHEAD_SQL)] if OVERHEAD in tables else []
    return Capture(
        overhead=overhead, calls=calls, work=work, ranges=ranges, marks=marks, threads=threads, streams=streams,
        source=_source(tables), notes=notes, path=path,
    )  # fmt: skip


_MISSING = {
    RUNTIME: "There are no CUDA calls in the capture (CUPTI_ACTIVITY_KIND_RUNTIME), so nothing can be said about "
    "waiting; capture with --trace=cuda.",
    KERNEL: "There are no kernels in the capture (CUPTI_ACTIVITY_KIND_KERNEL), so what a call waited for is known of "
    "copies and fills alone.",
    SYNC: "There are no records of synchronising (CUPTI_ACTIVITY_KIND_SYNCHRONIZATION), so a wait for one stream is "
    "taken for one for the device.",
    NVTX: "There are no NVTX ranges in the capture (NVTX_EVENTS), so calls have no place in the run; capture with "
    "--trace=cuda,nvtx.",
}  # copies, fills, events and memory records are often absent because there were none


def _calls(tables: _Tables, strings: bool) -> list[Call]:
    if RUNTIME not in tables:
        return []
    sql = CALLS_SQL.format(
        name="ids.value" if strings else "'call ' || r.nameId",
        join="LEFT JOIN StringIds AS ids ON ids.id = r.nameId" if strings else "",
        result=tables.first(RUNTIME, "r", "returnValue", otherwise="0"),
    )
    calls = [
        Call(
            start=row["start"], end=row["end"], name=names.base_name(row["name"] or "unnamed call"),
            thread=row["thread"], process=row["process"], correlation=row["correlation"], ok=not row["result"],
        )
        for row in tables.rows(sql)
    ]  # fmt: skip
    at = {(call.process, call.correlation): call for call in calls}
    for table, template in ((EVENT, EVENT_SQL), (SYNC, SYNC_SQL)):
        if table not in tables:
            continue
        alias = "e" if table == EVENT else "s"
        event = tables.first(table, alias, "eventSyncId", "eventId")
        for row in tables.rows(template.format(process=tables.process(table, alias), event=event)):
            if call := at.get((row["process"], row["correlation"])):
                call.stream = None if row["stream"] == NO_STREAM else row["stream"]
                call.device, call.event = row["device"], row["event"]
    if MEMORY in tables:
        sql = MEMORY_SQL.format(process=tables.process(MEMORY, "m"), kind=DEVICE_MEMORY)
        for row in tables.rows(sql):
            if call := at.get((row["process"], row["correlation"])):
                call.bytes, call.device = row["bytes"], row["device"]
    return calls


def _work(tables: _Tables, table: str, kind: str, strings: bool) -> list[Work]:
    if table not in tables:
        return []
    name, join = f"'{kind}'", ""
    if kind == "kernel":
        short = tables.first(table, "w", "shortName", "demangledName", otherwise="0")
        name, join = f"'kernel ' || {short}", ""
        if strings:
            name, join = "ids.value", f"LEFT JOIN StringIds AS ids ON ids.id = {short}"
    kinds = [column for column in ("srcKind", "dstKind") if tables.has(table, column)]
    sql = WORK_SQL.format(
        table=table, name=name, join=join, process=tables.process(table, "w"),
        bytes=tables.first(table, "w", "bytes"), copy=tables.first(table, "w", "copyKind"),
        pageable=" OR ".join(f"w.{column} = {PAGEABLE}" for column in kinds) or "0",
    )  # fmt: skip
    return [
        Work(
            start=row["start"], end=row["end"], kind=kind, device=row["device"] or 0, stream=row["stream"] or 0,
            name=COPIES.get(row["copy"], "copy") if kind == "memcpy" else row["name"] or "unnamed kernel",
            process=row["process"], correlation=row["correlation"], bytes=row["bytes"], pageable=bool(row["pageable"]),
        )
        for row in tables.rows(sql)
    ]  # fmt: skip


def _nvtx(tables: _Tables, strings: bool) -> tuple[list[Range], list[Mark], dict[int, str], dict[int, str]]:
    threads: dict[int, str] = {}
    streams: dict[int, str] = {}
    ranges: list[Range] = []
    marks: list[Mark] = []
    if strings and "ThreadNames" in tables and RUNTIME in tables:
        rows = tables.rows(
            "SELECT t.globalTid AS thread, ids.value AS name "
            "FROM ThreadNames AS t JOIN StringIds AS ids ON ids.id = t.nameId "
            f"WHERE t.globalTid IN (SELECT globalTid FROM {RUNTIME})"
        )
        threads = {row["thread"]: row["name"] for row in rows}
    if NVTX_STREAMS in tables:
        named = tables.rows(f"SELECT streamId AS stream, name FROM {NVTX_STREAMS} WHERE name IS NOT NULL")
        streams = {row["stream"]: row["name"] for row in named}
    if NVTX not in tables:
        return ranges, marks, threads, streams
    registered = strings and tables.has(NVTX, "textId")
    sql = RANGES_SQL.format(
        text="COALESCE(n.text, ids.value)" if registered else "n.text",
        join="LEFT JOIN StringIds AS ids ON ids.id = n.textId" if registered else "",
        end_thread=tables.first(NVTX, "n", "endGlobalTid"),
        stream=tables.first(NVTX, "n", "uint64Value"),
        types=f"{MARK}, {THREAD_NAME}, {PUSH_POP}, {STREAM_NAME}",
    )
    for row in tables.rows(sql):
        text = row["text"] or "unnamed range"
        if row["type"] == THREAD_NAME:
            threads[row["thread"]] = text
        elif row["type"] == STREAM_NAME:
            # Some tools write the handle instead of the number; other tables do not use handles.
            streams[row["stream"] or 0] = text
        elif row["type"] == MARK:
            marks.append(Mark(row["start"], text, row["thread"]))
        elif row["end"] is not None and row["end_thread"] in (None, row["thread"]):
            ranges.append(Range(row["start"], row["end"], text, row["thread"]))
    return ranges, marks, threads, streams


def _source(tables: _Tables) -> dict[str, Any]:
    """Versions and device, without the machine or its environment."""
    source: dict[str, Any] = {}
    if "META_DATA_EXPORT" in tables:
        found = dict(tables.connection.execute("SELECT name, value FROM META_DATA_EXPORT"))
        source["nsight_systems"] = found.get("EXPORT_PRODUCT_VERSION")
        source["export_schema"] = found.get("EXPORT_SCHEMA_VERSION")
    if "TARGET_INFO_GPU" in tables and tables.has("TARGET_INFO_GPU", "name"):
        source["devices"] = [row["name"] for row in tables.rows("SELECT name FROM TARGET_INFO_GPU ORDER BY id")]
    return source
