"""Tables as text and as data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vramlab_analysis.nsight import allocator, device
from vramlab_analysis.nsight.attribution import Attribution
from vramlab_analysis.nsight.own_trace import Agreement


@dataclass
class Table:
    """A table: its columns are the keys of its rows."""

    name: str
    title: str
    rows: list[dict[str, Any]]
    note: str = ""


def tables(result: Attribution, agreement: list[Agreement] | None = None, most: int | None = None) -> list[Table]:
    """All tables of a capture. `most` bounds the long ones."""
    found = [_evidence(result), _longest(result, most), _waited_for(result, most), _ranges(result, most)]
    if agreement is not None:
        found.append(_agreement(agreement))
    gaps = device.gpu_idle(result.capture)
    span = result.capture.span[1] - result.capture.span[0]
    causes = [
        {
            "cause": row.cause, "gaps": row.gaps, "total_ns": row.total_ns, "longest_ns": row.longest_ns,
            "of_span": _share(row.total_ns, span),
        }
        for row in device.idle_by_cause(gaps)
    ]  # fmt: skip
    idle = sum(gap.duration for gap in gaps)
    busy = device.busy_ns(result.capture)
    found.append(
        Table(
            "gpu_idle",
            "Why the device was idle between its work",
            causes,
            f"busy {_time(busy)} and idle between {_time(idle)} of {_time(span)}",
        )
    )
    launches = [
        {
            "work": row.name, "count": row.count, "total_ns": row.total_ns, "median_ns": row.median_ns,
            "median_gap_ns": row.median_gap_ns, "median_latency_ns": row.median_latency_ns, "queued_behind": row.behind,
        }
        for row in device.launch_gaps(result.capture)
    ]  # fmt: skip
    found.append(
        Table(
            "launch_gaps",
            "Kernels and copies",
            launches[:most],
            "gap: from the end of the work before on the stream; latency: from the start of the launching call",
        )
    )
    places = [
        {
            "place": place.path or "(no range)", "operations": place.operations, "operations_ns": place.operations_ns,
            "paths": _counted(place.marks), "driver_calls": _counted(place.calls), "driver_ns": place.calls_ns,
            "blocked_ns": place.blocked_ns,
        }
        for place in allocator.by_place(result)
    ]  # fmt: skip
    found.append(Table("allocator", "Memory by place in the run", places[:most]))
    return [table for table in found if table.rows or table.name == "calls"]


def _evidence(result: Attribution) -> Table:
    rows = [
        {
            "call": one.name, "count": one.calls, "total_ns": one.total_ns, "waited": one.waited,
            "waited_ns": one.waited_ns, "blocked_ns": one.blocked_ns, "idle_cost_ns": one.idle_cost_ns,
            "outstanding": one.outstanding,
            "returned_before": one.returned_before, "waits_for": one.waits_for, "grounds": one.grounds,
        }
        for one in sorted(result.evidence.values(), key=lambda one: (-one.blocked_ns, -one.total_ns))
    ]  # fmt: skip
    return Table(
        "calls",
        "Calls",
        rows,
        "waited: until the work was over (timestamps); blocked: with the way back, beyond what the call costs with "
        "nothing queued; returned before: of those with work outstanding, how many did not wait for its end",
    )


def _longest(result: Attribution, most: int | None) -> Table:
    rows = result.rows()
    if most is not None:
        rows = sorted(rows, key=lambda row: -int(str(row["blocked_ns"])))[:most]
        keep = ("call", "bytes", "waited_ns", "blocked_ns", "path", "waited_for", "launch_path")
        rows = [{key: row[key] for key in keep} for row in rows]
    title = "Calls that waited" if most is None else "Longest waits"
    return Table("blocked_calls", title, rows)


def _waited_for(result: Attribution, most: int | None) -> Table:
    capture = result.capture
    count: Counter[tuple[str, str]] = Counter()
    waited: dict[tuple[str, str], int] = defaultdict(int)
    blocked: dict[tuple[str, str], int] = defaultdict(int)
    for one in result.blocked:
        key = capture.calls[one.call].name, capture.work[one.work].name
        count[key] += 1
        waited[key] += one.waited_ns
        blocked[key] += one.blocked_ns
    rows = [
        {
            "call": call,
            "waited_for": work,
            "count": count[call, work],
            "waited_ns": waited[call, work],
            "blocked_ns": total,
        }
        for (call, work), total in sorted(blocked.items(), key=lambda item: -item[1])
    ]
    return Table("waited_for", "What was waited for", rows[:most])


def _ranges(result: Attribution, most: int | None) -> Table:
    capture = result.capture
    count: Counter[str] = Counter()
    blocked: dict[str, int] = defaultdict(int)
    for one in result.blocked:
        place = allocator.general(capture.calls[one.call].path)
        count[place] += 1
        blocked[place] += one.blocked_ns
    steps = capture.step_count
    rows = [
        {
            "place": place or "(no range)", "count": count[place], "blocked_ns": total,
            "blocked_ns_per_step": round(total / steps) if steps else None,
        }
        for place, total in sorted(blocked.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    return Table("blocked_by_range", "Where in the run calls waited", rows[:most])


def _agreement(rows: list[Agreement]) -> Table:
    return Table(
        "agreement",
        "The capture and the run's own trace",
        [
            {
                "kind": row.kind, "count": row.calls, "waited_ns": row.waited_ns, "blocked_ns": row.blocked_ns,
                "own_blocked_ns": row.own_ns, "difference": _percent(row.difference),
                "same_work": _percent(row.same_work),
                "meter_blocked_ns": row.metered_ns, "of_span": _share(row.blocked_ns, row.span_ns),
            }
            for row in rows
        ],
        "own: the estimate from the run's own trace; meter: the run record's",
    )  # fmt: skip


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


def _share(part: int, whole: int) -> str:
    return _percent(part / whole) if whole else ""


def _percent(share: float) -> str:
    return f"{share:.1%}" if abs(share) != float("inf") else "-"


def _time(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}" if abs(ns) < 100 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"


def render(table: Table) -> str:
    """A table as text, times in the unit that fits."""
    if not table.rows:
        return f"{table.title}\n  none\n"
    columns = list(table.rows[0])
    cells = [[_cell(column, row[column]) for column in columns] for row in table.rows]
    heads = [column.removesuffix("_ns").replace("_ns_", "_").replace("_", " ") for column in columns]
    right = [any(isinstance(row[column], int) for row in table.rows) for column in columns]
    widths = [max(len(heads[place]), *(len(line[place]) for line in cells)) for place in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        parts = [
            text.rjust(width) if align else text.ljust(width)
            for text, width, align in zip(values, widths, right, strict=True)
        ]
        return "  " + "  ".join(parts).rstrip()

    body = [line(heads), "  " + "  ".join("-" * width for width in widths), *(line(values) for values in cells)]
    return "\n".join([table.title + (f" ({table.note})" if table.note else ""), *body, ""])


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if (
        isinstance(value, int)
        and (column.endswith("_ns") or "_ns_" in column)
        and not column.endswith(("start_ns", "end_ns"))
    ):
        return _time(value)
    return str(value)
