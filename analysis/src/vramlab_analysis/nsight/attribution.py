"""Calls that waited for the device: duration and awaited work.

A call can only wait for work that was queued before it. Which call queued a kernel is in the capture (the correlation
id), so it is known what was outstanding when a call began: of the work queued before, on the stream, event or device
that the call is about, that which ends last. Call it W.

- **Whether a kind of call waits** is seen, not assumed. Each call that began with W outstanding either returned before
  the end of W, and then did not wait for it, or after. A kind of which more than one in twenty returned before does
  not wait; one that never did, in at least 20 cases, does. Where there are too few cases the documents decide
  (`names`).
- **A candidate** is a call of a kind that waits with work queued that the host does not know to be over, because no
  call waited for it yet. When W is over just before the call begins, the news may not have reached the host.
- **waited_ns** is the end of W minus the start of the call, or 0 if W was over: two timestamps, no estimate. It is the
  least that the call can have lost.
- **idle_cost_ns** is the median duration of the same kind of call that is no candidate.
- **blocked_ns** is the host time lost: `waited_ns` and the part of the return, from the end of W to the end of the
  call, that exceeds the idle cost: the news of the end has to reach the host. A return that takes more than four times
  the idle cost holds work of the call's own, such as giving pages back; it counts with the median excess of the
  others.
- A **launch** waits when the queue of launches is full: at least 1,000 outstanding and four times the median launch. W
  is then the last work to end inside the call.
- A **copy** that is not asynchronous, or touches memory that is not pinned, waits for itself.

Cost: O((calls + work) · log(work) · streams).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from vramlab_analysis.nsight import names
from vramlab_analysis.nsight.capture import Call, Capture

# Outstanding launches from which the queue of a context counts as full. The driver holds 1,024
# (CUDA C++ programming guide, "Concurrent kernel execution"; not documented for every device).
QUEUE = 1000
# A return that takes this many idle costs includes more than the notification.
OWN_WORK = 4
# Cases from which a kind of call is judged by observation, and the allowed share of exceptions.
ENOUGH, CONTRARY = 20, 0.05


@dataclass
class Blocked:
    """A call that waited."""

    call: int  # index in Capture.calls
    work: int  # index in Capture.work of the awaited work
    waited_ns: int
    blocked_ns: int
    return_ns: int  # from the end of the work, or the start of the call if that is later, to the end of the call


@dataclass
class Evidence:
    """Observations of one kind of call in a capture."""

    name: str
    kind: str
    calls: int = 0
    total_ns: int = 0
    outstanding: int = 0  # started with outstanding work that it could wait for
    returned_before: int = 0  # of those: returned while that work was running
    documented: str = names.NOTHING
    waits_for: str = names.NOTHING  # the verdict
    idle_calls: int = 0
    idle_cost_ns: int | None = None
    waited: int = 0
    waited_ns: int = 0
    blocked_ns: int = 0

    @property
    def grounds(self) -> str:
        """The basis of the verdict: `seen` in this capture, or `documented` because there were too few cases."""
        if self.waits_for == names.OWN != self.documented:
            return "seen"
        judged = self.documented not in (names.OWN, names.ROOM) and self.outstanding >= ENOUGH
        return "seen" if judged else "documented"


@dataclass
class Attribution:
    """The awaited work of each call, and the observations of each kind of call."""

    capture: Capture
    blocked: list[Blocked]
    evidence: dict[str, Evidence] = field(default_factory=dict)

    def rows(self) -> list[dict[str, object]]:
        """One row for each call that waited, with everything by name."""
        return [self.row(one) for one in self.blocked]

    def row(self, one: Blocked) -> dict[str, object]:
        """One call that waited: its name, place, duration and awaited work."""
        call, work = self.capture.calls[one.call], self.capture.work[one.work]
        launch = None if work.call is None else self.capture.calls[work.call]
        return {
            "start_ns": call.start, "duration_ns": call.duration, "waited_ns": one.waited_ns,
            "blocked_ns": one.blocked_ns, "call": call.name, "kind": call.kind,
            "range": call.path.rsplit("/", 1)[-1], "path": call.path,
            "bytes": call.bytes, "waited_for": work.name, "work_kind": work.kind, "stream": work.stream,
            "work_start_ns": work.start, "work_end_ns": work.end, "correlation": work.correlation,
            "launched_ns": None if launch is None else launch.start, "launch_path": self.capture.launch_path(work),
        }  # fmt: skip


class _Queued:
    """Work by stream in the order of queueing, and its last end."""

    def __init__(self, capture: Capture) -> None:
        lanes: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index, work in enumerate(capture.work):
            lanes[work.process, work.device, work.stream].append(index)
        self.work = capture.work
        self.lanes = lanes
        self.times: dict[tuple[int, int, int], list[int]] = {}
        self.last: dict[tuple[int, int, int], list[int]] = {}
        # Work that was queued before this time has completed.
        self.known: dict[tuple[int, int, int], int] = {}
        for lane, indices in lanes.items():
            indices.sort(key=lambda index: (capture.work[index].queued, capture.work[index].start))
            self.times[lane] = [capture.work[index].queued for index in indices]
            last: list[int] = []
            for index in indices:
                later = not last or capture.work[index].end >= capture.work[last[-1]].end
                last.append(index if later else last[-1])
            self.last[lane] = last
            self.known[lane] = -(1 << 62)

    def before(self, lane: tuple[int, int, int], time: int) -> int | None:
        """The work queued on this stream before a time that ends last."""
        place = bisect.bisect_left(self.times[lane], time)
        return self.last[lane][place - 1] if place else None

    def unknown(self, lane: tuple[int, int, int], time: int) -> bool:
        """Whether work was queued before a time that no call has waited for."""
        place = bisect.bisect_left(self.times[lane], time)
        return place > 0 and self.times[lane][place - 1] >= self.known[lane]

    def latest(self, lanes: list[tuple[int, int, int]], time: int) -> int | None:
        found = [index for lane in lanes if (index := self.before(lane, time)) is not None]
        return max(found, key=lambda index: self.work[index].end, default=None)


def attribute(capture: Capture) -> Attribution:
    """Attributes the waiting in a capture. Without calls or work there is none; `capture.notes` has the reason."""
    queued = _Queued(capture)
    evidence: dict[str, Evidence] = {}
    for call in capture.calls:
        one = evidence.setdefault(call.name, Evidence(call.name, call.kind, documented=names.scope(call.name)))
        one.calls += 1
        one.total_ns += call.duration
    result = Attribution(capture, [], evidence)
    own = _own_copies(capture)
    recorded = _event_records(capture)
    candidates: dict[str, list[tuple[int, int]]] = defaultdict(list)
    reaches = []
    for index, call in enumerate(capture.calls):
        # Calls that are documented not to wait are compared with the whole device.
        documented = evidence[call.name].documented
        reach = None
        if index not in own and documented not in (names.OWN, names.ROOM):
            reach = _reach(queued, call, names.DEVICE if documented == names.NOTHING else documented, recorded)
            last = queued.latest(*reach)
            if last is not None and capture.work[last].end > call.start:
                evidence[call.name].outstanding += 1
                evidence[call.name].returned_before += capture.work[last].end > call.end
        reaches.append(reach)
    for one in evidence.values():
        one.waits_for = _verdict(one)
    idle: dict[str, list[int]] = defaultdict(list)
    for index, reach in enumerate(reaches):
        call = capture.calls[index]
        if index in own:
            work = capture.work[own[index]]
            evidence[call.name].waits_for = names.OWN
            result.blocked.append(
                Blocked(index, own[index], work.end - call.start, work.end - call.start, call.end - work.end)
            )
        elif reach is not None and evidence[call.name].waits_for != names.NOTHING:
            lanes, until = reach
            unknown = [lane for lane in lanes if queued.unknown(lane, until)]
            last = queued.latest(unknown, until)
            if last is None:
                idle[call.name].append(call.duration)
            else:
                candidates[call.name].append((index, last))
            for lane in lanes:
                queued.known[lane] = max(queued.known[lane], until)
    for name, found in candidates.items():
        result.blocked += _price(capture, found, idle[name], evidence[name])
    result.blocked += _launches(capture, evidence, queued)
    result.blocked.sort(key=lambda one: one.call)
    for blocked in result.blocked:
        one = evidence[capture.calls[blocked.call].name]
        one.waited += 1
        one.waited_ns += blocked.waited_ns
        one.blocked_ns += blocked.blocked_ns
    return result


def _verdict(one: Evidence) -> str:
    if one.documented in (names.OWN, names.ROOM) or one.outstanding < ENOUGH:
        return one.documented
    if one.returned_before > CONTRARY * one.outstanding:
        return names.NOTHING
    if one.documented == names.NOTHING and one.returned_before == 0:
        return names.DEVICE
    return one.documented


def _price(capture: Capture, found: list[tuple[int, int]], idle: list[int], evidence: Evidence) -> list[Blocked]:
    """The wait of each of these candidates of one kind."""
    cost = round(median(idle)) if idle else None
    evidence.idle_calls, evidence.idle_cost_ns = len(idle), cost
    blocked = []
    for index, last in found:
        call, over = capture.calls[index], capture.work[last].end
        # A call that returned earlier did not wait for it.
        waited = max(0, over - call.start) if over <= call.end else 0
        blocked.append(
            Blocked(index, last, waited, waited, call.end - max(call.start, over) if over <= call.end else 0)
        )
    if cost is None:
        return [one for one in blocked if one.waited_ns > 0]
    plain = [max(0, one.return_ns - cost) for one in blocked if 0 < one.return_ns <= OWN_WORK * cost]
    typical = round(median(plain)) if plain else 0
    for one in blocked:
        if one.return_ns > 0:
            one.blocked_ns += max(0, one.return_ns - cost) if one.return_ns <= OWN_WORK * cost else typical
    return [one for one in blocked if one.blocked_ns > 0]


def _reach(
    queued: _Queued, call: Call, scope: str, recorded: dict[tuple[int, int], list[Call]]
) -> tuple[list[tuple[int, int, int]], int]:
    """The streams that a call refers to, and the time before which work must have been queued."""
    lanes = [lane for lane in queued.lanes if lane[0] == call.process]
    stream, until = call.stream if scope == names.STREAM else None, call.start
    if scope == names.EVENT and call.event is not None:
        before = [one for one in recorded.get((call.process, call.event), []) if one.start < call.start]
        if before:
            stream, until = before[-1].stream, before[-1].start
    if stream is not None:
        lanes = [lane for lane in lanes if lane[2] == stream]
    if any(lane[1] == call.device for lane in lanes):
        lanes = [lane for lane in lanes if lane[1] == call.device]
    return lanes, until


def _event_records(capture: Capture) -> dict[tuple[int, int], list[Call]]:
    """Calls that recorded an event, by process and event."""
    found: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in capture.calls:
        if call.event is not None and call.kind == "event_record":
            found[call.process, call.event].append(call)
    return found


def _own_copies(capture: Capture) -> dict[int, int]:
    """Copies and fills that ended inside the call that queued them and that held it: call to work."""
    found: dict[int, int] = {}
    for index, work in enumerate(capture.work):
        if work.call is None or work.kind != "memcpy":
            continue
        call = capture.calls[work.call]
        held = names.scope(call.name) == names.OWN or work.pageable
        if held and call.start < work.end <= call.end:
            found[work.call] = index
    return found


def _launches(capture: Capture, evidence: dict[str, Evidence], queued: _Queued) -> list[Blocked]:
    """Launches that waited for a free entry in the queue."""
    blocked = []
    usual = {
        name: median(call.duration for call in capture.calls if call.name == name)
        for name, one in evidence.items()
        if one.documented == names.ROOM
    }
    queue_times = {lane: sorted(capture.work[index].end for index in indices) for lane, indices in queued.lanes.items()}
    by_end = {
        lane: sorted(indices, key=lambda index: capture.work[index].end) for lane, indices in queued.lanes.items()
    }
    for index, call in enumerate(capture.calls):
        if call.name not in usual or call.duration <= OWN_WORK * usual[call.name]:
            continue
        lanes = [lane for lane in queued.lanes if lane[0] == call.process]
        outstanding = sum(
            bisect.bisect_left(queued.times[lane], call.start) - bisect.bisect_right(queue_times[lane], call.start)
            for lane in lanes
        )
        if outstanding < QUEUE:
            continue
        inside = [
            by_end[lane][place - 1]
            for lane in lanes
            if (place := bisect.bisect_right(queue_times[lane], call.end)) and queue_times[lane][place - 1] > call.start
        ]
        if inside:
            last = max(inside, key=lambda one: capture.work[one].end)
            over = capture.work[last].end
            blocked.append(Blocked(index, last, over - call.start, over - call.start, call.end - over))
    return blocked
