"""The sentences and tables of the documents whose figures are computed from the recorded results.

From the repository's root: `vramlab-analysis readme` compares them with the documents; `--write` puts them there.
Figures of fewer than five runs come with all that these runs say: the least and the most.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import polars as pl

from vramlab_analysis import inside, repository, steps, truth
from vramlab_analysis.errors import AnalysisError, read_json
from vramlab_analysis.experiments import holds_experiment, load_experiment, results
from vramlab_analysis.measures import middle, train_pace
from vramlab_analysis.records import Run
from vramlab_analysis.repository import results as folder

# Documents with computed figures. Each figure has its place in one of them.
PAGES = ("README.md", "experiments/answers.md")
# What an arm with settings of its own is called in the README's table.
TRIMMED = "`stream-ordered`, threshold 0, sync each step"
ARMS = {
    "stream-ordered:release_threshold=0 --sync step": TRIMMED,
    # As it was written before settings stood behind the name.
    "stream-ordered --release-threshold 0 --sync step": TRIMMED,
}
# Where the figures come from.
H200 = "2026-11-21-h200"
# Within this share of the measured time a simulated one counts as right, as for `experiments fidelity`.
TOLERANCE = 0.15
# Specs with runs of the same networks on both devices, besides `fidelity`, of which a part was fitted.
UNFITTED = (
    "caching-vs-stream-ordered",
    "initialisation",
    "iris",
    "latency",
    "loss-against-pytorch",
    "memory",
    "synchronise",
    "when-allocations-stop",
    "where-time-goes",
    "width",
)


def _cells(spec: str, by: list[str], value: str = "step_us") -> dict[tuple[Any, ...], dict[str, Any]]:
    """Median, least, most and number of the repeats of each cell, by its values of `by`."""
    rows = middle(results(spec, "h200").frame(), by, value).iter_rows(named=True)
    return {tuple(row[name] for name in by): row for row in rows}


def _span(cell: dict[str, Any]) -> str:
    low, high = f"{cell['low']:.0f}", f"{cell['high']:.0f}"
    return low if low == high else f"{low} to {high}"


def _runs(cells: Iterable[dict[str, Any]]) -> str:
    counts = {cell["repeats"] for cell in cells}
    words = {1: "one run each", 2: "two runs each", 3: "three runs each"}
    if len(counts) > 1:
        return f"{min(counts)} to {max(counts)} runs each"
    only = counts.pop()
    return words.get(only, f"{only} runs each")


def pool() -> str:
    """`caching` beside `stream-ordered`."""
    cells = _cells("caching-vs-stream-ordered", ["alloc", "hidden"])
    parts = []
    for hidden in (784, 2048):
        ours, theirs = cells["caching", hidden], cells["stream-ordered", hidden]
        more = 100 * (theirs["value"] / ours["value"] - 1)
        parts.append(f"{more:.1f} % slower at width {hidden} ({_span(theirs)} us a step against {_span(ours)})")
    return f"{', '.join(parts)}; {_runs(cells.values())}"


def threshold() -> str:
    """What the release threshold costs, as far as the runs tell."""
    cells = _cells("release-threshold", ["sync", "release_threshold"])
    none, large = cells["step", "0"], [cells["step", name] for name in ("128M", "max")]
    low, high = min(cell["low"] for cell in large), max(cell["high"] for cell in large)
    return (
        f"these runs do not tell: with a synchronise each step {_span(none)} us a step at 0, and {low:.0f} to "
        f"{high:.0f} at 128M and max, which come to the same here; {_runs([none, *large])}"
    )


def synchronise() -> str:
    """`caching` with each way of synchronising."""
    cells = _cells("synchronise", ["alloc", "sync"])
    never, step, op = (cells["caching", sync] for sync in ("never", "step", "op"))
    return (
        f"{_span(never)} us a step without, {_span(step)} with one each step, {_span(op)} with one after each "
        f"operation; {_runs([never, step, op])}"
    )


def loader() -> str:
    """`caching` with each loader."""
    cells = _cells("loader", ["alloc", "loader"])
    kept, copied, pinned = (cells["caching", name] for name in ("resident", "copy", "pinned"))
    return (
        f"{_span(kept)} us a step with data on the device, {_span(copied)} copied, {_span(pinned)} with page-locked "
        f"buffers; {_runs([kept, copied, pinned])}"
    )


def width() -> str:
    """`naive` beside `caching`, from narrow to wide."""
    cells = _cells("width", ["name", "hidden"])
    widths = sorted(hidden for name, hidden in cells if name == "caching")
    ratio = {hidden: cells["naive", hidden]["value"] / cells["caching", hidden]["value"] for hidden in widths}
    most = max(widths, key=lambda hidden: ratio[hidden])
    first, last = widths[0], widths[-1]
    eager = [h for h in widths if cells["pytorch-eager", h]["value"] > cells["caching", h]["value"]]
    graph = all(cells["pytorch-graph", h]["value"] < cells["caching", h]["value"] for h in widths)
    return (
        f"`naive` takes {ratio[first]:.1f} times as long as `caching` at {first}, {ratio[most]:.1f} times at {most}, "
        f"where it is most, {ratio[last]:.1f} times at {last}; PyTorch eager is slower up to {max(eager)}, "
        f"its captured eager step {'faster everywhere' if graph else 'not faster everywhere'}; {_runs(cells.values())}"
    )


def _beside(table: pl.DataFrame, mode: str, **where: Any) -> dict[int, float]:
    """By width, the step time of the trainer's graph on one stream over that of PyTorch in `mode`."""
    said = [pl.col(key).eq_missing(value) for key, value in where.items()]
    out = {}
    for hidden, rows in table.filter(*said).group_by("hidden", maintain_order=True):
        ours = rows.filter((pl.col("program") == "trainer") & (pl.col("launch") == "graph"))
        ours = ours.filter(~pl.col("how").str.contains("streams 2"))
        theirs = rows.filter((pl.col("program") == "pytorch") & (pl.col("launch") == mode))
        if ours.height and theirs.height:
            out[int(hidden[0])] = float(ours["step_us"].min()) / float(theirs["step_us"].min())  # type: ignore[arg-type]
    return out


def _table(spec: str) -> pl.DataFrame:
    return steps.frame(steps.gather([str(folder() / H200 / spec)]))


def captured() -> str:
    """Graphs beside PyTorch's captured eager step."""
    table = _table("fast-training")
    f16, f32 = _beside(table, "graph", dtype="f16"), _beside(table, "graph", dtype="f32")
    full = _beside(_table("full-batch"), "graph", dtype="f32")
    told = {name: [f"{value:.2f}" for value in ratios.values()] for name, ratios in (("f16", f16), ("f32", f32))}
    return (
        f"{', '.join(told['f16'][:-1])} and {told['f16'][-1]} of its time in f16 at widths {', '.join(map(str, f16))}, "
        f"{', '.join(told['f32'][:-1])} and {told['f32'][-1]} in f32, one run each; {next(iter(full.values())):.2f} "
        f"for all 60,000 rows at once in f32. Times of the GPU's events, graphs under `caching`"
    )


def compiled() -> str:
    """Graphs beside PyTorch's step that is compiled as a whole and captured, its fastest mode."""
    table = _table("compiled-step")
    parts = []
    for dtype in ("f32", "f16"):
        ratios = _beside(table, "compiled-graph", dtype=dtype)
        spans = []
        for hidden in ratios:
            said = (pl.col("dtype") == dtype) & (pl.col("hidden") == hidden) & (pl.col("program") == "pytorch")
            fastest = table.filter(said).sort("step_us").row(0, named=True)
            spans.append(f"{fastest['low_us']:.1f} to {fastest['high_us']:.1f}")
        words = " and ".join(f"{value:.2f}" for value in ratios.values())
        parts.append(f"{words} of its time in {dtype} ({', '.join(spans)} us)")
        widths = " and ".join(map(str, ratios))
    return f"{', '.join(parts)}, at widths {widths}; {_runs(table.iter_rows(named=True))}"


def _network(run: Run) -> tuple[Any, ...]:
    """What makes two runs do the same work on two devices."""
    keys = ("allocator", "hidden", "layers", "batch", "sync", "loader", "init", "latency", "trace")
    return (
        *(run.settings.get(key) for key in keys),
        json.dumps(run.settings.get("allocator_settings"), sort_keys=True),
    )


def unfitted() -> dict[str, Any]:
    """How far simulated step times are from measured ones outside of what was fitted.

    `cells`: how many; `within`: the share of them within `TOLERANCE`; `contrast`: the most by which the ratio of two
    allocators in the same network is off, as a factor.
    """
    differences, contrast = [], 1.0
    for spec in UNFITTED:
        medians: dict[str, dict[tuple[Any, ...], float]] = {}
        for device in ("h200", "sim"):
            paces: dict[tuple[Any, ...], list[float]] = {}
            for entry in results(spec, device).select(program="trainer"):
                pace = train_pace(entry.record)
                if pace is not None:
                    paces.setdefault(_network(entry.record), []).append(pace)
            medians[device] = {key: statistics.median(values) for key, values in paces.items()}
        off = {key: medians["sim"][key] / value for key, value in medians["h200"].items() if key in medians["sim"]}
        differences += [abs(value - 1) for value in off.values()]
        for one, other in product(off, off):
            # The same network but for the allocator and its settings.
            if one[1:-1] == other[1:-1]:
                contrast = max(contrast, off[one] / off[other])
    within = sum(value <= TOLERANCE for value in differences) / len(differences)
    return {"cells": len(differences), "within": within, "contrast": contrast}


def hosts() -> str:
    """How epochs of the README's first table vary over all that was recorded."""
    times: dict[str, list[float]] = {}
    experiments = [load_experiment(path) for path in sorted((folder() / H200).iterdir()) if holds_experiment(path)]
    for entry in (entry for experiment in experiments for entry in experiment.runs):
        if entry.meta["program"] != "trainer":
            continue
        summary = entry.record.summary
        settings = {"dtype": "f32", "fuse": "none", "launch": "eager", **summary["settings"]}
        if summary.get("program", "trainer") != "trainer" or summary["dataset"]["name"] != "mnist":
            continue
        work = [settings[key] for key in ("hidden", "layers", "batch", "sync", "loader", "dtype", "fuse", "launch")]
        epochs = [epoch["wall_s"] for epoch in summary["epochs"][1:] if epoch["steps"] == 938]
        unlimited = settings.get("allocator_settings", {}).get("release_threshold", 2**64 - 1) == 2**64 - 1
        if work == [784, 4, 64, "never", "resident", "f32", "none", "eager"] and epochs and unlimited:
            times.setdefault(settings["allocator"], []).append(1e3 * statistics.median(epochs))
    said = [
        f"`{name}` {min(times[name]):.0f} to {max(times[name]):.0f} ms ({len(times[name])} runs)"
        for name in ("naive", "caching", "stream-ordered")
    ]
    return (
        "The table is one comparison. Over all records of this work, on several machines and builds: "
        f"{', '.join(said)}."
    )


def fidelity() -> str:
    """What the agreement of the simulated GPU rests on."""
    told = unfitted()
    return (
        "Simulated times are fitted: kernels to timings, the program's own time a call to cells of width 128, and the "
        "size of the L2 cache was chosen on cells that `experiments fidelity` reports. Of "
        f"{told['cells']} cells of other specs, which nothing was fitted to, {100 * told['within']:.0f} % are within "
        f"{100 * TOLERANCE:.0f} %; the ratio of two allocators in one of them is off by up to "
        f"{told['contrast']:.1f} times."
    )


# Columns of the tables of calls: the allocator's name in the record, and as the README has it.
CALLS = {
    "caching": "`caching`",
    "pytorch": "`pytorch`",
    "pytorch-c10": "PyTorch",
    "rmm-pool": "RMM pool",
    "rmm-arena": "RMM arena",
    "cuda-malloc-async": "driver's pool",
}
# Their rows: the case, and what the README calls it.
TIMES = {
    "history/gpt2": "GPT-2, recorded",
    "history/resnet50": "ResNet-50, recorded",
    "history/mlp": "MLP, recorded",
    "history/streams": "prefetch on a side stream, recorded",
    "mixed/64": "mixed sizes, 64 live",
    "mixed/1024": "1,024 live",
    "mixed/16384": "16,384 live",
}
RATES = {
    "threads/1": "1 thread",
    "threads/4": "4 threads, a stream each",
    "threads/16": "16 threads, a stream each",
    "shared/4": "4 threads, one stream",
    "shared/16": "16 threads, one stream",
}
BENCH = "bench.json"
CALLS_H200 = "2026-11-24-h200"


def _bench() -> dict[str, Any]:
    recorded: dict[str, Any] = read_json(folder() / CALLS_H200 / BENCH)
    return recorded


def _calls(title: str, cases: dict[str, str]) -> str:
    """A table of calls: a row for each case, a column for each allocator; medians."""
    found = {(row["case"], row["allocator"]): row["median"] for row in _bench()["rows"]}
    lines = [f"| {title} | {' | '.join(CALLS.values())} |", "|---|" + "--:|" * len(CALLS)]
    for case, words in cases.items():
        values = (found[case, name] for name in CALLS)
        cells = (f"{value:.2g}" if value < 10 else f"{value:,.0f}" for value in values)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def noise() -> str:
    """How far the repeats of `caching` and of PyTorch are apart in the tables of calls."""
    report = _bench()
    spans = {}
    for name in ("caching", "pytorch-c10"):
        rows = [row for row in report["rows"] if row["allocator"] == name and row["case"].startswith("history/")]
        spans[name] = ", ".join(
            f"{row['case'].removeprefix('history/')} {row['min']:.0f} to {row['max']:.0f}" for row in rows
        )
        better = [
            other["median"] / row["median"]
            for row in report["rows"]
            for other in report["rows"]
            if (row["allocator"], other["allocator"]) == ("caching", "pytorch-c10") and row["case"] == other["case"]
            if row["case"].startswith("history/")
        ]
    return (
        f"Over the {report['repeats']} repeats of the recorded histories `caching` took {spans['caching']} ns, and "
        f"PyTorch {spans['pytorch-c10']}: by medians {min(better):.1f} to {max(better):.1f} times as long."
    )


def waiting_frees() -> str:
    """What frees that wait for other streams cost PyTorch's rules, and what streams bring that take from each other."""
    frame = results("family", "sim").replays(arm="completion")
    peak = {(row["history"], row["alloc"], row["completion"]): row for row in frame.iter_rows(named=True)}

    def change(now: float, before: float) -> str:
        apart = 100 * (now / before - 1)
        return "as much" if abs(apart) < 0.05 else f"{abs(apart):.1f} % {'more' if apart > 0 else 'less'}"

    waits, lends = [], []
    for name in frame["history"].unique(maintain_order=True):
        words = HISTORIES.get(name.removesuffix(".pickle.xz"))
        if words is None:
            continue
        own, at_once = (peak[name, "lab", how] for how in ("recorded", "instant"))
        more = (own["peak_active_bytes"] - at_once["peak_active_bytes"]) / 2**20
        active = f" ({more:,.0f} MiB more are active)" if more >= 1 else ""
        waits.append(f"{words} {change(own['peak_reserved_bytes'], at_once['peak_reserved_bytes'])}{active}")
        lent = peak[name, "lab:stream=steal", "recorded"]["peak_reserved_bytes"]
        lends.append(f"{words} {change(lent, own['peak_reserved_bytes'])}")
    return (
        "**What frees cost that wait for other streams.** Under PyTorch's rules programs reserve, beside the same "
        f"frees at once: {'; '.join(waits)}. "
        f"Where streams take from each other they reserve, beside that: {'; '.join(lends)}."
    )


def waiting() -> str:
    """What of the time in the driver's two calls for memory is waiting, in the README's table."""
    calls = read_json(folder() / H200 / "cuda.json")[0]["driver_calls"]
    total, blocked = (
        {call: calls[call][key] / 1e6 for call in ("mem_alloc", "mem_free")} for key in ("total_ns", "blocked_ns")
    )
    return (
        "**It is the free that waits.** Of the time in `cuMemFree` "
        f"{blocked['mem_free']:.0f} of {total['mem_free']:.0f} ms an epoch are waiting; of that in "
        f"`cuMemAlloc` {blocked['mem_alloc']:.1f} of {total['mem_alloc']:.0f}. "
        '"`cudaMalloc` synchronises" is not what this driver does.'
    )


# Rows of the table of questions, by the question.
ANSWERS = {
    "is the driver's pool as good?": pool,
    "what does threshold 0 cost?": threshold,
    "what does synchronising cost `caching`?": synchronise,
    "and copying each batch?": loader,
    "until which width does the allocator matter?": width,
    "how fast is a step beside PyTorch's eager step, captured as a CUDA graph?": captured,
    "and beside PyTorch's fastest, the step compiled as a whole and captured?": compiled,
}
# Items of lists, by their first words.
ITEMS = {
    "**What frees cost that wait for other streams.**": waiting_frees,
    "**It is the free that waits.**": waiting,
    "The table is one comparison.": hosts,
    "Simulated times are fitted:": fidelity,
    "Over the": noise,
    "**How far it is off.**": truth.sentence,
    "**Held out:**": truth.held_out,
}


def epochs() -> str:
    """The README's table: an epoch under each allocator, on the H200 and on the simulated one."""
    real, simulated = (read_json(folder() / H200 / f"{device}.json") for device in ("cuda", "sim"))
    best = min(row["epoch_s"] for row in real)
    lines = [
        "| allocator | epoch, H200 | to the best | driver allocations | host blocked, most in | allocate p50 | p99 "
        "| peak reserved | simulated |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row, other in zip(real, simulated, strict=True):
        arm = ARMS.get(row["arm"], f"`{row['arm']}`")
        off = 100 * (other["epoch_s"] / row["epoch_s"] - 1)
        cells = [
            f"{1e3 * row['epoch_s']:.0f} ms",
            f"{row['epoch_s'] / best:.2f}",
            f"{row['driver_allocations']:,}",
            f"{row['blocked_ns'] / 1e6:.0f} ms, `{row['blocked_in']}`",
            _nanoseconds(row["allocate_p50_ns"]),
            _nanoseconds(row["allocate_p99_ns"]),
            f"{row['peak_reserved_bytes'] / 2**20:.1f} MiB",
            f"{1e3 * other['epoch_s']:.0f} ms ({off:+.0f} %)",
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _nanoseconds(value: float) -> str:
    if value < 1000:
        return f"{value:.0f} ns"
    return f"{value / 1e3:.2f} us" if value < 10_000 else f"{value / 1e3:.1f} us"


# Columns of the table of histories: the allocator, and as the page has it.
FAMILY = {
    "caching": "PyTorch (`caching`)",
    "pytorch-expandable": "expandable segments",
    "remap": "`remap`",
    "remap:steal=always": "`remap`, always",
    "remap:steal=always,small_pool=off": "the same, one pool",
    "rmm-pool": "RMM's pool",
    "bfc": "`bfc`",
    "stream-ordered": "`stream-ordered`",
}
# Their rows.
HISTORIES = {
    "mlp": "MLP",
    "gpt2": "GPT-2, lengths vary",
    "resnet50": "ResNet-50",
    "streams": "prefetch on a side stream",
    "ranks/gpt2_ddp.rank0": "GPT-2, DDP, one of two ranks",
    "ranks/gpt2_fsdp1.rank0": "GPT-2, FSDP, one of two ranks",
}
RESERVED = "peak reserved over the bound"


def family() -> str:
    """The table of recorded histories: the bound, the plan, and what each policy reserves over the bound."""
    experiment = results("family", "h200")
    named = pl.col("history").str.replace(r"\.pickle\.xz$", "")
    frame, plans = (experiment.replays(arm=arm).with_columns(history=named) for arm in ("replay", "plan"))
    planned = {row["history"]: row["plan_bytes"] for row in plans.iter_rows(named=True)}
    lines = [
        f"| {RESERVED} | bound | a plan of the whole | {' | '.join(FAMILY.values())} |",
        "|---|" + "--:|" * (len(FAMILY) + 2),
    ]
    for history, words in HISTORIES.items():
        rows = {row["alloc"]: row for row in frame.filter(pl.col("history") == history).iter_rows(named=True)}
        bound, plan = rows["caching"]["lower_bound_bytes"], planned[history]
        cells = [f"{bound / 2**20:,.0f} MiB", f"{plan / bound:.3f}"]
        cells += [f"{rows[name]['peak_reserved_bytes'] / bound:.3f}" for name in FAMILY]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """The documents that have computed sentences and tables, by their path from the repository's root."""
    return {name: (repository.root() / name).read_text() for name in PAGES}


def _once(pages: dict[str, str], what: str, pattern: re.Pattern[str], fresh: Callable[[re.Match[str]], str]) -> None:
    """Puts a computed piece into the one page that has a place for it."""
    found = [name for name, text in pages.items() for _ in pattern.finditer(text)]
    if len(found) != 1:
        raise AnalysisError(f"{', '.join(pages)}: have {len(found)} places for {what}, which should be one.")
    pages[found[0]] = pattern.sub(fresh, pages[found[0]])


def rewritten(old: dict[str, str]) -> dict[str, str]:
    """The documents with their computed sentences and tables as the records have them now."""
    pages = dict(old)
    tables = {
        "allocator | epoch, H200": epochs(),
        RESERVED: family(),
        truth.TITLE: truth.table(),
        inside.TITLE: inside.table(),
        "ns for one allocation and its free": _calls("ns for one allocation and its free", TIMES),
        "million of them a second, all threads": _calls("million of them a second, all threads", RATES),
    }
    for title, table in tables.items():
        pattern = re.compile(rf"^\| {re.escape(title)} \|.*\n(?:\|.*\n)*", re.MULTILINE)
        _once(pages, f"the table '{title}'", pattern, lambda _, fresh=table: fresh)  # type: ignore[misc]
    for question, answer in ANSWERS.items():
        row = re.compile(rf"^\| {re.escape(question)} \| .* \| ([^|]*) \|$", re.MULTILINE)
        said = f"| {question} | {answer()} |"
        _once(pages, f"the row '{question}'", row, lambda found, said=said: f"{said} {found[1]} |")  # type: ignore[misc]
    for words, sentence in ITEMS.items():
        item = re.compile(rf"^- {re.escape(words)}.*\n(?:  .*\n)*", re.MULTILINE)
        fresh = textwrap.fill(
            f"- {sentence()}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        _once(pages, f"the item '{words}'", item, lambda _, fresh=fresh: fresh + "\n")  # type: ignore[misc]
    return pages


def readme(write: bool) -> str:
    """Compares the documents with the records, or puts their figures there; what was found, in one line."""
    from vramlab_analysis import output, samples

    unbuilt = samples.check()
    left = f"; not built, so not compared with its sample: {', '.join(unbuilt)}" if unbuilt else ""
    old = pages()
    new = rewritten(old)
    stale = [name for name in old if old[name] != new[name]]
    if not stale:
        return f"{' and '.join(old)} say what the records and the programs say{left}"
    if not write:
        name = stale[0]
        pairs = zip(old[name].splitlines(), new[name].splitlines(), strict=False)
        first = next(number for number, (a, b) in enumerate([*pairs, ("", " ")], 1) if a != b)
        raise AnalysisError(f"{name}:{first}: is not what the records say; `vramlab-analysis readme --write` mends it.")
    for name in stale:
        output.write(repository.root() / name, new[name])
    return f"wrote {' and '.join(stale)}{left}"
