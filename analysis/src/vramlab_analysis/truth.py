"""Predictions of `vramlab advise` and PyTorch's peaks, written by `experiments advise-truth`."""

from __future__ import annotations

from typing import Any

import polars as pl

from vramlab_analysis import repository
from vramlab_analysis.errors import AnalysisError, read_json_lines
from vramlab_analysis.pages.registry import markdown

# Held-out programs of the table, in its order.
HELD_OUT = {
    "gnn_sample": "graph network, sampled",
    "bert_eval": "BERT, evaluated between",
    "vit_ckpt": "ViT, checkpoints, sizes vary",
    "lstm_var": "LSTM, lengths vary",
    "sparse_rec": "sparse embeddings",
    "load_serve": "quantise, then serve",
}
# Settings that have a column in the table.
COLUMNS = {
    "expandable_segments:True": "expandable",
    "max_split_size_mb:128": "split 128 MB",
    "roundup_power2_divisions:8": "roundup 8",
}
RUNS, PAIRS = "advise-truth.jsonl", "advise-truth.csv"
# The setting that answers most questions.
ALWAYS = "expandable_segments:True"
# The error of a near prediction in percent.
NEAR = 1.0
MIB = 2**20

WAITS = pl.col("deferred_frees") > 0
POOLS = pl.col("private_pools") > 0
LIMIT = pl.col("limit_bytes").is_not_null()
IS_HELD_OUT = pl.col("set") == "heldout"


def pairs() -> pl.DataFrame:
    """A row for each recording and setting other than its own: predicted and measured values.

    Raises AnalysisError when the table is missing.
    """
    file = repository.results() / PAIRS
    if not file.is_file():
        raise AnalysisError(f"{file}: not found; `experiments advise-truth -o {file}` writes it.")
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
    """The measurements, a dictionary for each run."""
    return read_json_lines(repository.results() / RUNS)


def table() -> str:
    """Peak reserved of the held-out programs, each with the error of the first prediction."""
    frame = pairs().filter(IS_HELD_OUT & ~LIMIT)
    recorded = {run["program"]: run for run in runs() if run["conf"] == "" and run["limit_bytes"] is None}
    body = []
    for program, words in HELD_OUT.items():
        row = [words, *(f"{recorded[program][f'peak_{kind}_bytes'] / MIB:,.0f}" for kind in ("active", "reserved"))]
        for conf in COLUMNS:
            pair = frame.filter((pl.col("program") == program) & (pl.col("conf") == conf)).row(0, named=True)
            row.append(f"{pair['real_peak_reserved_bytes'] / MIB:,.0f} ({_percent(pair['first_off_percent'])})")
        body.append(row)
    head = ["MiB reserved by PyTorch (error of `advise`)", "active", "defaults", *COLUMNS.values()]
    return markdown(head, body)


def near(frame: pl.DataFrame, column: str = "off_percent") -> dict[str, Any]:
    """The number of predictions, of exact ones and of those within 1 %, and the worst error in percent; of how many
    programs and recordings they are."""
    frame = frame.filter(pl.col(column).is_not_null())
    off = frame[column].abs()
    return {
        "count": len(off),
        "programs": frame["program"].n_unique(),
        "recordings": frame["recording"].n_unique(),
        "exact": int((off == 0).sum()),
        "near": int((off <= NEAR).sum()),
        "worst": off.max() or 0.0,
    }


def questions(choices: pl.DataFrame) -> dict[str, int]:
    """The questions behind the first choices, each of a program and a limit or none: their number, those with a limit,
    those that every recording answers right, and those that always `expandable` answers.

    Several recordings of a program ask the same question. An answer is right if it ran and reserved at most 1 % more
    than the best measured setting.
    """
    measured: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for run in runs():
        measured.setdefault((run["program"], run["limit_bytes"]), []).append(run)
    by_question = choices.group_by("program", "limit_bytes").agg(pl.col("first_choice_right").all())
    asked = list(by_question.select("program", "limit_bytes").iter_rows())
    expandable = 0
    for question in asked:
        ran = {run["conf"]: run["peak_reserved_bytes"] for run in measured[question] if not run["out_of_memory"]}
        expandable += ran.get(ALWAYS, float("inf")) <= (1 + NEAR / 100) * min(ran.values())
    answered = int(by_question["first_choice_right"].sum())
    within = sum(limit is not None for _, limit in asked)
    return {"questions": len(asked), "within": within, "answered": answered, "expandable": expandable}


def unchanged(frame: pl.DataFrame) -> int:
    """Of the predictions with an error: how many would be within 1 % if each repeated the peak of its recording."""
    own = {run["recording"]: run["peak_reserved_bytes"] for run in runs() if run["recording"]}
    rows = frame.filter(pl.col("off_percent").is_not_null()).iter_rows(named=True)
    peaks = [(own[row["recording"]], row["real_peak_reserved_bytes"]) for row in rows]
    return sum(abs(peak / real - 1) <= NEAR / 100 for peak, real in peaks)


def values() -> dict[str, Any]:
    """`near` of sets of pairs; the held-out sets as `first` and `later`, in the order of recording.

    `hard` pairs have a limit, private pools or deferred frees. Of all pairs: how often running out of memory and the
    number of retries were predicted right, and the first choice of a recording; `limited.runs` measured runs, of which
    `limited.runs_out` ran out. Base rates: `unchanged`, the pairs in which the recording's own peak is within 1 %;
    `limited.none`, runs without a retry; `choices.expandable`.
    """
    frame = pairs()
    held_out, known = frame.filter(IS_HELD_OUT), frame.filter(~IS_HELD_OUT)
    hard = WAITS | POOLS | LIMIT
    sets = {"deferred": WAITS, "pools": POOLS & ~WAITS, "limit": LIMIT & ~POOLS & ~WAITS, "hard": hard, "easy": ~hard}
    limited = frame.filter(LIMIT)
    right = {
        name: limited.filter(pl.col(f"real_{name}") == pl.col(f"predicted_{name}")).height
        for name in ("out_of_memory", "retries")
    }
    each = limited.unique(["program", "conf", "limit_bytes"])
    choices = frame.filter(pl.col("first_choice_right").is_not_null()).unique(["recording", "limit_bytes"])
    commits: dict[str, list[str]] = {}
    for run in runs():
        if run["set"] == "heldout" and run["program"] not in commits.setdefault(run["recorded_after"], []):
            commits[run["recorded_after"]].append(run["program"])
    found: dict[str, Any] = {}
    for name, (commit, programs) in zip(("first", "later"), commits.items(), strict=True):
        some = held_out.filter(pl.col("program").is_in(programs))
        changed = some.filter(pl.col("off_percent") != pl.col("first_off_percent")).height
        found[name] = near(some, "first_off_percent") | {"programs": len(programs), "commit": commit}
        found[name] |= {"changed": changed, "now": near(some)["near"]}
    return found | {
        "tolerance": NEAR / 100,
        "pairs": frame.height,
        "all": near(frame),
        "recordings": frame["recording"].n_unique(),
        "runs": frame.select("program", "conf", "limit_bytes").n_unique(),
        "programs": frame["program"].n_unique(),
        "unchanged": unchanged(frame),
        "heldout": near(held_out) | {"first": near(held_out, "first_off_percent")["near"]},
        **{name: near(known.filter(which)) for name, which in sets.items()},
        "limited": {"count": limited.height, "out": int(limited["real_out_of_memory"].sum()), **right}
        | {"none": limited.filter(pl.col("real_retries") == 0).height, "programs": limited["program"].n_unique()}
        | {"runs": each.height, "runs_out": int(each["real_out_of_memory"].sum())},
        "choices": {"count": choices.height, "right": int(choices["first_choice_right"].sum()), **questions(choices)},
    }


def _percent(off: float | None) -> str:
    if off is None:
        return "out of memory"
    return "exact" if off == 0 else f"{off:+.1f} %"
