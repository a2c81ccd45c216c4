"""Idle times of the device with their causes, and latencies of launches."""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from vramlab_analysis.nsight.capture import Capture

# Causes of idle time other than driver calls.
HOST_CODE = "host code outside the driver"
ARRIVING = "launch on its way to the device"
PROFILER = "the profiler itself"


@dataclass
class Idle:
    """A time without any work on the device, between two pieces of work."""

    start: int
    end: int
    before: int  # index of the work that ended
    after: int  # index of the work that began
    parts: dict[str, int] = field(default_factory=dict)  # ns by cause; they sum to the gap

    @property
    def duration(self) -> int:
        """Length of the gap."""
        return self.end - self.start

    @property
    def cause(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda cause: self.parts[cause])


def gpu_idle(capture: Capture, device: int | None = None) -> list[Idle]:
    """Gaps between the device's work, all streams merged, each attributed to the host's activity in it.

    A gap ends when the next work begins. From the start of the call that queued that work on, the gap is `ARRIVING`:
    the device could not have begun sooner. Before, the host had not asked yet: that time goes to the driver calls of
    the thread that then launches, by kind and by how much of the gap each covers (calls of one thread do not overlap).
    The remainder is `PROFILER` where the profiler reports it, otherwise `HOST_CODE`. Without a launching call in the
    capture all of a gap is `HOST_CODE`.

    `device` is the one to look at; without it, that with the most work.
    """
    if device is None:
        counts: dict[int, int] = defaultdict(int)
        for work in capture.work:
            counts[work.device] += 1
        device = max(counts, key=lambda one: counts[one], default=0)
    by_thread: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(capture.calls):
        by_thread[call.thread].append(index)
    starts = {thread: [capture.calls[index].start for index in indices] for thread, indices in by_thread.items()}
    gaps: list[Idle] = []
    last: int | None = None
    for index, work in enumerate(capture.work):
        if work.device != device:
            continue
        if last is not None and work.start > capture.work[last].end:
            gap = Idle(capture.work[last].end, work.start, last, index)
            _blame(capture, gap, by_thread, starts)
            gaps.append(gap)
        if last is None or work.end > capture.work[last].end:
            last = index
    return gaps


def _blame(capture: Capture, gap: Idle, by_thread: dict[int, list[int]], starts: dict[int, list[int]]) -> None:
    parts: dict[str, int] = defaultdict(int)
    launch = capture.work[gap.after].call
    if launch is None:
        gap.parts = {HOST_CODE: gap.duration}
        return
    asked = min(max(capture.calls[launch].start, gap.start), gap.end)
    if gap.end > asked:
        parts[ARRIVING] = gap.end - asked
    thread = capture.calls[launch].thread
    place = max(0, bisect.bisect_right(starts[thread], gap.start) - 1)
    covered = 0
    for index in by_thread[thread][place:]:
        call = capture.calls[index]
        if call.start >= asked:
            break
        overlap = min(call.end, asked) - max(call.start, gap.start)
        if overlap > 0:
            parts[call.kind] += overlap
            covered += overlap
    rest = asked - gap.start - covered
    profiler = sum(
        max(0, min(one.end, asked) - max(one.start, gap.start)) for one in capture.overhead if one.thread == thread
    )
    if rest and profiler:
        parts[PROFILER] = min(rest, profiler)
    if rest > profiler:
        parts[HOST_CODE] = rest - profiler
    gap.parts = dict(parts)


@dataclass(slots=True)
class Idleness:
    """Idle time of one cause."""

    cause: str
    gaps: int  # in which it has a part
    total_ns: int
    longest_ns: int  # part of one gap


def idle_by_cause(gaps: list[Idle]) -> list[Idleness]:
    """Totals of `gpu_idle` by cause, the largest first."""
    found: dict[str, Idleness] = {}
    for gap in gaps:
        for cause, part in gap.parts.items():
            row = found.setdefault(cause, Idleness(cause, 0, 0, 0))
            row.gaps += 1
            row.total_ns += part
            row.longest_ns = max(row.longest_ns, part)
    return sorted(found.values(), key=lambda row: -row.total_ns)


def busy_ns(capture: Capture) -> int:
    """Time in which any device did any work: the union of its intervals, not their sum."""
    total, reached = 0, 0
    for index, work in enumerate(capture.work):
        begin = work.start if index == 0 else max(work.start, reached)
        total += max(0, work.end - begin)
        reached = work.end if index == 0 else max(reached, work.end)
    return total


@dataclass(slots=True)
class LaunchGap:
    """Work of one name, relative to the preceding work on its stream."""

    name: str
    count: int
    total_ns: int
    median_ns: int
    median_gap_ns: int | None  # from the end of the work before on the stream to its start
    median_latency_ns: int | None  # from the start of the call that queued it to its start
    behind: int  # the number queued while the preceding work was running


def launch_gaps(capture: Capture) -> list[LaunchGap]:
    """Gaps and latencies of kernels and copies by name, longest total time first."""
    durations: dict[str, list[int]] = defaultdict(list)
    gaps: dict[str, list[int]] = defaultdict(list)
    latencies: dict[str, list[int]] = defaultdict(list)
    behind: dict[str, int] = defaultdict(int)
    before: dict[tuple[int, int, int], int] = {}
    for work in capture.work:
        lane = (work.process, work.device, work.stream)
        durations[work.name].append(work.end - work.start)
        if work.call is not None:
            latencies[work.name].append(work.start - work.queued)
        if lane in before:
            gaps[work.name].append(work.start - before[lane])
            behind[work.name] += work.call is not None and work.queued < before[lane]
        before[lane] = max(before.get(lane, work.end), work.end)

    def middle(values: list[int]) -> int | None:
        return round(median(values)) if values else None

    rows = [
        LaunchGap(
            name,
            len(times),
            sum(times),
            round(median(times)),
            middle(gaps[name]),
            middle(latencies[name]),
            behind[name],
        )
        for name, times in durations.items()
    ]
    return sorted(rows, key=lambda row: -row.total_ns)
