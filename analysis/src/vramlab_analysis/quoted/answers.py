"""The table of questions, and what is said of the trainer's epochs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import polars as pl

from vramlab_analysis import histograms, losses, steps
from vramlab_analysis.calls import account_of_steps
from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import (
    Experiment,
    holds_experiment,
    kept,
    labels,
    load_experiment,
    machine,
    newest,
    results,
)
from vramlab_analysis.measures import MANY, medians
from vramlab_analysis.plots import loss
from vramlab_analysis.quoted import beside
from vramlab_analysis.quoted.parts import cells, dates, each, listed, runs, span, table

QUESTION = "question"


def where() -> str:
    """Which of the driver's two calls waits under `naive`."""
    entries = results("where-time-goes", "gpu").select(alloc="naive")
    told = medians(pl.concat(account_of_steps(entry.record, 10, 29) for entry in entries), ["call"])
    alloc, free = (told.row(by_predicate=pl.col("call") == call, named=True) for call in ("mem_alloc", "mem_free"))
    return (
        f"the free: {free['blocked_us']:.0f} of its {free['total_us']:.0f} us a step are waiting, of the allocations' "
        f"{alloc['total_us']:.0f} us {alloc['blocked_us']:.1f} us; {each([len(entries)])}"
    )


def stop() -> str:
    """The last step in which `caching` asks the driver."""
    last, steps_done = set(), set()
    for entry in results("when-allocations-stop", "gpu").select(alloc="caching"):
        counts = entry.record.steps["driver_allocations"]
        last.add(max((index + 1 for index, count in enumerate(counts) if count), default=0))
        steps_done.add(len(counts))
    return f"after step {max(last)} of {max(steps_done):,}"


def pool() -> str:
    """`caching` beside `stream-ordered`."""
    told = cells("caching-vs-stream-ordered", ["alloc", "hidden"])
    parts = []
    for hidden in sorted({hidden for _, hidden in told}):
        ours, theirs = told["caching", hidden], told["stream-ordered", hidden]
        more = 100 * (theirs["value"] / ours["value"] - 1)
        parts.append(f"{more:.1f} % slower at width {hidden} ({span(theirs)} us a step against {span(ours)})")
    return f"{', '.join(parts)}; {runs(told.values())}"


def synchronise() -> str:
    """`caching` with each way of synchronising."""
    told = cells("synchronise", ["alloc", "sync"])
    never, step, op = (told["caching", sync] for sync in ("never", "step", "op"))
    return (
        f"{span(never)} us a step without, {span(step)} with one each step, {span(op)} with one after each operation; "
        f"{runs([never, step, op])}"
    )


def loader() -> str:
    """`caching` with each loader."""
    told = cells("loader", ["alloc", "loader"])
    kept, copied, pinned = (told["caching", name] for name in ("resident", "copy", "pinned"))
    return (
        f"{span(kept)} us a step with data on the device, {span(copied)} copied, {span(pinned)} with page-locked "
        f"buffers; {runs([kept, copied, pinned])}"
    )


def same_as_pytorch() -> str:
    """How far the losses are from PyTorch's."""
    experiment = results("loss-against-pytorch", "gpu")
    most, parts = {}, {}
    for ours in experiment.select(program="trainer"):
        hidden, rate = ours.options["hidden"], ours.options["lr"]
        theirs = experiment.select(program="pytorch", hidden=hidden, lr=rate)[0]
        apart = loss.difference(ours.record.steps, theirs.record.steps)
        most[rate, hidden] = float(apart["relative"].max()), apart.height  # type: ignore[arg-type]
        beyond = apart.filter(pl.col("relative") > 1e-4)
        if not beyond.is_empty():
            parts[rate, hidden] = beyond["index"][0] + 1
    rates = sorted({rate for rate, _ in most})
    small = {hidden: value for (rate, hidden), value in most.items() if rate == rates[0]}
    told = listed(f"{value:.0e} (width {hidden})" for hidden, (value, _) in sorted(small.items()))
    later = "; ".join(
        f"at {rate} those of width {hidden} are two runs from step {step} on" for (rate, hidden), step in parts.items()
    )
    return (
        f"losses differ by at most {told} in {next(iter(small.values()))[1]} steps from the same weights, f32, "
        f"learning rate {rates[0]}; {later}"
    )


def width() -> str:
    """`naive` beside `caching`, from narrow to wide."""
    told = cells("width", ["name", "hidden"])
    widths = sorted(hidden for name, hidden in told if name == "caching")
    ratio = {hidden: told["naive", hidden]["value"] / told["caching", hidden]["value"] for hidden in widths}
    most = max(widths, key=lambda hidden: ratio[hidden])
    first, last = widths[0], widths[-1]
    eager = [h for h in widths if told["pytorch-eager", h]["value"] > told["caching", h]["value"]]
    graph = all(told["pytorch-graph", h]["value"] < told["caching", h]["value"] for h in widths)
    return (
        f"`naive` takes {ratio[first]:.1f} times as long as `caching` at {first}, {ratio[most]:.1f} times at {most}, "
        f"where it is most, {ratio[last]:.1f} times at {last}; PyTorch eager is slower up to {max(eager)}, "
        f"its captured eager step {'faster everywhere' if graph else 'not faster everywhere'}; {runs(told.values())}"
    )


def _beside(told: pl.DataFrame, mode: str, **where: Any) -> dict[int, float]:
    """By width, the step time of the trainer's graph on one stream over that of PyTorch in `mode`."""
    said = [pl.col(key).eq_missing(value) for key, value in where.items()]
    out = {}
    for hidden, rows in told.filter(*said).group_by("hidden", maintain_order=True):
        ours = rows.filter((pl.col("program") == "trainer") & (pl.col("launch") == "graph"))
        ours = ours.filter(~pl.col("how").str.contains("streams 2"))
        theirs = rows.filter((pl.col("program") == "pytorch") & (pl.col("launch") == mode))
        if ours.height and theirs.height:
            out[int(hidden[0])] = float(ours["step_us"].min()) / float(theirs["step_us"].min())  # type: ignore[arg-type]
    return out


def full_batch() -> str:
    """A full batch beside PyTorch's captured eager step, like with like."""
    told = table("full-batch")
    # The record has f32 on tensor cores too, which the trainer no longer has.
    alike = told.filter((pl.col("program") == "pytorch") | pl.col("how").str.contains("tiled"))
    tiled = next(iter(_beside(alike, "graph", dtype="f32").values()))
    tf32 = next(iter(_beside(told, "graph", dtype="tf32").values()))
    rows = {entry.record.settings["batch"] for entry in results("full-batch", "gpu").select(program="trainer")}
    return (
        f"{tiled:.2f} of its time with f32 multiply-adds, as PyTorch's products are, and {tf32:.2f} with tf32 in both. "
        f"{max(rows):,} rows; {each(told['repeats'])}"
    )


def half() -> str:
    """What each type of values costs in the loss."""
    told = losses.frame([entry.record for entry in results("half-losses", "gpu").select()])
    told = told.filter((pl.col("accumulate") == "f32") & ((pl.col("dtype") != "f16") | (pl.col("loss_scale") > 1)))
    apart = float(told["to_other"].abs().max())  # type: ignore[arg-type]
    parts = []
    for dtype, weights in (("bf16", "half"), ("f16", "half"), ("bf16", "master"), ("f16", "master")):
        rows = told.filter((pl.col("dtype") == dtype) & (pl.col("weights") == weights))
        more = rows.filter(pl.col("program") == "trainer")["to_f32"][0]
        kept = "weights" if weights == "half" else "with f32 masters"
        parts.append(f"{dtype} {kept} {100 * more:+.1f} %")
    return f"{', '.join(parts)}; the two programs are up to {100 * apart:.1f} % apart in one type; one run each"


def in_a_graph() -> str:
    """How far the slowest allocator is behind, launched as a graph and one by one."""
    told = cells("graph-allocators", ["launch", "hidden", "alloc"])
    words = {"graph": "as a graph", "eager": "one by one"}
    parts = []
    for launch, hidden in dict.fromkeys((launch, hidden) for launch, hidden, _ in told if launch in words):
        these = {alloc: cell for (one, width, alloc), cell in told.items() if (one, width) == (launch, hidden)}
        slowest = max(these, key=lambda alloc: these[alloc]["value"])
        behind = these[slowest]["value"] / min(cell["value"] for cell in these.values()) - 1
        repeats = max(cell["high"] / cell["low"] - 1 for cell in these.values())
        told_apart = "more than repeats differ" if behind > 2 * repeats else "as repeats differ"
        by = (
            f"{behind + 1:.1f} times"
            if launch == "eager"
            else f"{100 * behind:.2f} %, {told_apart} ({100 * repeats:.2f} %)"
        )
        parts.append((launch, f"{words[launch]} at width {hidden} by {by}"))
    parts.sort(key=lambda one: list(words).index(one[0]))
    return f"hardly. The slowest is behind {'; '.join(text for _, text in parts)}; {runs(told.values())}"


def threshold() -> str:
    """What the driver's pool costs at its default release threshold, beside one above all that it holds."""
    told = cells("release-threshold", ["sync", "release_threshold"])
    parts = []
    for wait, words in (("step", "with a synchronise each step"), ("never", "without one")):
        default, kept = told[wait, "0"], told[wait, "max"]
        more = 100 * (default["value"] / kept["value"] - 1)
        parts.append(f"{words} by {more:.1f} % ({span(default)} us against {span(kept)})")
    return f"at 0 a step is longer {'; '.join(parts)}; {runs(told.values())}"


def streams() -> str:
    """What more streams bring."""
    told = cells("streams", ["arm", "hidden", "loader", "name", "streams"])
    graphs = {(hidden, count): cell for (arm, hidden, _, _, count), cell in told.items() if arm == "graph"}
    parts = []
    for hidden in sorted({hidden for hidden, _ in graphs}):
        changes = {
            c: graphs[hidden, c]["value"] / graphs[hidden, 1]["value"] - 1 for h, c in graphs if h == hidden and c > 1
        }
        best = min(changes, key=lambda count: changes[count])
        parts.append(
            f"{round(100 * changes[best]):+d} % at width {hidden} (best of {listed(map(str, sorted(changes)))} streams)"
        )
    eager = {key: cell for key, cell in told.items() if key[0] == "eager"}
    more = {key: cell for key, cell in eager.items() if key[-1] > 1}
    clear = [key for key, cell in more.items() if cell["high"] < eager[*key[:-1], 1]["low"]]
    return (
        f"as a graph {', '.join(parts)}; launched one by one they are faster than runs differ in {len(clear)} of "
        f"{len(more)} settings; {runs(told.values())}"
    )


def fusion() -> str:
    """What fusion saves."""
    frame = results("fusion-load", "gpu").frame(dtype="f32")
    made = {
        fuse: rows["allocations"].median() / rows["steps_done"].median()  # type: ignore[operator]
        for (fuse,), rows in frame.filter(pl.col("alloc") == "caching").group_by("fuse")
    }
    told = cells("fusion-load", ["alloc", "fuse"], dtype="f32")
    times = {alloc: [told[alloc, fuse]["value"] for fuse in ("none", "update")] for alloc in ("caching", "naive")}
    parts = listed(f"{before:.0f} to {after:.0f} under `{alloc}`" for alloc, (before, after) in times.items())
    return (
        f"{made['none']:.0f} to {made['update']:.0f} allocations a step, the validation's included, and us a step from "
        f"{parts} (f32, width {frame['hidden'][0]}); {runs(told.values())}"
    )


def memory() -> str:
    """What a pool reserves beside what was asked for."""
    told = {run.record.arm: run.record for run in results("memory", "gpu").select()}
    parts = []
    for arm, words in (("caching", "`caching`"), ("stream-ordered", "`stream-ordered`"), ("pytorch-eager", "PyTorch")):
        reserved, asked = (
            (told[arm].statistic(f"{one}_bytes.all.peak") or 0) / 2**20 for one in ("reserved", "requested")
        )
        parts.append(f"{words} {reserved:.0f} MiB reserved for {asked:.0f} asked for")
    return "; ".join(parts)


def latency() -> str:
    """One allocation, and the slowest of a thousand."""
    parts = []
    for alloc, words in (("caching", "`caching`"), ("stream-ordered", "the driver's pool"), ("naive", "the driver")):
        told = [one for entry in results("latency", "gpu").select(alloc=alloc) for one in entry.record.histograms]
        told = [one for one in told if one.operation == "allocate"]
        half, slow = (histograms.percentile(told, share) for share in (0.5, 0.999))
        parts.append(f"{words} {nanoseconds(half)} and {nanoseconds(slow)}")
    return ", ".join(parts)


# Questions, what answers them, and the notebook that draws it.
QUESTIONS: list[tuple[str, Callable[[], str], str]] = [
    ("does `cudaMalloc` wait, or `cudaFree`?", where, "01_where_time_goes"),
    ("when does `caching` stop asking the driver?", stop, "02_pools"),
    ("is the driver's pool as good?", pool, "02_pools"),
    ("has its release threshold to be raised?", threshold, "02_pools"),
    ("what does synchronising cost `caching`?", synchronise, "02_pools"),
    ("and copying each batch?", loader, "03_training"),
    ("does it compute what PyTorch computes?", same_as_pytorch, "03_training"),
    ("until which width does the allocator matter?", width, "04_width_and_time"),
    (
        "how fast is a step beside PyTorch's eager step, captured as a CUDA graph?",
        beside.captured,
        "08_training_at_the_limit",
    ),
    (
        "and beside PyTorch's fastest, the step compiled as a whole and captured?",
        beside.ratios,
        "08_training_at_the_limit",
    ),
    ("and with all rows in one batch?", full_batch, "08_training_at_the_limit"),
    ("what do types of 16 bits cost in the loss?", half, "08_training_at_the_limit"),
    ("does the allocator matter in a graph?", in_a_graph, "09_allocators_at_the_limit"),
    ("what do more streams bring?", streams, "09_allocators_at_the_limit"),
    ("what does fusion save?", fusion, "09_allocators_at_the_limit"),
    ("what does a pool cost in memory?", memory, "05_memory"),
    ("what is one call, and the slowest of a thousand?", latency, "06_latency"),
]


def questions() -> str:
    """The table of questions."""
    gpu = results("width", "gpu").machine.removeprefix("NVIDIA ")
    lines = [f"| {QUESTION} | on the {gpu} | notebook |", "|---|---|---|"]
    for question, answer, name in QUESTIONS:
        lines.append(f"| {question} | {answer()} | [{name[:2]}](../analysis/notebooks/{name}.ipynb) |")
    return "\n".join(lines) + "\n"


def machines() -> str:
    """Where the questions were answered."""
    gpu = machine(compared()[0]["device"])
    newest_of = {one.name: one for one in _experiments() if one.machine == gpu}
    days = dates(one.document["started_at"] for one in newest_of.values())
    pages = sorted({one.directories[0].parent.name for one in newest_of.values()})
    linked = listed(f"[`{page}`](results/{page}.md)" for page in pages)
    says = "says" if len(pages) == 1 else "say"
    return (
        f"Recorded on {gpu}s in virtual machines, {days}: `experiments run` on {len(newest_of)} specs. {linked} {says} "
        "of which machine and build each is, so compare within a row. Figures are medians; ranges are from the least "
        f"to the most of the runs, of {MANY} and more their middle half. To train the same network in PyTorch from the "
        "same weights and batches: `trainer start -o start.safetensors`, then `python3 experiments/baselines/mlp.py "
        "--start start.safetensors --mode graph`; `experiments/baselines/check_losses.py` compares the losses step by "
        "step."
    )


def compared() -> list[dict[str, Any]]:
    """The newest comparison of the allocators on a GPU."""
    told: list[dict[str, Any]] = read_json(newest("cuda.json"))
    return told


def epochs() -> str:
    """The README's table: an epoch under each allocator with its own settings."""
    rows = [row for row in compared() if "--" not in row["arm"]]
    best = min(row["epoch_s"] for row in rows)
    gpu = machine(rows[0]["device"]).removeprefix("NVIDIA ")
    lines = [
        f"| allocator | epoch, {gpu} | to the best | driver allocations | host blocked, most in | allocate p50 | p99 "
        "| peak reserved |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        told = [
            f"{1e3 * row['epoch_s']:.0f} ms",
            f"{row['epoch_s'] / best:.2f}",
            f"{row['driver_allocations']:,}",
            f"{row['blocked_ns'] / 1e6:.0f} ms, `{row['blocked_in']}`",
            nanoseconds(row["allocate_p50_ns"]),
            nanoseconds(row["allocate_p99_ns"]),
            f"{row['peak_reserved_bytes'] / 2**20:.1f} MiB",
        ]
        lines.append(f"| `{row['arm']}` | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def nanoseconds(value: float) -> str:
    """A time in nanoseconds, in the unit that suits it."""
    if value < 1000:
        return f"{value:.0f} ns"
    return f"{value / 1e3:.2f} us" if value < 10_000 else f"{value / 1e3:.1f} us"


def waiting() -> str:
    """What of the time in the driver's two calls for memory is waiting, in the README's table."""
    told = compared()[0]["driver_calls"]
    total, blocked = (
        {call: told[call][key] / 1e6 for call in ("mem_alloc", "mem_free")} for key in ("total_ns", "blocked_ns")
    )
    return (
        "- **It is the free that waits.** Of the time in `cuMemFree` "
        f"{blocked['mem_free']:.0f} of {total['mem_free']:.0f} ms an epoch are waiting; of that in "
        f"`cuMemAlloc` {blocked['mem_alloc']:.1f} of {total['mem_alloc']:.0f}. "
        '"`cudaMalloc` synchronises" is not what this driver does.'
    )


def hosts() -> str:
    """How epochs of the README's table vary over all that was recorded on such a GPU."""
    times: dict[str, list[float]] = {}
    work = {"hidden": 784, "layers": 4, "batch": 64, "sync": "never", "loader": "resident"}
    work |= {"dtype": "f32", "fuse": "none", "launch": "eager"}
    whole, gpu = compared()[0]["steps"], compared()[0]["device"]
    for entry in (entry for experiment in _experiments() for entry in experiment.runs):
        if entry.meta["program"] != "trainer" or entry.record.summary["dataset"]["name"] != "mnist":
            continue
        if entry.record.device != gpu:
            continue
        settings: dict[str, Any] = {**steps.UNSAID, "launch": "eager", **entry.record.settings}
        done = [epoch["wall_s"] for epoch in entry.record.summary["epochs"][1:] if epoch["steps"] == whole]
        unlimited = settings.get("allocator_settings", {}).get("release_threshold", 2**64 - 1) == 2**64 - 1
        if all(settings[key] == value for key, value in work.items()) and done and unlimited:
            times.setdefault(settings["allocator"], []).append(1e3 * statistics.median(done))
    for row in (row for path in kept("cuda.json") for row in read_json(path)):
        if row["arm"] in times and row["device"] == gpu:
            times[row["arm"]].append(1e3 * row["epoch_s"])
    said = [
        f"`{name}` {min(times[name]):.0f} to {max(times[name]):.0f} ms ({len(times[name])} runs)"
        for name in ("naive", "caching", "stream-ordered")
    ]
    return (
        f"- The table is one comparison, the newest. Over all records of this work on an {machine(gpu)}: "
        f"{', '.join(said)}."
    )


def _experiments() -> list[Experiment]:
    """All that were recorded on GPUs."""
    paths = (path for label in labels() for path in sorted(label.iterdir()))
    return [load_experiment(path) for path in paths if holds_experiment(path)]
