"""Calls that waited, from a run's own log of driver calls, without Nsight Systems, and its comparison with a capture.

`driver_calls.jsonl` (the trainer's `--export`) has each driver call with its start, its duration, its stream, the
ranges around it and the waiting that the meter measured. It has no times of kernels. So

- **the awaited work** is the last launch before it, on its stream or, for a call about the whole device, on any.
  Work of one stream is done in order, so with one stream this is exact.
- **whether it was a candidate** follows as in a capture (the crate `vramlab-nsight`): something was queued, and no
  call has waited for it since. Kinds that wait are the documented ones; `mem_alloc` is none of them.
- **blocked_ns** is the duration beyond the idle cost. The idle cost is the median of the calls of that kind, in the
  same span, that were not candidates, so it includes whatever else slows calls down at that time, such as a profiler.
  Without such calls it is the cost that the trainer measured before the run.
- A **free that releases pages** of 2 MiB takes tens of microseconds more, and that time varies as much as short waits
  last. For those the meter's own value is used.
- A **launch** counts only when 1,000 or more were queued without a wait behind them, and it took four times the median.

Calls are compared with a capture one by one: the two lists of the span have the same calls in the same order.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vramlab_analysis.captures import Capture
from vramlab_analysis.errors import AnalysisError, found, read_bytes, read_json

# As in the attribution of captures: outstanding launches from which a queue counts as full, and the number of idle
# costs from which a call does work of its own.
QUEUE, OWN_WORK = 1000, 4
PAGE_SHIFT = 21  # pages of 2 MiB, the granularity of the driver's mappings
WAITS = {"device_synchronize", "mem_free", "host_free", "mem_unmap", "stream_synchronize", "event_synchronize"}
ONE_STREAM = {"stream_synchronize"}
# Not in driver_calls.jsonl, because they bypass the trainer's driver.
NOT_LOGGED = {"profiler", "device_synchronize", "pool_attribute"}
SETTINGS = (
    "allocator", "dataset", "hidden", "layers", "batch", "sync", "loader", "nvtx", "profile_steps", "trace", "export",
)  # fmt: skip


@dataclass(slots=True)
class OwnCall:
    """A driver call in the run's log."""

    start: int
    duration: int
    metered: int  # waiting according to the meter
    call: str
    kernel: str | None
    bytes: int | None
    stream: int | None
    pages: bool  # whether it mapped or unmapped pages
    path: str

    @property
    def end(self) -> int:
        """When it returned."""
        return self.start + self.duration


@dataclass
class OwnTrace:
    """The logged calls of a span, in order."""

    calls: list[OwnCall]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class OwnBlocked:
    """A call that waited, and the launch that it waited for."""

    call: int
    launch: int | None
    blocked_ns: int


def read(record: Path, span: bool = True) -> OwnTrace:
    """The calls of a run record; with `span` only those in the profiler's capture (`settings.profile_steps`).

    A directory of a capture's tables has them too: in `own.csv.xz`, or as the files of the run record.
    """
    if (record / "own.csv.xz").is_file():
        return _extracted(record)
    path = found(record / "driver_calls.jsonl")
    if path is None:
        raise AnalysisError(f"{record}: has no driver_calls.jsonl; run the trainer with --export perfetto.")
    summary = _summary(found(record / "summary.json") or record / "summary.json")
    settings = summary["settings"]
    calls = _pages(_parse(path))
    if span:
        calls = _captured(calls, settings.get("profile_steps"), record)
    device = summary.get("device")
    about = {
        "settings": {key: settings[key] for key in SETTINGS if key in settings},
        "blocked_method": summary["blocked_method"],
        "idle_costs": summary.get("idle_costs"),
        "device": device.get("name") if isinstance(device, dict) else device,
    }
    return OwnTrace(calls, about)


def _summary(path: Path) -> dict[str, Any]:
    """The used keys of `summary.json`, if they have the types of a record."""
    summary: dict[str, Any] = read_json(path)
    settings = summary.get("settings") if isinstance(summary, dict) else None
    if not isinstance(settings, dict) or not isinstance(summary.get("blocked_method"), str):
        raise AnalysisError(f"{path}: not a run record, settings or blocked_method is missing.")
    steps = settings.get("profile_steps")
    if steps is not None and not (isinstance(steps, dict) and all(_natural(steps.get(k)) for k in ("first", "last"))):
        raise AnalysisError(f"{path}: not a run record, settings.profile_steps is not a range of steps.")
    if not isinstance(summary.get("idle_costs", {}), (dict, type(None))):
        raise AnalysisError(f"{path}: not a run record, idle_costs is not an object.")
    return summary


def _natural(value: Any, most: int = 2**63) -> bool:
    return type(value) is int and 0 <= value < most


def _parse(path: Path) -> list[tuple[OwnCall, int | None]]:
    lines = []
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), 1):
        try:
            one = json.loads(line)
            _check(one)
            call = OwnCall(
                one["start_ns"], one["total_ns"], one["blocked_ns"], one["call"], one.get("kernel"), one.get("bytes"),
                one.get("stream"), False, one.get("path", ""),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            fault = str(error)[:80]
            raise AnalysisError(
                f"{path}: line {number} is not a driver call ({fault}); is the file truncated?"
            ) from error
        lines.append((call, one.get("addr")))
    return lines


def _check(one: dict[str, Any]) -> None:
    """Rejects a line whose values are not those of a call.

    Raises ValueError.
    """
    for key in ("start_ns", "total_ns", "blocked_ns"):
        if not _natural(one[key]):
            raise ValueError(f"{key} is no time")
    for key, most in (("bytes", 2**44), ("addr", 2**64), ("stream", 2**63)):
        if one.get(key) is not None and not _natural(one[key], most):
            raise ValueError(f"{key} is none")
    for key, missing in (("call", None), ("kernel", ""), ("path", "")):
        if not isinstance(one.get(key) or missing, str):
            raise ValueError(f"{key} is no text")


def step_numbers(name: str) -> tuple[int, int] | None:
    """First and last step of a range named `step 3` or `steps 9 to 16`."""
    match = re.fullmatch(r"steps? (\d+)(?: to (\d+))?", name)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def _pages(lines: Iterable[tuple[OwnCall, int | None]]) -> list[OwnCall]:
    """Marks the calls that map or unmap a page."""
    held: dict[int, int] = defaultdict(int)
    calls = []
    for call, addr in lines:
        calls.append(call)
        if call.call not in ("mem_alloc", "mem_free") or addr is None or not call.bytes:
            continue
        step = 1 if call.call == "mem_alloc" else -1
        for page in range(addr >> PAGE_SHIFT, (addr + call.bytes - 1 >> PAGE_SHIFT) + 1):
            before = held[page]
            held[page] += step
            call.pages |= before == 0 or held[page] == 0
    return calls


def _captured(calls: list[OwnCall], steps: dict[str, int] | None, record: Path) -> list[OwnCall]:
    if not steps:
        return calls
    first, last = steps["first"], steps["last"]

    def step(call: OwnCall) -> str:
        parts = call.path.split("/")
        return parts[1] if len(parts) > 1 else ""

    # Steps of one launch share a range; a launch never crosses the ends of a capture.
    at = [step_numbers(step(call)) for call in calls]
    begin = next((place for place, numbers in enumerate(at) if numbers and numbers[0] == first), None)
    ends = [
        place
        for place, (call, numbers) in enumerate(zip(calls, at, strict=True))
        if (numbers and numbers[1] == last) or step(call) == "end of capture"
    ]
    if begin is None or not ends:
        raise AnalysisError(
            f"{record}: driver_calls.jsonl has no step {first} or no step {last}; was it recorded by another run?"
        )
    return calls[begin : ends[-1] + 1]


def _extracted(folder: Path) -> OwnTrace:
    """The calls of a table that has only those of the capture. Its first column is the time since the row before."""
    document = read_json(folder / "capture.json")
    about = document.get("own") if isinstance(document, dict) else None
    if not isinstance(about, dict) or not isinstance(about.get("settings", {}), dict):
        raise AnalysisError(f"{folder / 'capture.json'}: own is not the description of a run's trace.")
    table = folder / "own.csv.xz"
    rows = csv.reader(io.StringIO(read_bytes(table).decode()))
    next(rows, None)
    calls: list[OwnCall] = []
    time = 0
    try:
        for after, duration, metered, call, kernel, size, stream, pages, path in rows:
            time += int(after)
            call_bytes, on = (int(one) if one else None for one in (size, stream))
            calls.append(
                OwnCall(time, int(duration), int(metered), call, kernel or None, call_bytes, on, pages == "1", path)
            )
    except ValueError as error:
        raise AnalysisError(f"{table}: line {rows.line_num}: {error}; was the file truncated?") from error
    return OwnTrace(calls, about)


def attribute(own: OwnTrace) -> list[OwnBlocked]:
    """Calls of a trace that waited, with the awaited launch and the duration."""
    last_launch: dict[int, int] = {}  # stream to call
    known: dict[int, int] = defaultdict(lambda: -1)  # stream to the last launch that has completed
    queued = 0
    candidates: list[tuple[int, int]] = []
    idle: dict[str, list[int]] = defaultdict(list)
    launches = [call.duration for call in own.calls if call.call == "kernel_launch"]
    usual = median(launches) if launches else 0
    result: list[OwnBlocked] = []
    for index, call in enumerate(own.calls):
        if call.call == "kernel_launch":
            if queued >= QUEUE and call.duration > OWN_WORK * usual:
                result.append(OwnBlocked(index, None, round(call.duration - usual)))
            queued += 1
            last_launch[call.stream or 0] = index
        elif call.call in WAITS:
            streams = list(last_launch)
            if call.call in ONE_STREAM and call.stream is not None:
                streams = [stream for stream in streams if stream == call.stream]
            open_launches = [last_launch[stream] for stream in streams if last_launch[stream] > known[stream]]
            if open_launches:
                candidates.append((index, max(open_launches)))
            elif not call.pages:
                idle[call.call].append(call.duration)
            for stream in streams:
                known[stream] = last_launch[stream]
            if all(known[stream] == last for stream, last in last_launch.items()):
                queued = 0
    measured = own.about.get("idle_costs") or {}
    for index, launch in candidates:
        call = own.calls[index]
        if idle[call.call] and not call.pages:
            blocked = max(0, call.duration - round(median(idle[call.call])))
        elif call.pages or not isinstance(measured.get(call.call), int):
            blocked = call.metered
        else:
            blocked = max(0, call.duration - measured[call.call])
        if blocked:
            result.append(OwnBlocked(index, launch, blocked))
    return sorted(result, key=lambda one: one.call)


@dataclass(slots=True)
class Agreement:
    """One kind of call, by the capture and by the own trace of the same process."""

    kind: str
    calls: int
    waited_ns: int  # capture: to the end of the work, by timestamps
    blocked_ns: int  # capture
    own_ns: int  # own trace
    metered_ns: int  # from the run record
    same_work_ns: int  # of blocked_ns: where both name the same launch
    span_ns: int

    @property
    def difference(self) -> float:
        """Own trace relative to the capture."""
        if self.blocked_ns == 0:
            return 0.0 if self.own_ns == 0 else float("inf")
        return self.own_ns / self.blocked_ns - 1

    @property
    def same_work(self) -> float:
        """Share of the capture's waiting for which both name the same launch."""
        return self.same_work_ns / self.blocked_ns if self.blocked_ns else 1.0


def pair(capture: Capture, own: OwnTrace) -> list[tuple[int, int]]:
    """Indices of the same call in the capture and in the own trace.

    Raises AnalysisError when the two are not of the same run.
    """
    ours = [index for index, call in enumerate(own.calls) if call.call not in NOT_LOGGED]
    theirs = [index for index, call in enumerate(capture.calls) if call["kind"] not in NOT_LOGGED]
    kinds = [own.calls[index].call for index in ours]
    if kinds != [capture.calls[index]["kind"] for index in theirs]:
        raise AnalysisError(
            f"{capture.path}: the capture has {len(theirs)} driver calls and the run's own trace {len(ours)} in the "
            "same span, or in another order, so they are not of the same run."
        )
    return list(zip(theirs, ours, strict=True))


def agree(capture: Capture, own: OwnTrace) -> list[Agreement]:
    """Compares a capture with the own trace of the same process, by kind of call."""
    of_own = dict(pair(capture, own))
    ours = {one.call: one for one in attribute(own)}
    by_kind: dict[str, Agreement] = {}
    for index, other in of_own.items():
        call = capture.calls[index]
        kind = call["kind"]
        row = by_kind.setdefault(kind, Agreement(kind, 0, 0, 0, 0, 0, 0, capture.document["span_ns"]))
        row.calls += 1
        row.metered_ns += own.calls[other].metered
        mine = ours.get(other)
        row.own_ns += mine.blocked_ns if mine else 0
        if call["waited_for"] is not None:
            row.waited_ns += call["waited_ns"]
            row.blocked_ns += call["blocked_ns"]
            queued_by = capture.work[call["waited_for"]]["call"]
            if mine and mine.launch is not None and queued_by is not None and of_own.get(queued_by) == mine.launch:
                row.same_work_ns += call["blocked_ns"]
    return sorted(by_kind.values(), key=lambda row: -row.blocked_ns)
