"""Draws the README's figure from the recorded comparison: where the host's time goes in one epoch.

    python3 -m pip install matplotlib==3.11.0
    python3 analysis/readme_figure.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
# Text stays text, and ids do not change from run to run, so the figure can be compared.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "figure", "font.size": 9})
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "experiments" / "results" / "2026-11-21-h200" / "cuda.json"
FIGURE = ROOT / "analysis" / "figures" / "epoch_host_time.svg"

MEMORY_CALLS = ("mem_alloc", "mem_free", "mem_alloc_async", "mem_free_async")
# Colour-blind safe (Okabe and Ito).
PARTS = {
    "waiting inside alloc and free": "#D55E00",
    "alloc and free themselves": "#E69F00",
    "waiting elsewhere (the device is the limit)": "#0072B2",
    "launching kernels": "#56B4E9",
    "everything else": "#BBBBBB",
}


def parts(run: dict) -> dict[str, float]:
    """Milliseconds of one epoch by what the host was doing; they add up to the epoch's wall time."""
    calls = run["driver_calls"]
    total = {name: call["total_ns"] / 1e6 for name, call in calls.items()}
    blocked = {name: call["blocked_ns"] / 1e6 for name, call in calls.items()}
    memory = [name for name in MEMORY_CALLS if name in calls]
    waits = blocked["kernel_launch"] + total["stream_synchronize"] + total["copy_to_host"]
    known = {
        "waiting inside alloc and free": sum(blocked[name] for name in memory),
        "alloc and free themselves": sum(total[name] - blocked[name] for name in memory),
        "waiting elsewhere (the device is the limit)": waits,
        "launching kernels": total["kernel_launch"] - blocked["kernel_launch"],
    }
    known["everything else"] = max(0.0, run["epoch_s"] * 1e3 - sum(known.values()))
    return known


def main() -> None:
    runs = json.loads(RECORDED.read_text())
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for row, run in enumerate(runs):
        left = 0.0
        for part, milliseconds in parts(run).items():
            axes.barh(row, milliseconds, left=left, color=PARTS[part], label=part if row == 0 else None, height=0.62)
            left += milliseconds
        axes.text(left + 5, row, f"{left:.0f} ms", va="center")
    labels = [run["arm"].replace(" --release-threshold 0 --sync step", ",\nthreshold 0, sync each step") for run in runs]
    axes.set_yticks(range(len(runs)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(run["epoch_s"] for run in runs) * 1e3)
    axes.set_xlabel("host time of one epoch (938 steps and validation), ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{runs[0]['device']}: 4 layers of width 784, batch 64, MNIST", loc="left", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})
    print(f"wrote {FIGURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
