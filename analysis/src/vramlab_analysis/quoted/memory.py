"""What recorded programs reserve under each policy, and what is said of it."""

from __future__ import annotations

from typing import Any

import polars as pl

from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import Experiment, newest, results
from vramlab_analysis.measures import medians
from vramlab_analysis.quoted.parts import each

# Columns of the table of histories: the allocator, and as the page has it.
FAMILY = {
    "caching": "PyTorch (`caching`)",
    "pytorch-expandable": "expandable segments",
    "remap": "`remap`",
    "remap:steal=always": "`remap`, always",
    "remap:steal=always,small_pool=off": "the same, one pool",
    "rmm-pool": "RMM's pool, as it comes",
    "bfc": "`bfc`",
    "stream-ordered": "`stream-ordered`",
}
BEST = "RMM's pool, best start"
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
MIB = 2**20


def best_start() -> dict[str, dict[str, Any]]:
    """By history, the replay that reserves least of those of RMM's pool with another initial size, simulated."""
    least: dict[str, dict[str, Any]] = {}
    for row in read_json(newest("replay-rmm.json", device="sim")):
        name = row["trace"].removesuffix(".pickle.xz")
        if name not in least or row["peak_reserved_bytes"] < least[name]["peak_reserved_bytes"]:
            least[name] = row
    return least


def _replays(experiment: Experiment, **options: Any) -> pl.DataFrame:
    """The rows of replays, medians over the repeats, with short names of histories."""
    named = pl.col("history").str.replace(r"\.pickle\.xz$", "")
    frame = experiment.replays(**options).with_columns(history=named)
    return medians(frame, [name for name in ("history", "alloc", "completion") if name in frame.columns])


def family() -> str:
    """The table of recorded histories: the bound, the plan, and what each policy reserves over the bound."""
    experiment = results("family", "gpu")
    frame, plans = (_replays(experiment, arm=arm) for arm in ("replay", "plan"))
    planned = {row["history"]: row["plan_bytes"] for row in plans.iter_rows(named=True)}
    best = best_start()
    heads = [*FAMILY.values()]
    place = list(FAMILY).index("rmm-pool") + 1
    heads.insert(place, BEST)
    lines = [f"| {RESERVED} | bound | a plan of the whole | {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) + 2)]
    for history, words in HISTORIES.items():
        rows = {row["alloc"]: row for row in frame.filter(pl.col("history") == history).iter_rows(named=True)}
        bound, plan = rows["caching"]["lower_bound_bytes"], planned[history]
        told = [f"{rows[name]['peak_reserved_bytes'] / bound:.3f}" for name in FAMILY]
        told.insert(place, f"{best[history]['peak_reserved_bytes'] / bound:.3f}")
        lines.append(f"| {words} | {' | '.join([f'{bound / MIB:,.0f} MiB', f'{plan / bound:.3f}', *told])} |")
    return "\n".join(lines) + "\n"


def source() -> str:
    """Where the table of histories is from."""
    experiment = results("family", "gpu")
    told = experiment.document["provenance"]
    repeats = {entry.meta["repeat"] for entry in experiment.select(arm="replay")}
    return (
        f"`experiments run family --device cuda` (every block filled), {each([len(repeats)])}, one "
        f"{experiment.machine}, driver {told['driver_release']}, {experiment.document['started_at'][:10]}. The bound "
        "is the most that lived at once, in multiples of PyTorch's rounding. Where frees wait for other streams, and "
        "with `remap:steal=always`, what is reserved depends on when the device is done; the simulated device, which "
        "fills no block, is done sooner. The notebooks [10](../analysis/notebooks/10_the_family.ipynb) and "
        "[11](../analysis/notebooks/11_the_rules.ipynb) say what each policy costs, in how little memory it runs, and "
        "what each rule of PyTorch's is worth."
    )


def rmm() -> str:
    """What RMM's pool reserves as it comes, and with the best initial size."""
    frame = _replays(results("family", "gpu"), arm="replay", alloc="rmm-pool")
    row = frame.row(by_predicate=pl.col("history") == "mlp", named=True)
    one = best_start()["mlp"]
    return (
        f"- **RMM's pool is as its initial size is.** As it comes here it starts with "
        f"{row['peak_reserved_bytes'] / MIB:,.0f} MiB and doubles, so the small MLP says nothing of its policy: "
        f"{row['peak_reserved_bytes'] / row['lower_bound_bytes']:.2f} times the bound, and "
        f"{one['peak_reserved_bytes'] / one['lower_bound_bytes']:.2f} where it starts with "
        f"{one['peak_reserved_bytes'] / MIB:,.0f} MiB. The column beside it has the best of several initial sizes for "
        "each history, which takes knowing the program (`vramlab replay --device sim --alloc "
        "rmm-pool:initial_pool_size=…`)."
    )


def waiting_frees() -> str:
    """What frees that wait for other streams cost PyTorch's rules, and what streams bring that take from each other."""
    experiment = results("family", "sim")
    frame = _replays(experiment, arm="completion")
    peak = {(row["history"], row["alloc"], row["completion"]): row for row in frame.iter_rows(named=True)}

    def change(now: float, before: float) -> str:
        apart = 100 * (now / before - 1)
        return "as much" if abs(apart) < 0.05 else f"{abs(apart):.1f} % {'more' if apart > 0 else 'less'}"

    waits, lends = [], []
    for name in frame["history"].unique(maintain_order=True):
        words = HISTORIES.get(name)
        if words is None:
            continue
        own, at_once = (peak[name, "lab", how] for how in ("recorded", "instant"))
        more = (own["peak_active_bytes"] - at_once["peak_active_bytes"]) / MIB
        active = f" ({more:,.0f} MiB more are active)" if more >= 1 else ""
        waits.append(f"{words} {change(own['peak_reserved_bytes'], at_once['peak_reserved_bytes'])}{active}")
        lent = peak[name, "lab:stream=steal", "recorded"]["peak_reserved_bytes"]
        lends.append(f"{words} {change(lent, own['peak_reserved_bytes'])}")
    return (
        "- **What frees cost that wait for other streams.** Under PyTorch's rules programs reserve, beside the same "
        f"frees at once: {'; '.join(waits)}. "
        f"Where streams take from each other they reserve, beside that: {'; '.join(lends)}. `experiments run family "
        f"--device sim`, {experiment.document['started_at'][:10]}; events complete in the request in which they did "
        "when PyTorch was recorded."
    )
