"""An allocator's trace: operations of a run (`trace.jsonl`), lifetimes of blocks and segments, levels over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from vramlab_analysis.errors import AnalysisError, read_bytes

TRACE_TYPES = {
    "time_ns": pl.Int64,
    "action": pl.String,
    "addr": pl.UInt64,
    "size": pl.Int64,
    "block": pl.Int64,
    "stream": pl.Int64,
    "path": pl.String,
}


def load_trace(path: str | Path) -> pl.DataFrame:
    """The operations of `trace.jsonl`, plain or gzipped, in order.

    Raises AnalysisError when it cannot be read.
    """
    return parse_trace(Path(path), read_bytes(Path(path)))


def parse_trace(path: Path, data: bytes) -> pl.DataFrame:
    """As `load_trace`, from the file's contents."""
    from vramlab_analysis.records import read_lines

    trace = read_lines(path, TRACE_TYPES, required=("time_ns", "action", "size", "block", "stream", "path"), data=data)
    nowhere = trace.select((pl.col("addr").is_null() & (pl.col("action") != "oom")).arg_true()).to_series()
    if len(nowhere):
        raise AnalysisError(
            f"{path}: line {int(nowhere[0]) + 1} has no addr; is it another kind of file, or truncated?"
        )
    return trace


def lives(trace: pl.DataFrame) -> pl.DataFrame:
    """One row for each block: `addr`, `size`, `block`, `stream`, `path`, `start_ns`, `end_ns` (null: never freed).

    The free of an address precedes the next allocation there, so the address determines which free belongs to which
    allocation.
    """
    events = trace.filter(pl.col("action").is_in(["alloc", "free_requested"])).with_columns(
        end_ns=pl.when(pl.col("action").shift(-1).over("addr") == "free_requested").then(
            pl.col("time_ns").shift(-1).over("addr")
        )
    )
    blocks = events.filter(pl.col("action") == "alloc")
    if blocks.is_empty():
        raise AnalysisError("the trace has no allocation.")
    return blocks.rename({"time_ns": "start_ns"}).drop("action")


def segments(calls: pl.DataFrame) -> pl.DataFrame:
    """Memory obtained from the device in one call, from `driver_calls.jsonl`: `addr`, `bytes`, `start_ns`, `end_ns`.

    A CUDA memory pool has no segments, so `stream-ordered` has none.
    """
    events = calls.filter(pl.col("call").is_in(["mem_alloc", "mem_free"]) & pl.col("ok").fill_null(value=True))
    if events["addr"].has_nulls() or events.filter(pl.col("call") == "mem_alloc")["bytes"].has_nulls():
        raise AnalysisError("driver_calls.jsonl has an allocation or a free without address or size; is it truncated?")
    events = events.with_columns(at=pl.col("start_ns") + pl.col("total_ns")).with_columns(
        end_ns=pl.when(pl.col("call").shift(-1).over("addr") == "mem_free").then(pl.col("at").shift(-1).over("addr"))
    )
    return events.filter(pl.col("call") == "mem_alloc").select(
        "addr", "bytes", pl.col("at").alias("start_ns"), "end_ns"
    )


def levels(trace: pl.DataFrame) -> pl.DataFrame:
    """Bytes in live blocks after each operation: `time_ns`, `requested` and `allocated` (after rounding)."""
    events = trace.filter(pl.col("action").is_in(["alloc", "free_requested"]))
    sign = pl.when(pl.col("action") == "alloc").then(1).otherwise(-1)
    return events.select(
        "time_ns",
        requested=(pl.col("size") * sign).cum_sum(),
        allocated=(pl.col("block") * sign).cum_sum(),
    )


def reserved(calls: pl.DataFrame) -> pl.DataFrame:
    """Reserved bytes after each driver call that allocated or released memory: `time_ns`, `reserved`."""
    held = segments(calls)
    ends = held.filter(pl.col("end_ns").is_not_null())
    changes = pl.concat(
        [
            held.select(time_ns="start_ns", change="bytes"),
            ends.select(time_ns="end_ns", change=-pl.col("bytes")),
        ]
    ).sort("time_ns", maintain_order=True)
    return changes.select("time_ns", reserved=pl.col("change").cum_sum())


def compacted(addr: Any, size: Any, gap: int = 2 * 2**20) -> tuple[Any, list[tuple[int, int, int]]]:
    """Addresses without the empty space between regions, so that a block map shows memory only.

    Returns the compacted addresses and the regions as (first address, bytes, place). Blocks closer than `gap` bytes
    share a region.
    """
    addr, size = np.asarray(addr, dtype=np.uint64), np.asarray(size, dtype=np.uint64)
    order = np.argsort(addr, kind="stable")
    ends = np.maximum.accumulate((addr + size)[order])
    breaks = np.flatnonzero(addr[order][1:] > ends[:-1] + np.uint64(gap)) + 1
    starts = addr[order][np.concatenate([[0], breaks])]
    stops = ends[np.concatenate([breaks - 1, [len(ends) - 1]]).astype(int)]
    lengths = stops - starts
    places = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint64)
    region = np.searchsorted(starts, addr, side="right") - 1
    out = (addr - starts[region] + places[region]).astype(np.int64)
    return out, [(int(a), int(n), int(p)) for a, n, p in zip(starts, lengths, places, strict=True)]


def window(steps: pl.DataFrame, first: int, last: int) -> tuple[int, int]:
    """Times in ns from the end of the step preceding `first` to the end of `last` (numbers in the run, from 0).

    No step precedes step 0, so its window begins with the run.
    """
    times = dict(steps.select("index", "host_ns").iter_rows())
    ends = [at for at in range(first, last + 1) if at in times]
    if not ends:
        counted = f"{steps.height} step{'' if steps.height == 1 else 's'}"
        raise AnalysisError(f"the run has {counted}, so steps {first} to {last} cannot be shown.")
    return (int(times[first - 1]) if first > 0 else 0), int(times[ends[-1]])
