"""A capture in memory: calls, the device's work, ranges. Times are nanoseconds of the capture's clock."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.nsight import names


@dataclass
class Call:
    """A call of the CUDA driver or runtime by the host."""

    start: int
    end: int
    name: str  # without version: cuMemFree
    thread: int
    process: int
    correlation: int
    ok: bool = True
    stream: int | None = None  # of a synchronise or of an event's record
    device: int | None = None  # of memory that it allocates or frees
    bytes: int | None = None
    event: int | None = None  # of an event's record or synchronise
    path: str = ""  # ranges around its start, from the outside in, with slashes

    @property
    def kind(self) -> str:
        """Its name in the run record."""
        return names.kind(self.name)

    @property
    def duration(self) -> int:
        """Host time in the call."""
        return self.end - self.start


@dataclass
class Work:
    """Work of the device: a kernel, a copy, a fill."""

    start: int
    end: int
    kind: str  # kernel, memcpy, memset
    name: str
    device: int
    stream: int
    process: int
    correlation: int
    bytes: int | None = None
    pageable: bool = False  # a copy from or to memory that is not pinned
    call: int | None = None  # index of the call that queued it
    queued: int = 0  # start of that call; without one the work's own start


@dataclass
class Range:
    """An NVTX range that was pushed and popped on one thread."""

    start: int
    end: int
    text: str
    thread: int
    level: int = 0
    path: str = ""  # with its own name


@dataclass
class Mark:
    """An NVTX mark at one time; the trainer's marks have the path of an allocation."""

    time: int
    text: str
    thread: int


@dataclass
class Overhead:
    """An interval in which the profiler occupied a thread."""

    start: int
    end: int
    thread: int


@dataclass
class Capture:
    """The contents of a capture. Lists are ordered by start."""

    calls: list[Call]
    work: list[Work]
    ranges: list[Range]
    marks: list[Mark] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    streams: dict[int, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)  # versions, device
    notes: list[str] = field(default_factory=list)  # missing parts, a sentence each
    path: str = ""

    def __post_init__(self) -> None:
        """Orders everything, nests the ranges, and joins work and calls."""
        self.calls.sort(key=lambda call: (call.start, call.correlation))
        self.work.sort(key=lambda work: (work.start, work.correlation))
        self.marks.sort(key=lambda mark: mark.time)
        nest(self.ranges)
        place(self.calls, self.ranges)
        at = {(call.process, call.correlation): index for index, call in enumerate(self.calls)}
        numbers = {work.stream for work in self.work}
        self.streams = {number: name for number, name in self.streams.items() if number in numbers}
        orphans = 0
        for work in self.work:
            work.call = at.get((work.process, work.correlation))
            work.queued = work.start if work.call is None else self.calls[work.call].start
            orphans += work.call is None
        if orphans and self.calls:
            self.notes.append(
                f"{orphans} of {len(self.work)} kernels and copies were queued by calls that are not in the capture; "
                "their starts stand in for the times at which they were queued."
            )

    @cached_property
    def span(self) -> tuple[int, int]:
        """From the first call, range or work to the end of the last."""
        spans = [(item.start, item.end) for items in (self.calls, self.work, self.ranges) for item in items]
        if not spans:
            return (0, 0)
        return min(start for start, _ in spans), max(end for _, end in spans)

    @cached_property
    def by_name(self) -> dict[str, list[Range]]:
        """Ranges by the first word of their names, such as `step`."""
        found: dict[str, list[Range]] = defaultdict(list)
        for one in self.ranges:
            found[one.text.split(" ", 1)[0]].append(one)
        return found

    @property
    def steps(self) -> list[Range]:
        """The ranges of training steps, in order. Steps of one launch are one range, such as `steps 9 to 16`."""
        found = [*self.by_name.get("step", []), *self.by_name.get("steps", [])]
        return sorted(found, key=lambda one: one.start)

    @property
    def step_count(self) -> int:
        """The number of training steps."""
        return sum(last - first + 1 for first, last in (step_numbers(step.text) or (1, 1) for step in self.steps))

    def launch_path(self, work: Work) -> str:
        """Ranges around the call that queued the work."""
        return "" if work.call is None else self.calls[work.call].path


def step_numbers(name: str) -> tuple[int, int] | None:
    """First and last step of a range named `step 3` or `steps 9 to 16`."""
    found = re.fullmatch(r"steps? (\d+)(?: to (\d+))?", name)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def nest(ranges: list[Range]) -> None:
    """Gives each range its level and path. Ranges of one thread nest, because they are pushed and popped."""
    # Of two that start simultaneously the longer is the outer one.
    ranges.sort(key=lambda one: (one.start, -one.end))
    open_ranges: dict[int, list[Range]] = defaultdict(list)
    for one in ranges:
        stack = open_ranges[one.thread]
        while stack and stack[-1].end <= one.start:
            stack.pop()
        one.level = len(stack)
        one.path = f"{stack[-1].path}/{one.text}" if stack else one.text
        stack.append(one)


def place(calls: list[Call], ranges: list[Range]) -> None:
    """Gives each call the path of the innermost range of its thread that is open when it starts."""
    by_thread: dict[int, list[Range]] = defaultdict(list)
    for one in ranges:
        by_thread[one.thread].append(one)
    for thread, own in by_thread.items():
        stack: list[Range] = []
        place_next = 0
        for call in calls:
            if call.thread != thread:
                continue
            while place_next < len(own) and own[place_next].start <= call.start:
                one = own[place_next]
                while stack and stack[-1].end <= one.start:
                    stack.pop()
                stack.append(one)
                place_next += 1
            while stack and stack[-1].end <= call.start:
                stack.pop()
            call.path = stack[-1].path if stack else ""


def load(path: str | Path) -> Capture:
    """Reads an SQLite export of Nsight Systems, or a directory that `extract` wrote.

    Raises AnalysisError when it is neither.
    """
    from vramlab_analysis.nsight import export, extracted

    path = Path(path)
    if path.is_dir():
        return extracted.read(path)
    if not path.is_file():
        raise AnalysisError(
            f"{path}: no such file; name an SQLite export of Nsight Systems (`nsys export --type sqlite`) or a folder "
            "that `vramlab-analysis nsight extract` wrote."
        )
    return export.read(path)
