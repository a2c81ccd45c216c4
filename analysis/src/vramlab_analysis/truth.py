"""What `vramlab advise` predicted beside what PyTorch really reserved: tables that `experiments advise-truth` wrote."""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from vramlab_analysis import repository, style
from vramlab_analysis.errors import AnalysisError

# Programs of the tables, in the order in which they are shown.
PROGRAMS = {
    "mlp": "MLP",
    "gpt2": "GPT-2, lengths vary",
    "resnet50": "ResNet-50",
    "generate": "text generation",
    "moe": "mixture of experts",
    "scales": "ResNet-50, sizes vary",
    "unet": "U-Net, sizes vary",
    "streams": "prefetch",
    "prefetch": "prefetch, larger",
    "adapters": "GPT adapters",
    "adversaries": "image GAN",
    "rollouts": "RL rollouts",
}
# Those whose histories lack something, in the figure only.
HARD = {
    "compiled": "torch.compile",
    "graphtrain": "graph, one step",
    "lategraph": "graph, from before",
    "mempool": "MemPool",
    "late": "recorded late",
    "ring": "ring full",
    "recover": "out of memory, caught",
    "threestreams": "three streams",
}
# Settings that have a column in the table.
COLUMNS = {
    "": "defaults",
    "expandable_segments:True": "expandable",
    "max_split_size_mb:32": "split 32 MB",
}
# Settings that have a colour in the figure.
SHOWN = {**COLUMNS, "max_split_size_mb:128": "split 128 MB", "roundup_power2_divisions:8": "roundup 8"}
TITLE = "MiB PyTorch reserved, and how far `advise` was off"
# Which programs each table is of, by what the name of its file ends with.
TABLES = {
    "truth": "the programs that it was made on",
    "later": "five recorded after that, from which it learnt where the driver puts segments",
    "last": "three recorded when all was done",
    "hard": "eight chosen to be hard (CUDA graphs, no beginning, three streams, errors that are caught)",
}
# How near a prediction has to be, in percent.
NEAR = 1.0
MIB = 2**20


def pairs() -> pl.DataFrame:
    """A row for each program, setting and limit: what was predicted from the history under the defaults, and what was.

    Raises AnalysisError when no table is there.
    """
    files = sorted(repository.results().glob("advise-truth*.csv"))
    if not files:
        raise AnalysisError(f"{repository.results()}: no advise-truth.csv; `experiments advise-truth` writes it.")
    types = {"conf": pl.String, "limit_bytes": pl.Int64, "off_percent": pl.Float64}
    frames = [
        pl.read_csv(file, schema_overrides=types).with_columns(table=pl.lit(file.stem.rpartition("-")[2]))
        for file in files
    ]
    frame = pl.concat(frames).with_columns(conf=pl.col("conf").fill_null(""))
    # Some settings were recorded twice.
    return frame.unique(["program", "conf", "limit_bytes"], keep="first", maintain_order=True)


def table() -> str:
    """Peak reserved by program and setting without a limit, each with how far the prediction was off."""
    frame = pairs().filter(pl.col("limit_bytes").is_null())
    lines = [f"| {TITLE} | {' | '.join(COLUMNS.values())} |", "|---|" + "--:|" * len(COLUMNS)]
    for program, words in PROGRAMS.items():
        if frame.filter(pl.col("program") == program).is_empty():
            continue
        cells = []
        for conf in COLUMNS:
            found = frame.filter((pl.col("program") == program) & (pl.col("conf") == conf))
            if found.is_empty():
                cells.append("")
                continue
            row = found.row(0, named=True)
            cells.append(f"{row['real_peak_reserved_bytes'] / MIB:,.0f} ({_percent(row['off_percent'])})")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sentence() -> str:
    """How often a prediction was near, over all pairs, those with a limit included."""
    frame = pairs()
    off = frame.filter(pl.col("off_percent").is_not_null()).with_columns(off=pl.col("off_percent").abs())

    def said(table: str) -> str:
        one = off.filter((pl.col("deferred_frees") == 0) & (pl.col("table") == table))
        near, exact = one.filter(pl.col("off") <= NEAR).height, one.filter(pl.col("off") == 0).height
        if exact == one.height:
            return f"all {one.height} are right to the byte"
        worst = max(one["off"].to_list())
        return f"{near} of {one.height} are within 1 % ({exact} to the byte, the worst {worst:.1f} % off)"

    there = set(frame["table"])
    tables = "; ".join(f"{said(table)} for {words}" for table, words in TABLES.items() if table in there)
    several = off.filter(pl.col("deferred_frees") > 0)["off"].to_list()
    right = frame.filter(pl.col("real_out_of_memory") == pl.col("predicted_out_of_memory"))
    return (
        f"**How far it is off.** Of pairs of program and setting {tables}. "
        "Where frees wait for other streams, timing decides: "
        f"{sum(one <= 5 for one in several)} of {len(several)} are within 5 %, the worst {max(several):.0f} % "
        f"off. Whether memory runs out was right in {right.height} of {frame.height}."
    )


def draw() -> Figure:
    """How far each prediction was off, by program; a mark for each setting and limit."""
    shown = PROGRAMS | HARD
    frame = pairs().filter(pl.col("off_percent").is_not_null() & pl.col("program").is_in(list(shown)))
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
    axes.set_yscale("symlog", linthresh=NEAR)
    ticks = (-10, -5, -1, 0, 1, 5, 10, 30)
    axes.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
    axes.set_xticks(range(len(names)), [_folded(shown[name]) for name in names], fontsize=7, rotation=60)
    axes.set_ylabel("predicted peak reserved, off by")
    axes.legend(ncols=3, fontsize=7, loc="upper left")
    axes.set_title("advise, from a history under the defaults, beside what PyTorch reserved on an H200")
    return figure


def _folded(words: str) -> str:
    """A name on two lines, as an axis has room for it."""
    first, comma, rest = words.partition(", ")
    return f"{first},\n{rest}" if comma else first.replace(" ", "\n", 1)


def _percent(off: float | None) -> str:
    if off is None:
        return "out of memory"
    return "0" if off == 0 else f"{off:+.1f} %"
