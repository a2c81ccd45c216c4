"""What an allocator call costs: the tables of `experiments bench`, and what is said of them."""

from __future__ import annotations

from typing import Any

from vramlab_analysis.errors import read_json
from vramlab_analysis.experiments import newest
from vramlab_analysis.quoted.parts import listed

# Columns of the tables: the allocator's name in the record, and as the page has it.
COLUMNS = {
    "caching": "`caching`",
    "pytorch": "`pytorch`",
    "pytorch-expandable": "`pytorch-expandable`",
    "remap": "`remap`",
    "pytorch-c10": "PyTorch",
    "rmm-pool": "RMM pool",
    "rmm-arena": "RMM arena",
    "cuda-malloc-async": "driver's pool",
}
# Their rows: the case, and what the page calls it.
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
OF_TIMES = "ns for one allocation and its free"
OF_RATES = "million of them a second, all threads"


def bench() -> dict[str, Any]:
    """The newest record of the calls of all allocators."""
    recorded: dict[str, Any] = read_json(newest("bench.json"))
    return recorded


def table(title: str, cases: dict[str, str]) -> str:
    """A table of calls: a row for each case, a column for each allocator; medians."""
    found = {(row["case"], row["allocator"]): row["median"] for row in bench()["rows"]}
    lines = [f"| {title} | {' | '.join(COLUMNS.values())} |", "|---|" + "--:|" * len(COLUMNS)]
    for case, words in cases.items():
        values = (found[case, name] for name in COLUMNS)
        told = (f"{value:.2g}" if value < 10 else f"{value:,.0f}" for value in values)
        lines.append(f"| {words} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Where and how the tables of calls were made."""
    told = bench()
    shown = [row for row in told["rows"] if row["allocator"] in COLUMNS and row["case"] in TIMES | RATES]
    far = [row for row in shown if row["max"] - row["min"] > row["median"] / 4]
    return (
        f"- `experiments bench --device cuda --repeats {told['repeats']} --alloc "
        "caching,pytorch,pytorch-expandable,remap --baselines --case "
        f"history,mixed,threads,shared` ({told['provenance']['build_profile']} build): medians of {told['repeats']} "
        f"repeats in one run on one {told['device']['name']} with {told['cores']} cores, virtual machine, driver "
        f"{told['provenance']['driver_release']}, {told['date'][:10]}, with PyTorch 2.11 (c10, from C++) and RMM "
        f"26.10. In {len(far)} of the {len(shown)} cells the repeats are more than a quarter of their median "
        "apart, so compare within a row."
    )


def noise() -> str:
    """How far the repeats of `caching` and of PyTorch are apart in the tables of calls."""
    report = bench()
    spans = {}
    of = {
        name: {
            row["case"].removeprefix("history/"): row
            for row in report["rows"]
            if row["allocator"] == name and row["case"].startswith("history/")
        }
        for name in ("caching", "pytorch-c10")
    }
    for name, rows in of.items():
        spans[name] = listed(f"{case} {row['min']:.0f} to {row['max']:.0f}" for case, row in rows.items())
    better = [of["pytorch-c10"][case]["median"] / row["median"] for case, row in of["caching"].items()]
    return (
        f"- Over the repeats of the recorded histories `caching` took {spans['caching']} ns, and PyTorch "
        f"{spans['pytorch-c10']}: by medians {min(better):.1f} to {max(better):.1f} times as long."
    )


def instruments() -> str:
    """What the instruments add to a call."""
    told = read_json(newest("bench-instruments.json"))
    at = {tuple(row["case"].split("/")[1:]): row for row in told["rows"]}
    added = [
        f"{words} {at[kind, '1']['median'] - at['bare', '1']['median']:.0f} ns "
        f"({at[kind, '1']['min'] - at['bare', '1']['min']:.0f} between the least of both)"
        for kind, words in (("latency", "latency histograms add"), ("trace", "the event trace"))
    ]
    calls = f"{at['trace', '16']['median'] / 1e3:.1f} us"
    return (
        f"- Instruments cost about as much as a call: {', '.join(added)}. Sixteen threads that trace without a pause "
        f"take {calls} a call, because all of them count in one place; none of their events is lost. `experiments "
        f"bench --alloc caching --case instrument --threads 1,16 --repeats {told['repeats']}`, {told['date'][:10]}."
    )
