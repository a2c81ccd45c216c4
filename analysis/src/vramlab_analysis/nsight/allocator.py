"""Allocator operations and their driver calls, by place in the run."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from vramlab_analysis.nsight import names
from vramlab_analysis.nsight.attribution import Attribution

_NUMBERED = re.compile(r"^(epoch|steps?) \d+(?: to \d+)?$")
# Ranges that the trainer's NVTX instrument opens around each operation of the allocator: `alloc 196 KiB`.
_OPERATION = re.compile(r"^(alloc|free) \d[\d.]* [KMGT]?i?B$")


@dataclass
class Place:
    """One place in the run, all epochs and steps together."""

    path: str
    operations: int = 0  # allocations and frees
    operations_ns: int = 0
    marks: Counter[str] = field(default_factory=Counter)  # their paths, such as `split`
    calls: Counter[str] = field(default_factory=Counter)  # memory calls of the driver
    calls_ns: int = 0
    blocked_ns: int = 0


def general(path: str, operations: bool = False) -> str:
    """A path without the numbers of epochs and steps, and without single allocations unless `operations`."""
    parts = [
        match.group(1) if (match := _NUMBERED.match(part)) else part
        for part in path.split("/")
        if operations or not _OPERATION.match(part)
    ]
    return "/".join(parts)


def by_place(result: Attribution) -> list[Place]:
    """Memory by NVTX path, the place with the most time first. Calls outside any range have the path ``""``."""
    capture = result.capture
    places: dict[str, Place] = {}

    def at(path: str) -> Place:
        return places.setdefault(path, Place(path))

    blocked = {one.call: one.blocked_ns for one in result.blocked}
    for index, call in enumerate(capture.calls):
        if call.kind in names.MEMORY_KINDS:
            place = at(general(call.path))
            place.calls[call.name] += 1
            place.calls_ns += call.duration
            place.blocked_ns += blocked.get(index, 0)
    times: dict[int, list[int]] = defaultdict(list)
    texts: dict[int, list[str]] = defaultdict(list)
    for mark in capture.marks:
        times[mark.thread].append(mark.time)
        texts[mark.thread].append(mark.text)
    for one in capture.ranges:
        if _OPERATION.match(one.text):
            place = at(general(one.path))
            place.operations += 1
            place.operations_ns += one.end - one.start
            own = times[one.thread]
            inside = slice(bisect.bisect_left(own, one.start), bisect.bisect_right(own, one.end))
            place.marks.update(texts[one.thread][inside])
    return sorted(places.values(), key=lambda place: (-max(place.operations_ns, place.calls_ns), place.path))
