"""Latency histograms: HdrHistogram's interval log (`latency.hlog`), as written by its Java and Rust libraries."""

from __future__ import annotations

import binascii
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from hdrh.histogram import HdrHistogram

from vramlab_analysis.errors import AnalysisError, printable, read_bytes

# Paths on which an allocator calls the driver: expected during a cold start, not in a steady state.
COLD_PATHS = ("driver_alloc", "driver_free", "collect", "steal", "retry")
# The number of buckets of three digits up to a minute.
MOST_BUCKETS = 1_000_000


@dataclass(frozen=True)
class Recorded:
    """One line of a log: values in ns of one operation and path, in one interval."""

    operation: str
    path: str
    start_s: float
    length_s: float
    counts: np.ndarray[Any, np.dtype[np.int64]]
    values: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def count(self) -> int:
        """Number of operations."""
        return int(self.counts.sum())


def _decode(path: Path, line: int, text: str) -> tuple[Any, Any]:
    try:
        histogram = HdrHistogram.decode(text)
    except (binascii.Error, zlib.error, ValueError, TypeError, IndexError, EOFError) as error:
        raise AnalysisError(f"{path}: line {line}: not a histogram ({error}).") from error
    except Exception as error:  # its own exceptions have no narrower base
        raise AnalysisError(f"{path}: line {line}: not a histogram ({type(error).__name__}).") from error
    # Only non-empty buckets; its own iterator visits every bucket up to the greatest value.
    if histogram.encoder.payload.counts_len > MOST_BUCKETS:
        raise AnalysisError(f"{path}: line {line}: a histogram of {histogram.encoder.payload.counts_len:,} buckets.")
    counts = np.array([histogram.get_count_at_index(index) for index in range(histogram.encoder.payload.counts_len)])
    held = np.flatnonzero(counts)
    values = [histogram.get_highest_equivalent_value(histogram.get_value_from_index(int(index))) for index in held]
    return np.array(values, dtype=np.int64), counts[held].astype(np.int64)


def load(path: str | Path) -> list[Recorded]:
    """The histograms of a log, in its order.

    Raises AnalysisError when it is not a log or has no histogram.
    """
    return parse(Path(path), read_bytes(Path(path)))


def parse(path: Path, data: bytes) -> list[Recorded]:
    """As `load`, from the file's contents."""
    out = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith(("#", '"StartTimestamp')):
            continue
        fields = line.split(",")
        tag = fields.pop(0).removeprefix("Tag=") if line.startswith("Tag=") else "all.all"
        if len(fields) != 4:
            raise AnalysisError(f"{path}: line {number}: not a line of an HdrHistogram log; is it truncated?")
        operation, _, way = tag.partition(".")
        try:
            start, length = float(fields[0]), float(fields[1])
        except ValueError as error:
            raise AnalysisError(f"{path}: line {number}: its interval is not a number.") from error
        values, counts = _decode(path, number, fields[3])
        if len(counts):
            out.append(Recorded(printable(operation), printable(way), start, length, counts, values))
    if not out:
        raise AnalysisError(f"{path}: no histogram.")
    return out


def merged(recorded: list[Recorded]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and counts of several histograms together, ascending."""
    values = np.concatenate([one.values for one in recorded])
    counts = np.concatenate([one.counts for one in recorded])
    unique, inverse = np.unique(values, return_inverse=True)
    return unique, np.bincount(inverse, weights=counts).astype(np.int64)


def phase(one: Recorded, first_start: float, several: bool) -> str:
    """`cold` or `steady`. The first of several intervals is cold; with one interval the path decides."""
    if several:
        return "cold" if one.start_s <= first_start else "steady"
    return "cold" if one.path in COLD_PATHS else "steady"


def spectrum(recorded: list[Recorded], by: str = "path") -> pl.DataFrame:
    """Percentile spectrum: for each operation and `by` (`path`, `phase` or `all`) the value below each share.

    Columns: `operation`, `group`, `percentile` (0 to 1, of operations at or below), `value_ns`, `count` (of the group).
    """
    starts = {one.start_s for one in recorded}
    first, several = min(starts, default=0.0), len(starts) > 1
    groups: dict[tuple[str, str], list[Recorded]] = {}
    for one in recorded:
        name = {"path": one.path, "all": "all", "phase": phase(one, first, several)}[by]
        groups.setdefault((one.operation, name), []).append(one)
    frames = []
    for (operation, name), members in groups.items():
        values, counts = merged(members)
        cumulative = np.cumsum(counts)
        total = int(cumulative[-1])
        # A step function: each value covers the shares from below it to at or below it.
        share = np.concatenate([[0.0], np.repeat(cumulative / total, 2)[:-1]])
        frame = pl.DataFrame({"percentile": share, "value_ns": np.repeat(values, 2)})
        columns = [pl.lit(operation).alias("operation"), pl.lit(name).alias("group"), pl.lit(total).alias("count")]
        frames.append(frame.with_columns(columns))
    return pl.concat(frames)


def phases(recorded: list[Recorded]) -> dict[str, list[Recorded]]:
    """The histograms that are `cold` and those that are `steady`; see `phase`."""
    starts = {one.start_s for one in recorded}
    out: dict[str, list[Recorded]] = {}
    for one in recorded:
        out.setdefault(phase(one, min(starts), len(starts) > 1), []).append(one)
    return dict(sorted(out.items()))


def percentile(recorded: list[Recorded], share: float) -> float:
    """Value in ns that `share` (0 to 1) of all operations do not exceed."""
    values, counts = merged(recorded)
    cumulative = np.cumsum(counts)
    return float(values[np.searchsorted(cumulative, share * cumulative[-1], side="left").clip(max=len(values) - 1)])


def write(path: Path, tagged: dict[str, list[int]]) -> None:
    """Writes a log of one interval from values in ns by tag; for tests and for histograms made elsewhere."""
    lines = ["#[StartTime: 0.000 (seconds since epoch)]"]
    for tag, values in tagged.items():
        histogram = HdrHistogram(1, 60_000_000_000, 3)
        for value in values:
            histogram.record_value(value)
        encoded = histogram.encode()
        text = encoded.decode() if isinstance(encoded, bytes) else encoded
        lines.append(f"Tag={tag},0.000,1.000,{max(values) / 1.0:.3f},{text}")
    path.write_text("\n".join(lines) + "\n")
