"""Makes small SQLite exports with the schemas of several versions of Nsight Systems."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

PID = 1234
THREAD = (PID << 24) | 77
OTHER_THREAD = (PID << 24) | 78
NO_STREAM = 0xFFFFFFFF

OLD, NEW = "2023.4", "2025.6"
COLUMNS = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, eventClass, globalTid, correlationId, nameId, returnValue, callchainId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, contextId, streamId, correlationId, globalPid, "
    "demangledName, shortName, mangledName, gridX, blockX",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, contextId, streamId, correlationId, globalPid, "
    "bytes, copyKind, srcKind, dstKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start, end, deviceId, contextId, streamId, correlationId, globalPid, value, bytes",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start, end, deviceId, contextId, streamId, correlationId, globalPid, "
    "syncType, eventId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "deviceId, contextId, streamId, correlationId, globalPid, eventId",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "start, globalPid, deviceId, contextId, address, bytes, memKind, "
    "memoryOperationType, name, correlationId",
    "NVTX_EVENTS": "start, end, eventType, rangeId, category, color, text, globalTid, endGlobalTid, textId, domainId, "
    "uint64Value",
    "PROFILER_OVERHEAD": "start, end, globalTid, nameId, returnValue",
    "TARGET_INFO_NVTX_CUDA_STREAM": "name, hwId, vmId, processId, deviceId, contextId, streamId",
}
# What newer versions add; only some of it matters here, and what does not must not hurt either.
ADDED = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "greenContextId, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "greenContextId, copyCount",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "deprecatedSyncType, eventSyncId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "eventSyncId, timestamp",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "streamId",
    "NVTX_EVENTS": "binaryData",
    "PROFILER_OVERHEAD": "overheadType",
}


class Export:
    """An export, written table by table; tables without rows are missing."""

    def __init__(self, path: Path, version: str = OLD) -> None:
        self.path = path
        self.version = version
        self.db = sqlite3.connect(path)
        self.tables: set[str] = set()
        self.strings: dict[str, int] = {}
        self.correlation = 100
        self.insert("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value=version)

    def insert(self, table: str, **values: Any) -> None:
        if table not in self.tables:
            columns = COLUMNS[table]
            if self.version == NEW and table in ADDED:
                columns += ", " + ADDED[table]
            self.db.execute(f"CREATE TABLE {table} ({columns})")
            self.tables.add(table)
        names = ", ".join(values)
        self.db.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", list(values.values()))

    def string(self, text: str) -> int:
        if text not in self.strings:
            self.strings[text] = len(self.strings) + 1
            self.insert("StringIds", id=self.strings[text], value=text)
        return self.strings[text]

    def call(self, name: str, start: int, end: int, thread: int = THREAD, bytes: int | None = None) -> int:
        self.correlation += 1
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=1, globalTid=thread,
            correlationId=self.correlation, nameId=self.string(name), returnValue=0,
        )  # fmt: skip
        if bytes is not None:
            self.insert(
                "CUDA_GPU_MEMORY_USAGE_EVENTS", start=end, globalPid=PID << 24, deviceId=0, bytes=bytes, memKind=2,
                memoryOperationType=1, correlationId=self.correlation,
            )  # fmt: skip
        return self.correlation

    def kernel(
        self, name: str, launch: tuple[int, int], run: tuple[int, int], stream: int = 7, thread: int = THREAD
    ) -> int:
        correlation = self.call("cuLaunchKernel", *launch, thread=thread)
        self.run(name, correlation, run, stream)
        return correlation

    def run(self, name: str, correlation: int, run: tuple[int, int], stream: int = 7) -> None:
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL", start=run[0], end=run[1], deviceId=0, contextId=1, streamId=stream,
            correlationId=correlation, globalPid=PID << 24, demangledName=self.string(name + "(float*)"),
            shortName=self.string(name), mangledName=self.string("_Z" + name),
        )  # fmt: skip

    def copy(self, call: str, span: tuple[int, int], run: tuple[int, int], kind: int = 2, host: int = 1) -> int:
        """`host` is the memory's kind on the host's side: 0 pageable, 1 pinned."""
        correlation = self.call(call, *span)
        self.insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=run[0], end=run[1], deviceId=0, contextId=1, streamId=7,
            correlationId=correlation, globalPid=PID << 24, bytes=4096, copyKind=kind,
            srcKind=2 if kind == 2 else host, dstKind=host if kind == 2 else 2,
        )  # fmt: skip
        return correlation

    def sync(self, correlation: int, kind: int, stream: int = NO_STREAM, event: int = 0, use: int = 0) -> None:
        values = {"syncType": kind, "streamId": stream, "eventId": event}
        if self.version == NEW:
            values["eventSyncId"] = use
        self.insert(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=0, end=0, deviceId=0, contextId=1, globalPid=PID << 24,
            correlationId=correlation, **values,
        )  # fmt: skip

    def record(self, correlation: int, stream: int, event: int, use: int = 0) -> None:
        values = {"eventId": event}
        if self.version == NEW:
            values["eventSyncId"] = use
        self.insert(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT", deviceId=0, contextId=1, streamId=stream, correlationId=correlation,
            globalPid=PID << 24, **values,
        )  # fmt: skip

    def range(self, text: str, start: int, end: int, thread: int = THREAD, registered: bool = False) -> None:
        named = {"textId": self.string(text)} if registered else {"text": text}
        self.insert("NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=thread, domainId=0, **named)

    def nvtx(self, type: int, start: int, text: str, thread: int = THREAD, **values: Any) -> None:
        self.insert("NVTX_EVENTS", start=start, eventType=type, text=text, globalTid=thread, domainId=0, **values)

    def done(self) -> Path:
        self.db.commit()
        self.db.close()
        return self.path


def training(path: Path, version: str = OLD, steps: int = 25) -> Path:
    """A capture in which each step launches a kernel, allocates while it runs, frees and waits, and frees again.

    In each step of 1,000 ns: launch 0..10, kernel 20..200, cuMemAlloc 30..40, cuMemFree 50..210 (waits 150, returns in
    10), cuMemFree 300..304 (nothing queued, 4 ns). So a wait is 150, and 150 + 10 - 4 = 156 are lost.
    """
    export = Export(path, version)
    export.range("epoch 1", 0, steps * 1000)
    for step in range(steps):
        at = step * 1000
        export.range(f"step {step + 1}", at, at + 900)
        export.range("forward", at, at + 400, registered=step % 2 == 1)
        export.range("layer 1", at, at + 400)
        export.range("relu", at, at + 12)
        export.range("free 4 KiB", at + 45, at + 215)
        export.nvtx(34, at + 213, "driver_free")
        export.kernel("relu", (at, at + 10), (at + 20, at + 200))
        export.call("cuMemAlloc_v2", at + 30, at + 40, bytes=4096)
        export.call("cuMemFree_v2", at + 50, at + 210, bytes=4096)
        export.call("cuMemFree_v2", at + 300, at + 304, bytes=512)
    return export.done()
