"""What `vramlab advise` predicted beside what PyTorch really reserved, as `experiments advise-truth` wrote it."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import repository, style
from vramlab_analysis.errors import AnalysisError, parse_json, read_bytes

# Programs of the held-out set, in the order in which they are shown.
HELD_OUT = {
    "gnn_sample": "graph network, sampled",
    "bert_eval": "BERT, evaluated between",
    "vit_ckpt": "ViT, checkpoints, sizes vary",
    "lstm_var": "LSTM, lengths vary",
    "sparse_rec": "sparse embeddings",
    "load_serve": "quantise, then serve",
}
# Held-out programs without a row in the table, in the figure only.
LATER = {
    "vllm_load_serve": "loading, then serving",
    "gpt2_shapes": "GPT-2, shapes vary",
    "gpt2_emptying": "GPT-2, cache emptied",
}
# Those that `advise` was made on or has learnt from, in the figure only.
KNOWN = {
    "mlp": "MLP",
    "gpt2": "GPT-2, lengths vary",
    "resnet50": "ResNet-50",
    "graph_step": "graph, one step",
    "graphed_callables": "graphed callables",
    "mempool": "MemPool",
    "streams": "prefetch",
    "gpt2_fsdp1.rank0": "FSDP, one rank",
    "threestreams": "three streams",
}
# Settings that have a column in the table.
COLUMNS = {
    "expandable_segments:True": "expandable",
    "max_split_size_mb:128": "split 128 MB",
    "roundup_power2_divisions:8": "roundup 8",
}
# Settings that have a colour in the figure.
SHOWN = {"": "defaults", **COLUMNS, "max_split_size_mb:32": "split 32 MB"}
TITLE = "MiB PyTorch reserved, and how far `advise` was off"
RUNS, PAIRS = "advise-truth.jsonl", "advise-truth.csv"
# How near a prediction has to be, in percent.
NEAR = 1.0
MIB = 2**20

WAITS = pl.col("deferred_frees") > 0
POOLS = pl.col("private_pools") > 0
LIMIT = pl.col("limit_bytes").is_not_null()
IS_HELD_OUT = pl.col("set") == "heldout"


def pairs() -> pl.DataFrame:
    """A row for each recording and setting other than its own: what was predicted, and what was.

    Raises AnalysisError when the table is not there.
    """
    file = repository.results() / PAIRS
    if not file.is_file():
        raise AnalysisError(f"{file}: is not there; `experiments advise-truth -o {file}` writes it.")
    types = {
        "conf": pl.String,
        "recorded_conf": pl.String,
        "limit_bytes": pl.Int64,
        "off_percent": pl.Float64,
        "first_off_percent": pl.Float64,
        "first_choice_right": pl.Boolean,
        "build": pl.String,
    }
    return pl.read_csv(file, schema_overrides=types).with_columns(pl.col("conf", "recorded_conf").fill_null(""))


def runs() -> list[dict[str, Any]]:
    """What was measured, a dictionary for each run."""
    file = repository.results() / RUNS
    lines = enumerate(read_bytes(file).splitlines(), 1)
    return [parse_json(line, f"{file}:{number}") for number, line in lines]


def table() -> str:
    """Peak reserved of the held-out programs, each with how far the first prediction was off."""
    frame = pairs().filter(IS_HELD_OUT & ~LIMIT)
    recorded = {run["program"]: run for run in runs() if run["conf"] == "" and run["limit_bytes"] is None}
    heads = ["in use", "defaults", *COLUMNS.values()]
    lines = [f"| {TITLE} | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    for program, words in HELD_OUT.items():
        cells = [f"{recorded[program][f'peak_{kind}_bytes'] / MIB:,.0f}" for kind in ("active", "reserved")]
        for conf in COLUMNS:
            row = frame.filter((pl.col("program") == program) & (pl.col("conf") == conf)).row(0, named=True)
            cells.append(f"{row['real_peak_reserved_bytes'] / MIB:,.0f} ({_percent(row['first_off_percent'])})")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _near(frame: pl.DataFrame, column: str = "off_percent") -> tuple[int, int, int, float]:
    """How many predictions there are, how many are right to the byte and within 1 %, and how far off the worst is."""
    off = frame[column].drop_nulls().abs()
    return len(off), int((off == 0).sum()), int((off <= NEAR).sum()), float(off.max() or 0)  # type: ignore[arg-type]


def _said(frame: pl.DataFrame) -> str:
    count, exact, near, worst = _near(frame)
    if exact == count:
        return f"all {count} to the byte"
    return f"{near} of {count} within 1 % ({exact} to the byte, the worst {worst:.1f} % off)"


def _recorded_after() -> dict[str, list[str]]:
    """The held-out programs by the commit after which they were recorded, in the order of the record."""
    found: dict[str, list[str]] = {}
    for run in runs():
        if run["set"] == "heldout" and run["program"] not in found.setdefault(run["recorded_after"], []):
            found[run["recorded_after"]].append(run["program"])
    return found


def held_out() -> str:
    """The README's sentence: the held-out sets, and all others."""
    frame = pairs()
    told: list[str] = []
    for commit, programs in _recorded_after().items():
        ours = frame.filter(IS_HELD_OUT & pl.col("program").is_in(programs))
        count, _, first, worst = _near(ours, "first_off_percent")
        _, _, now, _ = _near(ours)
        changed = ours.filter(pl.col("off_percent") != pl.col("first_off_percent")).height
        learnt = f"; the code has learnt from them since, which changed {changed}: now {now}" if changed else ""
        what = "" if told else " predictions within 1 %"
        told.append(
            f"{len(programs)} programs recorded after {commit}: {first} of {count}{what} (worst {worst:.1f} %){learnt}."
        )
    hard = WAITS | POOLS | LIMIT
    easy, others = (_near(frame.filter(~IS_HELD_OUT & which)) for which in (~hard, hard))
    return (
        f"**Held out.** {' '.join(told)} Of known recordings {easy[2]} of {easy[0]} are, {others[2]} of {others[0]} "
        f"with limits, private pools or waiting frees (worst {others[3]:.1f} %)."
    )


def sentence() -> str:
    """How often a prediction was near, over all pairs, with limits, first choices and retries."""
    frame = pairs()
    ours, known = frame.filter(IS_HELD_OUT), frame.filter(~IS_HELD_OUT)
    kinds = {
        "where frees wait for other streams, so that timing decides": WAITS,
        "with private pools": POOLS & ~WAITS,
        "else under a limit": LIMIT & ~POOLS & ~WAITS,
    }
    hard = "; ".join(f"{_said(known.filter(which))} {words}" for words, which in kinds.items())
    limited = frame.filter(LIMIT)
    oom, retries = (
        limited.filter(pl.col(f"real_{what}") == pl.col(f"predicted_{what}")).height
        for what in ("out_of_memory", "retries")
    )
    choices = frame.filter(pl.col("first_choice_right").is_not_null()).unique(["recording", "limit_bytes"])
    return (
        f"**How far it is off.** Of {frame.height} pairs of a recording and another setting: held-out programs "
        f"{_said(ours)} ({_near(ours, 'first_off_percent')[2]} within 1 % when first predicted); known ones "
        f"{_said(known.filter(~(WAITS | POOLS | LIMIT)))} where nothing is hard; {hard}. Under a limit, where memory "
        f"could run out, whether it does was right in {oom} of {limited.height} (it did in "
        f"{int(limited['real_out_of_memory'].sum())}), and the number of retries was wrong in "
        f"{limited.height - retries}. The first choice was right {int(choices['first_choice_right'].sum())} times of "
        f"{choices.height}."
    )


def draw() -> Figure:
    """How far each prediction was off (of held-out programs the first): a mark for each recording, setting, limit."""
    shown = HELD_OUT | LATER | KNOWN
    first = pl.coalesce("first_off_percent", "off_percent")
    frame = pairs().with_columns(off_percent=first).drop_nulls("off_percent")
    frame = frame.filter(pl.col("program").is_in(list(shown)))
    figure, axes = style.new(1, 1, height=4.0)
    names = [name for name in shown if name in set(frame["program"])]
    colours = (style.BLUE, style.GREEN, style.VERMILION, style.ORANGE, style.PURPLE)
    groups = [
        (pl.col("conf") == conf, words, colour) for (conf, words), colour in zip(SHOWN.items(), colours, strict=True)
    ]
    groups.append((~pl.col("conf").is_in(list(SHOWN)), "others", style.GREY))
    for number, (which, words, colour) in enumerate(groups):
        some = frame.filter(which)
        places = [names.index(program) + 0.12 * (number - 2.5) for program in some["program"]]
        axes.scatter(places, some["off_percent"], s=22, label=words, color=colour)
    axes.axhspan(-NEAR, NEAR, color=style.GREY, alpha=0.2, linewidth=0)
    axes.axhline(0, color=style.INK, linewidth=0.8)
    axes.axvline(len(HELD_OUT | LATER) - 0.5, color=style.GREY, linewidth=0.8)
    axes.set_yscale("symlog", linthresh=NEAR)
    ticks = (-10, -5, -1, 0, 1, 5, 10, 30)
    axes.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
    axes.set_xticks(range(len(names)), [_folded(shown[name]) for name in names], fontsize=7, rotation=60)
    axes.set_ylabel("predicted peak reserved, off by")
    axes.legend(ncols=3, fontsize=7, loc="upper left")
    axes.set_title("advise beside what PyTorch reserved on an H200; held-out programs, as first predicted, on the left")
    return figure


def _folded(words: str) -> str:
    """A name on two lines, as an axis has room for it."""
    first, comma, rest = words.partition(", ")
    return f"{first},\n{rest}" if comma else first.replace(" ", "\n", 1)


def _percent(off: float | None) -> str:
    if off is None:
        return "out of memory"
    return "0" if off == 0 else f"{off:+.1f} %"
