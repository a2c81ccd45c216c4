"""Run records: the directories that `trainer` and the PyTorch programs write, as data frames.

`schema.md` beside this file describes every field.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from vramlab_analysis import histograms, schema
from vramlab_analysis.errors import AnalysisError, found, printable, read_bytes

STEP_TYPES = {
    "epoch": pl.Int64,
    "step": pl.Int64,
    "rows": pl.Int64,
    "loss": pl.Float64,
    "host_ns": pl.Int64,
    "driver_allocations": pl.Int64,
    "reserved_bytes": pl.Int64,
    "allocated_bytes": pl.Int64,
    "active_bytes": pl.Int64,
    "requested_bytes": pl.Int64,
}
EPOCH_TYPES = {
    "epoch": pl.Int64,
    "steps": pl.Int64,
    "train_loss": pl.Float64,
    "val_loss": pl.Float64,
    "val_accuracy": pl.Float64,
    "wall_s": pl.Float64,
    "device_s": pl.Float64,
    "train_s": pl.Float64,
    "train_device_s": pl.Float64,
    "device_busy_s": pl.Float64,
}
DRIVER_CALL_TYPES = {
    "start_ns": pl.Int64,
    "total_ns": pl.Int64,
    "blocked_ns": pl.Int64,
    "call": pl.String,
    "kernel": pl.String,
    "bytes": pl.Int64,
    "addr": pl.UInt64,
    "stream": pl.Int64,
    "ok": pl.Boolean,
}


@dataclass(frozen=True)
class Run:
    """One run record. `summary.json` is read immediately, the other files on first use."""

    path: Path
    summary: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings in effect."""
        settings: dict[str, Any] = self.summary["settings"]
        return settings

    @property
    def allocator(self) -> str:
        """Name of the allocator; `pytorch` for PyTorch's own."""
        return str(self.settings["allocator"])

    @property
    def arm(self) -> str:
        """The allocator, and for PyTorch the mode: the name that selects a colour in figures."""
        mode = self.settings.get("mode")
        return f"pytorch-{mode}" if self.allocator == "pytorch" and mode else self.allocator

    @property
    def device(self) -> str:
        """Name of the device, such as `NVIDIA H200 (simulated)`."""
        return str(self.summary["device"]["name"])

    @property
    def simulated(self) -> bool:
        """Whether its times are simulated: only driver calls and the device's work take time."""
        return bool(self.summary["device"].get("virtual_time") or self.summary.get("clock") == "virtual")

    @property
    def label(self) -> str:
        """The run in a few words: the settings that a figure should name."""
        settings = self.settings
        words = [self.arm, f"{settings['layers']} layers of {settings['hidden']}", f"batch {settings['batch']}"]
        if settings.get("dtype", "f32") != "f32":
            words.append(str(settings["dtype"]))
        if settings.get("fuse", "none") != "none":
            words.append(f"fuse {settings['fuse']}")
        if settings.get("sync", "never") != "never":
            words.append(f"sync {settings['sync']}")
        return ", ".join(words)

    @property
    def ended(self) -> bool:
        """Whether it completed. A killed run remains `running`."""
        return bool(self.summary["status"] == "finished")

    @cached_property
    def left_out(self) -> list[str]:
        """Files, and parts of files such as `steps.csv:host_ns`, that were left out when the experiment was packed."""
        path = found(self.path.parent.parent / "experiment.json")
        left: list[str] = schema.read(path, "an experiment", schema.EXPERIMENT).get("left_out", []) if path else []
        return left

    def _file(self, name: str, how: str) -> tuple[Path, bytes]:
        """The name and the contents of a file of the record."""
        path = found(self.path / name)
        if path is None:
            how = "it was left out when the experiment was packed" if name in self.left_out else how
            raise AnalysisError(f"{self.path}: no {name} in this run record; {how}.")
        return path, read_bytes(path)

    def has(self, name: str) -> bool:
        """Whether the record has a file of that name, plain or compressed."""
        return found(self.path / name) is not None

    @property
    def has_steps(self) -> bool:
        """Whether the record has a table of steps, which a spec may leave out."""
        return self.has(self.summary.get("step_losses", "steps.csv"))

    @cached_property
    def epochs(self) -> pl.DataFrame:
        """One row for each epoch, without its driver calls.

        Raises AnalysisError when no epoch ended.
        """
        rows = [{k: v for k, v in epoch.items() if k in EPOCH_TYPES} for epoch in self.summary["epochs"]]
        if not rows:
            status = self.summary["status"]
            why = {
                "running": "it was killed, or is still running",
                "interrupted": "it was interrupted",
                "failed": f"it failed: {self.summary.get('error', 'no reason given')}",
            }.get(status, f"its status is {status}")
            raise AnalysisError(f"{self.path}: no epoch was completed ({why}).")
        present = [key for key in EPOCH_TYPES if any(key in row for row in rows)]
        return pl.DataFrame(rows, schema={key: EPOCH_TYPES[key] for key in present}, strict=False)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """`steps.csv`, with `index`, the step's number in the run from 0. Columns that the record lacks are absent, and
        so are those that were left out when it was packed.

        Raises AnalysisError when the file is missing, or a row is cut off or no number.
        """
        why = "it was not kept" if self.ended else "it was killed before its first step"
        name = self.summary.get("step_losses", "steps.csv")
        path, text = self._file(name, why)
        try:
            frame = pl.read_csv(io.BytesIO(text), schema_overrides=STEP_TYPES, null_values=[""])
        except pl.exceptions.PolarsError as error:
            raise AnalysisError(f"{path}: not the table of steps ({str(error).splitlines()[0][:120]}).") from error
        needed = {"epoch", "step", "loss", "host_ns"} - {part.removeprefix(f"{name}:") for part in self.left_out}
        missing = needed - set(frame.columns)
        if missing:
            raise AnalysisError(f"{path}: not the table of steps, columns {', '.join(sorted(missing))} are missing.")
        if frame.is_empty():
            raise AnalysisError(f"{path}: no step was completed.")
        if "loss" in frame.columns:
            if frame["loss"].is_null().all():
                raise AnalysisError(f"{path}: no step has a loss.")
            if ((frame["loss"].abs() > 1e39) & frame["loss"].is_finite()).any():
                raise AnalysisError(f"{path}: a loss is beyond the range of f32.")
        for column in ("epoch", "step", "host_ns"):
            if column in frame.columns and frame[column].has_nulls():
                raise AnalysisError(f"{path}: not the table of steps, a row has no {column}; is the file truncated?")
        in_range(path, frame.select(column for column in STEP_TYPES if column in frame.columns and column != "loss"))
        return frame.select(column for column in STEP_TYPES if column in frame.columns).with_row_index("index")

    def driver_calls(self, epoch: int | None = None) -> pl.DataFrame:
        """Totals by call: `call`, `count`, `total_ns`, `blocked_ns`; of the run, or of an epoch (from 1, or −1)."""
        if epoch is None:
            calls = self.summary.get("driver_calls", {})
        else:
            _ = self.epochs  # raises with the reason
            of = self.summary["epochs"]
            calls = of[epoch if epoch < 0 else epoch - 1].get("driver_calls", {})
        columns = {"call": pl.String, "count": pl.Int64, "total_ns": pl.Int64, "blocked_ns": pl.Int64}
        rows = [{"call": name, **figures} for name, figures in calls.items()]
        return pl.DataFrame([{key: row[key] for key in columns} for row in rows], schema=columns)

    @property
    def latency(self) -> pl.DataFrame:
        """Rows of `latency`: operation, path, count and percentiles in ns. Empty if none were recorded."""
        rows = [{k: v for k, v in row.items() if k in schema.Latency.__annotations__} for row in self._latency]
        return pl.DataFrame(rows, infer_schema_length=None)

    @property
    def _latency(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.summary.get("latency", [])
        return rows

    @cached_property
    def histograms(self) -> list[histograms.Recorded]:
        """The histograms of `latency.hlog`.

        Raises AnalysisError when there are none.
        """
        return histograms.parse(*self._file("latency.hlog", "run it without --latency off, to its end"))

    @cached_property
    def trace(self) -> pl.DataFrame:
        """Every allocator operation (`trace.jsonl`)."""
        from vramlab_analysis import histories

        return histories.parse_trace(*self._file("trace.jsonl", "run it again with --trace"))

    @cached_property
    def calls(self) -> pl.DataFrame:
        """Every driver call (`driver_calls.jsonl`)."""
        path, data = self._file("driver_calls.jsonl", "run it again with --export perfetto")
        return read_lines(path, DRIVER_CALL_TYPES, required=("start_ns", "total_ns", "blocked_ns", "call"), data=data)

    @property
    def ledger(self) -> dict[str, Any]:
        """The parts of reserved − requested at peak reserved; empty if the record lacks them."""
        ledger: dict[str, Any] = self.summary.get("fragmentation", {})
        return ledger

    def statistic(self, name: str) -> int | None:
        """One of `allocator_stats`, such as `reserved_bytes.all.peak`; None if the allocator does not report it."""
        value: int | None = self.summary.get("allocator_stats", {}).get(name)
        return None if value is None or value < 0 else value


def losses_of(steps: pl.DataFrame, who: str) -> pl.Series:
    """The losses of a table of steps.

    Raises AnalysisError when they were left out of it.
    """
    if "loss" not in steps.columns:
        raise AnalysisError(f"{who}: the losses of the steps were left out when the experiment was packed.")
    return steps["loss"]


def in_range(path: Path, frame: pl.DataFrame) -> None:
    """Rejects impossible counts, sizes and times; sums of the others stay within 64 bits.

    Raises AnalysisError that names the column and line.
    """
    for column in frame.select(pl.selectors.integer()).columns:
        most = 2**64 - 1 if column == "addr" else 2**53
        wrong = (pl.col(column) < 0) | (pl.col(column) > most)
        if (at := frame.select(wrong.arg_true()).to_series()).len():
            raise AnalysisError(
                f"{path}: row {int(at[0]) + 1}: {column} is {frame[column][int(at[0])]}, which is impossible."
            )


def read_lines(path: Path, types: dict[str, Any], required: tuple[str, ...], data: bytes | None = None) -> pl.DataFrame:
    """One JSON object a line, with the columns of `types`; what a line does not say is null. `data` is what the file
    holds, if it was read.

    Raises AnalysisError when a line is cut off or lacks what is required.
    """
    try:
        frame = pl.read_ndjson(io.BytesIO(read_bytes(path) if data is None else data), schema=types)
    except pl.exceptions.PolarsError as error:
        raise AnalysisError(f"{path}: a line has another format ({str(error).splitlines()[0][:120]}).") from error
    if frame.is_empty():
        raise AnalysisError(f"{path}: empty.")
    in_range(path, frame)
    texts = [name for name, kind in types.items() if kind == pl.String]
    frame = frame.with_columns(pl.col(name).map_elements(printable, pl.String).cast(pl.String) for name in texts)
    for column in required:
        if frame[column].has_nulls():
            line = int(frame[column].is_null().arg_max() or 0) + 1
            raise AnalysisError(f"{path}: line {line} has no {column}; is it another kind of file, or truncated?")
    return frame


def load_run(path: str | Path) -> Run:
    """The run record in a directory, or the one whose `summary.json` is given.

    Raises AnalysisError when there is none, it is of another version, or what every record has is missing.
    """
    path = Path(path)
    if path.name in ("summary.json", "summary.json.gz"):
        path = path.parent
    if not path.is_dir():
        fault = "a file, not a directory" if path.is_file() else "no such directory"
        raise AnalysisError(f"{path}: {fault}; give one that `trainer` wrote (under runs/, or its --out).")
    summary = found(path / "summary.json")
    if summary is None:
        if not any(path.iterdir()):
            raise AnalysisError(f"{path}: an empty directory, not a run record.")
        if (path / "experiment.json").is_file():
            raise AnalysisError(f"{path}: an experiment, not a run; give one of its runs, {path}/runs/ID.")
        raise AnalysisError(f"{path}: not a run record, because it has no summary.json.")
    return Run(path, schema.read(summary, "a run record", schema.SUMMARY))
