"""Checks of `summary.json`, `experiment.json` and `run.json` when they are read.

`analysis/schema.md` describes every key; this module has those that are computed with, drawn or printed. Others remain
unchecked, so records may have newer keys than this package. Keys that older records lack are not required.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NotRequired, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from vramlab_analysis.errors import AnalysisError, check_version, printable, read_json


def _file_name(value: str) -> str:
    if not value or value in (".", "..") or "/" in value or "\\" in value:
        raise ValueError("must name a file in the directory of the record")
    return value


CHECKED = ConfigDict(strict=True, extra="allow")
# Counts, bytes, nanoseconds: larger values are errors, and sums of many stay within 64 bits.
Natural = Annotated[int, Field(ge=0, lt=2**53)]
# PyTorch writes −1 for no bound.
Statistic = Annotated[int, Field(ge=-1, lt=2**53)]
Text = Annotated[str, Field(max_length=10_000)]
FileName = Annotated[str, Field(max_length=200), AfterValidator(_file_name)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
# The largest f32 is 3.4e38. NaN is null in JSON.
Value = Annotated[float, Field(ge=-1e39, le=1e39)] | None
Scalar = bool | int | float | Text | None


@with_config(CHECKED)
class Call(TypedDict):
    """Driver calls of one kind."""

    count: Natural
    total_ns: Natural
    blocked_ns: Natural


Calls = dict[Text, Call]


@with_config(CHECKED)
class Epoch(TypedDict):
    """An epoch: its training steps and the validation after them."""

    steps: Annotated[int, Field(ge=1, lt=2**53)]
    wall_s: Seconds
    epoch: NotRequired[Natural]
    device_s: NotRequired[Seconds]
    train_s: NotRequired[Seconds]
    train_device_s: NotRequired[Seconds]
    device_busy_s: NotRequired[Seconds]
    train_loss: NotRequired[Value]
    val_loss: NotRequired[Value]
    val_accuracy: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]
    driver_calls: NotRequired[Calls]
    train_driver_calls: NotRequired[Calls]


@with_config(CHECKED)
class Settings(TypedDict):
    """Settings in effect."""

    allocator: Text
    dataset: Text
    layers: Natural
    hidden: Natural
    batch: Natural
    seed: Annotated[int, Field(ge=0, lt=2**64)]
    lr: Annotated[float, Field(ge=0, le=1e39)]
    init: Text
    alloc: NotRequired[Text]
    allocator_settings: NotRequired[dict[Text, Any]]
    loader: NotRequired[Text]
    device: NotRequired[Text]
    sync: NotRequired[Text]
    gemm: NotRequired[Text]
    dtype: NotRequired[Text]
    accumulate: NotRequired[Text]
    weights: NotRequired[Text]
    loss_scale: NotRequired[Annotated[float, Field(ge=0, le=1e39)]]
    fuse: NotRequired[Text]
    launch: NotRequired[Text]
    graph_steps: NotRequired[Natural | None]
    streams: NotRequired[Natural]
    latency: NotRequired[bool]
    mode: NotRequired[Text]
    compile_mode: NotRequired[Text | None]
    fused_sgd: NotRequired[bool]
    rows: NotRequired[Text]


@with_config(CHECKED)
class Device(TypedDict):
    """The device of a run."""

    name: Text
    kind: NotRequired[Text]
    virtual_time: NotRequired[bool]


@with_config(CHECKED)
class Dataset(TypedDict):
    """The data of a run."""

    name: NotRequired[Text]
    source: NotRequired[Text]


@with_config(CHECKED)
class Latency(TypedDict):
    """Latencies of one operation and path."""

    operation: Text
    path: Text
    count: Natural
    # Absent if nothing was measured, as on the simulated device.
    p50_ns: NotRequired[Natural]
    p99_ns: NotRequired[Natural]
    p90_ns: NotRequired[Natural]
    p999_ns: NotRequired[Natural]
    min_ns: NotRequired[Natural]
    max_ns: NotRequired[Natural]


@with_config(CHECKED)
class Ledger(TypedDict, total=False):
    """Parts of reserved − requested."""

    internal: Natural
    soft: Natural
    hard: Natural
    stream: Natural
    pending: Natural
    reserved: Natural
    requested: Natural
    attribution: Text


@with_config(CHECKED)
class Summary(TypedDict):
    """`summary.json`."""

    status: Text
    settings: Settings
    device: Device
    epochs: list[Epoch]
    program: NotRequired[Text]
    error: NotRequired[Text | None]
    code_version: NotRequired[Text]
    clock: NotRequired[Text]
    dataset: NotRequired[Dataset]
    step_losses: NotRequired[FileName]
    driver_calls: NotRequired[Calls]
    allocator_stats: NotRequired[dict[Text, Statistic | None]]
    latency: NotRequired[list[Latency]]
    fragmentation: NotRequired[Ledger]
    process_s: NotRequired[Seconds]


@with_config(CHECKED)
class RunOfExperiment(TypedDict):
    """`run.json`."""

    id: Text
    arm: Text
    program: Text
    repeat: Natural
    status: NotRequired[Text]
    options: NotRequired[dict[Text, Scalar]]


@with_config(CHECKED)
class Planned(TypedDict):
    """A run that an experiment planned."""

    id: Text


@with_config(CHECKED)
class Spec(TypedDict, total=False):
    """The spec in `experiment.json`."""

    name: Text
    question: Text


@with_config(CHECKED)
class ExperimentRecord(TypedDict, total=False):
    """`experiment.json`."""

    name: Text
    question: Text
    spec: Spec
    spec_sha256: Text
    profile_sha256: Text
    left_out: list[Text]
    runs: list[Planned | Text]


SUMMARY = TypeAdapter(Summary)
RUN = TypeAdapter(RunOfExperiment)
EXPERIMENT = TypeAdapter(ExperimentRecord)


def read(path: Path, what: str, shape: TypeAdapter[Any]) -> dict[str, Any]:
    """The document of a file, if its values have the types and ranges of its kind.

    Raises AnalysisError that names the first wrong key.
    """
    return check(path, read_json(path), what, shape)


def check(path: Path, document: Any, what: str, shape: TypeAdapter[Any]) -> dict[str, Any]:
    """The document from `path`, if its values have the types and ranges of its kind; as `read`."""
    document = check_version(path, document, what)
    try:
        return cast(dict[str, Any], shape.validate_python(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = [part for part in first["loc"] if isinstance(part, int) or "[" not in part]
        at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).removeprefix(".")
        fault = "is missing" if first["type"] == "missing" else printable(first["msg"])[:120]
        others = error.error_count() - 1
        more = f", and {others} more" if others else ""
        raise AnalysisError(f"{path}: not {what}: {at[:120]}: {fault}{more}.") from error
