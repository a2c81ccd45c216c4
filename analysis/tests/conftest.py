"""Small records with known contents."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from vramlab_analysis import histograms, repository

# Tests name recorded results by their folders.
repository.results()

MIB = 2**20
CALLS = ("mem_alloc", "mem_free", "mem_alloc_async", "mem_free_async", "stream_synchronize", "kernel_launch")


def calls(**given: tuple[int, int, int]) -> dict[str, dict[str, int]]:
    figures = {name: given.get(name, (0, 0, 0)) for name in CALLS}
    return {name: dict(zip(("count", "total_ns", "blocked_ns"), three, strict=True)) for name, three in figures.items()}


def summary(allocator: str = "naive", epochs: int = 2, **changes: Any) -> dict[str, Any]:
    """Two steps an epoch: 100 launches of 2 µs, ten allocations of 1 µs, ten frees of 6 µs of which 4 are waiting."""
    each = calls(mem_alloc=(10, 10_000, 0), mem_free=(10, 60_000, 40_000), kernel_launch=(100, 200_000, 0))
    whole = {name: {k: v * epochs for k, v in one.items()} for name, one in each.items()}
    whole["mem_alloc"]["count"] += 3
    stats = {
        "reserved_bytes.all.peak": 4 * MIB,
        "active_bytes.all.peak": 3 * MIB,
        "allocated_bytes.all.peak": 3 * MIB,
        "requested_bytes.all.peak": 2 * MIB,
    }
    document = {
        "schema_version": 1,
        "status": "finished",
        "code_version": "0.1.0",
        "settings": {"allocator": allocator, "allocator_settings": {}, "device": "sim", "dataset": "digits",
                     "hidden": 64, "layers": 4, "batch": 64, "sync": "step", "loader": "resident", "init": "kaiming",
                     "seed": 42, "lr": 0.1},
        "device": {"kind": "sim", "name": "a device", "total_bytes": 2**33},
        "dataset": {"name": "digits", "source": "generated"},
        "epochs": [
            {"epoch": n, "steps": 2, "train_loss": 1.0 / n, "val_loss": 1.0 / n, "val_accuracy": 0.9, "wall_s": 0.001,
             "device_s": 0.001, "driver_calls": each}
            for n in range(1, epochs + 1)
        ],
        "step_losses": "steps.csv",
        "driver_calls": whole,
        "blocked_method": "exact",
        "allocator_stats": stats,
        "latency": [{"operation": "allocate", "path": "driver_alloc", "count": 20, "p50_ns": 1000, "p99_ns": 2000}],
        "fragmentation": {"internal": MIB, "soft": MIB, "hard": 0, "stream": 0, "pending": 0, "reserved": 4 * MIB,
                          "requested": 2 * MIB, "attribution": "blocks"},
        "files": {"steps": "steps.csv"},
    }  # fmt: skip
    return {**document, **changes}


def write_run(
    folder: Path,
    document: dict[str, Any] | None = None,
    *,
    zipped: bool = False,
    trace: bool = False,
    losses: float = 0.0,
) -> Path:
    """A run record of four steps; with `trace` its operations and driver calls too."""
    folder.mkdir(parents=True)
    document = document or summary()
    (folder / "summary.json").write_text(json.dumps(document))
    taken = 5 if document["settings"]["allocator"] == "naive" else 0
    rows = [
        {"epoch": n // 2 + 1, "step": n % 2 + 1, "rows": 64, "loss": (1.0 + losses) / (n + 1),
         "host_ns": 250_000 * (n + 1), "driver_allocations": taken, "reserved_bytes": 4 * MIB,
         "allocated_bytes": 3 * MIB}
        for n in range(2 * max(len(document["epochs"]), 1))
    ]  # fmt: skip
    steps = folder / ("steps.csv.gz" if zipped else "steps.csv")
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    steps.write_bytes(gzip.compress(text.getvalue().encode()) if zipped else text.getvalue().encode())
    tagged = {"allocate.driver_alloc": [1000] * 19 + [30_000], "allocate.hit": [50] * 80, "deallocate.hit": [60] * 100}
    histograms.write(folder / "latency.hlog", tagged)
    if trace:
        write_trace(folder)
    return folder


def write_trace(folder: Path) -> None:
    """A segment of 2 MiB with a permanent block and one that is allocated and freed every 100 µs at one address."""
    base = 0x7F00_0000_0000
    calls = [{"start_ns": 1000, "total_ns": 500, "blocked_ns": 0, "call": "mem_alloc", "bytes": 2 * MIB, "addr": base,
              "ok": True}]  # fmt: skip
    events = [
        {
            "time_ns": 1500,
            "action": "alloc",
            "addr": base,
            "size": 1_000_000,
            "block": MIB,
            "stream": 1,
            "path": "split",
        }
    ]
    for n in range(10):
        at = 10_000 + 100_000 * n
        block = {"addr": base + MIB, "size": 4000, "block": 4096, "stream": 1}
        events.append({"time_ns": at, "action": "alloc", "path": "hit", **block})
        events.append({"time_ns": at + 50_000, "action": "free_requested", "path": "coalesce", **block})
        call = {
            "start_ns": at,
            "total_ns": 2000,
            "blocked_ns": 0,
            "call": "kernel_launch",
            "kernel": "gemm",
            "ok": True,
        }
        wait = {"start_ns": at + 60_000, "total_ns": 9000, "blocked_ns": 8000, "call": "stream_synchronize", "ok": True}
        calls += [call, wait]
    for name, lines in (("trace.jsonl", events), ("driver_calls.jsonl", calls)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", trace=True)


def write_experiment(folder: Path, arms: list[tuple[str, dict[str, Any], dict[str, Any]]], **changes: Any) -> Path:
    """An experiment of `(arm, options, summary)`, each once."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "schema_version": 1,
        "name": "an-experiment",
        "question": "Why?",
        "spec_sha256": "aa",
        "runs": [],
        **changes,
    }
    (folder / "experiment.json").write_text(json.dumps(document))
    for number, (arm, options, told) in enumerate(arms):
        one = write_run(folder / "runs" / f"{number:02}-{arm}-r0", told)
        meta = {"schema_version": 1, "id": one.name, "arm": arm, "program": "trainer", "options": options, "repeat": 0,
                "status": "done"}  # fmt: skip
        (one / "run.json").write_text(json.dumps(meta))
    return folder


def command_experiment(folder: Path, *runs: dict[str, Any]) -> Path:
    """An experiment of commands: options, result, and other fields of `run.json`."""
    folder.mkdir(parents=True)
    document = {"schema_version": 1, "name": folder.name, "question": "Why?", "spec_sha256": "aa", "runs": []}
    (folder / "experiment.json").write_text(json.dumps(document))
    for number, run in enumerate(runs):
        result, more = run.pop("result", None), run.pop("meta", {})
        one = folder / "runs" / f"{number:02}"
        one.mkdir(parents=True)
        meta = {"schema_version": 1, "id": one.name, "arm": "all", "program": "command", "options": run, "repeat": 0}
        meta |= {"status": "done", "exit_code": 0, "wall_s": 2.5, "started_at": "2026-11-28T02:00:00Z", "error": None}
        meta |= {"machine": {"cores": 16, "gpu": "NVIDIA H200"}}
        meta |= {
            "provenance": {"git_commit": "abcdef0123456789", "driver_release": "580.1", "build_profile": "release"}
        }
        (one / "run.json").write_text(json.dumps(meta | more))
        if result is not None:
            (one / "result.json").write_text(json.dumps(result))
    return folder
