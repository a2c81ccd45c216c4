"""Training on two GPUs: step times of both ranks by allocator and buffers, and PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from statistics import median
from typing import Any

from vramlab_analysis.errors import AnalysisError
from vramlab_analysis.experiments import Entry, Turn, results
from vramlab_analysis.measures import Interval, ratio
from vramlab_analysis.pages.cells import origin, span
from vramlab_analysis.pages.registry import group, markdown, table

MICRO = 1e6
MIB = 2**20
# Variants of the table, by arm of the spec `ranks`, its options and the width.
VARIANTS = {
    ("allocators", "caching", 1024): "`caching`",
    ("allocators", "stream-ordered", 1024): "`stream-ordered`",
    ("allocators", "naive", 1024): "`naive`",
    ("mixed", "caching", 1024): "`naive` on rank 0, `caching` on rank 1",
    ("buffers", "kept", 1024): "`caching`, `--bucket 64K`",
    ("buffers", "record-stream", 1024): "`caching`, `--bucket 64K --buffers record-stream`",
    ("buffers", "events", 1024): "`caching`, `--bucket 64K --buffers events`",
    ("allocators", "caching", 4096): "`caching`",
    ("buckets", "1M", 4096): "`caching`, `--bucket 1M`",
    ("buckets", "1G", 4096): "`caching`, `--bucket 1G`",
    ("no-overlap", "caching", 4096): "`caching`, `--overlap off`",
}
# Whether a step's launches are single or one graph.
MODES = ("eager", "graph")
# The option that tells the cells of an arm apart, beside the width.
NAMED_BY = {"buffers": "buffers", "buckets": "bucket"}


@cache
def _beside() -> dict[tuple[str, str], dict[Turn, float]]:
    """Steps in microseconds by turn: of the trainer's slower rank and of PyTorch (`ddp`), eager and as a graph."""
    found: dict[tuple[str, str], dict[Turn, float]] = {}
    for entry in results("ranks-ddp", "gpu").select():
        if entry.arm == "ddp":
            mode, step = entry.options["of"], 1e3 * entry.result["lines"][0]["ms"]
        else:
            mode, (step,) = entry.options["launch"], largest_of_ranks([entry], "step_s")
        found.setdefault((entry.arm, str(mode)), {})[entry.turn] = float(step)
    missing = [f"{arm} {mode}" for arm in ("trainer", "ddp") for mode in MODES if (arm, mode) not in found]
    if missing:
        raise AnalysisError(f"experiments/results: the newest experiment `ranks-ddp` lacks {', '.join(missing)}.")
    return found


def beside_pytorch(mode: str) -> Interval:
    """The trainer's step over that of PyTorch's DistributedDataParallel, by repeat and host."""
    return ratio(_beside()[("trainer", mode)], _beside()[("ddp", mode)])


@group("ddp")
def ddp() -> Mapping[str, Any]:
    """Median step of width 1024 in microseconds of PyTorch's DistributedDataParallel and of the trainer, by mode."""
    steps = {arm: {mode: median(_beside()[(arm, mode)].values()) for mode in MODES} for arm in ("trainer", "ddp")}
    runs = span(len(times) for times in _beside().values())
    return {"pytorch": steps["ddp"], "trainer": steps["trainer"], "runs": runs, "origin": origin("ranks-ddp")}


@cache
def _variants() -> dict[tuple[str, str, int], list[Entry]]:
    """Finished runs of the spec `ranks` by arm, option and width. Raises AnalysisError without one of `VARIANTS`."""
    found: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in results("ranks", "gpu").runs:
        if entry.done:
            option = str(entry.options[NAMED_BY.get(entry.arm, "alloc")])
            found.setdefault((entry.arm, option, int(entry.options["hidden"])), []).append(entry)
    missing = sorted(str(name) for name in VARIANTS if name not in found)
    if missing:
        raise AnalysisError(f"experiments/results: the newest experiment `ranks` lacks {', '.join(missing)}.")
    return found


def _losses() -> Iterator[tuple[int, tuple[float, ...]]]:
    """Width and sequence of losses of each finished run of two ranks."""
    for spec in ("ranks", "ranks-buffers"):
        for entry in results(spec, "gpu").runs:
            if entry.done:
                yield int(entry.options["hidden"]), tuple(entry.record.steps["loss"])


@group("ranks")
def values() -> Mapping[str, Any]:
    """Median step of the slower rank in microseconds by arm, option and width, and `equal`: counts of runs, widths and
    different sequences of losses."""
    cells: dict[str, Any] = {}
    for (arm, option, width), entries in _variants().items():
        times = largest_of_ranks(entries, "step_s")
        cells.setdefault(arm, {}).setdefault(option, {})[str(width)] = median(times)
    losses = list(_losses())
    widths, different = {width for width, _ in losses}, set(losses)
    return cells | {
        "runs": span(len(entries) for entries in _variants().values()),
        "origin": origin("ranks"),
        "equal": {"runs": len(losses), "widths": len(widths), "sequences": len(different)},
    }


def over(of: tuple[str, str, int], to: tuple[str, str, int]) -> Interval:
    """The slower rank's step of a variant over that of another, by repeat and host."""
    return ratio(_by_turn(_variants()[of]), _by_turn(_variants()[to]))


@table("ranks")
def steps() -> str:
    """Both ranks by variant: median step with the range, host blocked, reserved memory, and memory that waits."""
    body = []
    for name, title in VARIANTS.items():
        of = [entry.record.summary["ranks"] for entry in _variants()[name]]
        cells = []
        for rank in (0, 1):
            times = [MICRO * ranks[rank]["step_s"] for ranks in of]
            cells.append(f"{median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f})")
        blocked = [median(MICRO * ranks[rank]["blocked_s"] / ranks[rank]["steps"] for ranks in of) for rank in (0, 1)]
        peaks = [
            max(rank[f"peak_{kind}_bytes"] for ranks in of for rank in ranks) / MIB for kind in ("reserved", "pending")
        ]
        body.append(
            [
                f"{name[2]:,}",
                title,
                *cells,
                f"{blocked[0]:,.0f}, {blocked[1]:,.0f}",
                *(f"{peak:,.1f}" for peak in peaks),
            ]
        )
    head = [
        "width",
        "",
        "rank 0, µs a step",
        "rank 1, µs a step",
        "host blocked, µs a step",
        "reserved, MiB",
        "pending, MiB",
    ]
    return markdown(head, body)


# Rows of the table by width: arm and allocator in the spec `ranks`.
BY_WIDTH = {
    ("allocators", "caching"): "`caching`",
    ("allocators", "stream-ordered"): "`stream-ordered`",
    ("allocators", "naive"): "`naive`",
    ("mixed", "caching"): "`naive` on rank 0, `caching` on rank 1",
}


@cache
def _by_width() -> dict[tuple[str, str], dict[int, list[Entry]]]:
    """Finished runs of the spec `ranks` by row and width. Raises AnalysisError without one."""
    found: dict[tuple[str, str], dict[int, list[Entry]]] = {row: {} for row in BY_WIDTH}
    for entry in results("ranks", "gpu").runs:
        row = (entry.arm, entry.options["alloc"])
        if entry.done and row in found:
            found[row].setdefault(int(entry.options["hidden"]), []).append(entry)
    if not all(found.values()):
        raise AnalysisError("experiments/results: the newest experiment `ranks` lacks rows of the table by width.")
    return found


def largest_of_ranks(entries: list[Entry], value: str) -> list[float]:
    """The largest value of a run's ranks, in microseconds, for each run."""
    return [MICRO * max(rank[value] for rank in entry.record.summary["ranks"]) for entry in entries]


@group("ranks-by-width")
def by_width() -> Mapping[str, Any]:
    """Median step of the slower rank and exposed communication in microseconds, by allocators and width; the step over
    that of `caching` in the same repeat on the same host, `over`; and counts."""
    rows = _by_width()
    base = {width: _by_turn(entries) for width, entries in rows[("allocators", "caching")].items()}
    names = {("mixed", "caching"): "mixed"}
    cells = {
        names.get(row, row[1]): {
            str(width): {
                "step": median(largest_of_ranks(entries, "step_s")),
                "exposed": median(largest_of_ranks(entries, "exposed_communication_s")),
                "over": median(_over(_by_turn(entries), base[width])),
            }
            for width, entries in sorted(widths.items())
        }
        for row, widths in rows.items()
    }
    counts = [len(entries) for widths in rows.values() for entries in widths.values()]
    return cells | {"runs": span(counts), "origin": origin("ranks")}


def _by_turn(entries: list[Entry]) -> dict[Turn, float]:
    """The step of the slower rank of each run, by repeat and host."""
    return dict(zip((entry.turn for entry in entries), largest_of_ranks(entries, "step_s"), strict=True))


def _over(steps: dict[Turn, float], base: dict[Turn, float]) -> list[float]:
    """Steps over those of the same turn."""
    return [step / base[turn] for turn, step in steps.items() if turn in base]


@table("ranks-by-width")
def steps_by_width() -> str:
    """The slower rank's median step with the range, and the exposed communication, by allocators and width."""
    rows = _by_width()
    widths = sorted({width for found in rows.values() for width in found})
    body = []
    for row, found in rows.items():
        cells = []
        for width in widths:
            times = largest_of_ranks(found[width], "step_s")
            exposed = median(largest_of_ranks(found[width], "exposed_communication_s"))
            cells.append(f"{median(times):,.0f} ({min(times):,.0f} to {max(times):,.0f}); {exposed:,.0f}")
        body.append([BY_WIDTH[row], *cells])
    return markdown(["µs a step; exposed sums", *(f"width {width:,}" for width in widths)], body)
