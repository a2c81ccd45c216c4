"""The report: one page of HTML that holds everything, for any run records. It needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from vramlab import calls, histograms, histories, output, style
from vramlab.errors import AnalysisError
from vramlab.experiments import holds_experiment, load_experiment
from vramlab.measures import measures
from vramlab.plots import bars, latency, loss, memory, sync
from vramlab.records import Run, load_run

HERE = Path(__file__).resolve().parent
# Steps of a block map, and lives of blocks that a page can hold without becoming slow.
MAP_STEPS = 3
MAP_BLOCKS = 12_000


class Page:
    """What the page holds, from top to bottom; `report.html` makes HTML of it and escapes every text."""

    def __init__(self) -> None:
        """An empty page."""
        self.parts: list[dict[str, Any]] = []
        self.figures = 0
        self.title = ""

    def add(self, kind: str, **what: Any) -> None:
        """A part of a kind that the template knows."""
        self.parts.append({"kind": kind, **what})

    def heading(self, title: str, text: str = "") -> None:
        """A section and, under its title, what it shows."""
        self.title = title
        self.add("heading", title=title, text=text)

    def figure(self, draw: Callable[[], Figure]) -> None:
        """A figure of this section; where its data are missing the sentence that says how to get them."""
        self.figures += 1
        try:
            drawn = style.svg(draw(), f"f{self.figures}-", inline=True)
        except AnalysisError as error:
            self.note(str(error))
            return
        # matplotlib escapes the texts in it.
        self.add("figure", title=self.title, svg=Markup(drawn))

    def note(self, text: str) -> None:
        """A sentence set apart."""
        self.add("note", text=text)


def name_runs(runs: list[Run]) -> list[tuple[str, Run]]:
    """A name for each run: its allocator, and where that is not enough what tells it from the others."""
    arms = [run.arm for run in runs]
    if len(set(arms)) == len(arms):
        return list(zip(arms, runs, strict=True))
    keys = ["device", "dataset", "hidden", "layers", "batch", "dtype", "accumulate", "weights", "loss_scale", "fuse"]
    keys += ["launch", "streams", "sync", "loader", "init", "gemm", "seed", "lr"]
    # What holds where a record does not say.
    unsaid = {"dtype": "f32", "accumulate": "f32", "weights": "master", "loss_scale": 1.0, "fuse": "none", "streams": 1}
    said = [{**unsaid, "launch": run.settings.get("mode", "eager"), **run.settings} for run in runs]
    telling = [key for key in keys if len({str(settings.get(key)) for settings in said}) > 1]
    own: dict[str, dict[str, set[str]]] = {}
    for run in runs:
        for key, value in run.settings.get("allocator_settings", {}).items():
            own.setdefault(run.arm, {}).setdefault(key, set()).add(str(value))
    named: list[tuple[str, Run]] = []
    for run, settings in zip(runs, said, strict=True):
        words = [f"{key.replace('_', ' ')} {settings[key]}" for key in telling if key in settings]
        words += [
            f"{key.replace('_', ' ')} {run.settings['allocator_settings'].get(key)}"
            for key, values in own.get(run.arm, {}).items()
            if len(values) > 1
        ]
        name = ", ".join([run.arm, *words])
        same = sum(1 for other, _ in named if other == name or other.startswith(f"{name} ("))
        named.append((f"{name} ({same + 1})" if same else name, run))
    return named


def table(runs: list[tuple[str, Run]]) -> dict[str, Any]:
    """The figures by which runs are compared: columns and rows of texts."""

    def time(ns: float | None) -> str:
        return "–" if ns is None else style.si_time(ns)

    def size(value: float | None) -> str:
        return "–" if value is None else style.si_bytes(value)

    columns = [
        "run", "step", "10–90 % of steps", "host blocked a step", "driver calls a step",
        "host blocked an epoch, with validation", "most in", "driver calls an epoch, with validation", "allocate p50",
        "p99", "free p50", "p99", "peak reserved", "peak requested", "utilisation", "validation accuracy",
    ]  # fmt: skip
    rows = []
    for name, run in runs:
        m = measures(run)
        us = {key: None if m.get(key) is None else 1e3 * m[key] for key in ("step_us", "step_p10_us", "step_p90_us")}
        cells = [
            name,
            time(us["step_us"]),
            "–" if us["step_p10_us"] is None else f"{time(us['step_p10_us'])} – {time(us['step_p90_us'])}",
            time(None if m["blocked_us"] is None else 1e3 * m["blocked_us"]),
            "–" if m["driver_calls"] is None else f"{m['driver_calls']:.1f}",
            time(None if m["epoch_blocked_us"] is None else 1e3 * m["epoch_blocked_us"]),
            m["epoch_blocked_in"] or "–",
            "–" if m["epoch_driver_calls"] is None else f"{m['epoch_driver_calls']:,.0f}",
            *(time(m[f"{op}_{p}_ns"]) for op in ("allocate", "deallocate") for p in ("p50", "p99")),
            size(m["peak_reserved_bytes"]),
            size(m["peak_requested_bytes"]),
            "–" if m["utilisation"] is None else f"{100 * m['utilisation']:.1f} %",
            "–" if m["val_accuracy"] is None else f"{100 * m['val_accuracy']:.2f} %",
        ]
        rows.append({"name": cells[0], "colour": style.colour(run.arm), "cells": cells[1:]})
    return {"columns": columns, "rows": rows}


def settings_table(runs: list[tuple[str, Run]]) -> list[dict[str, str]]:
    """What each run was, in words."""
    rows = []
    for name, run in runs:
        told = {**run.settings, **run.settings.get("allocator_settings", {})}
        told.pop("allocator_settings", None)
        data = run.summary.get("dataset", {})
        text = "; ".join(f"{key} {value}" for key, value in told.items() if not isinstance(value, list | dict))
        machine = f"{run.device}; {data.get('source', '')}; version {run.summary.get('code_version', '–')}"
        rows.append({"name": name, "machine": machine, "settings": text})
    return rows


def map_data(run: Run, windows: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """What the page's script draws: for each window its blocks and segments with compacted addresses."""
    blocks = histories.lives(run.trace)
    segments = histories.segments(run.calls) if run.has("driver_calls.jsonl") else None
    if segments is None:
        segments = pl.DataFrame(schema={"addr": pl.UInt64, "bytes": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64})
    out = []
    for title, start, end in windows:
        overlaps = (pl.col("start_ns") < end) & (pl.col("end_ns").fill_null(end) > start)
        shown, under = blocks.filter(overlaps), segments.filter(overlaps)
        if shown.height > MAP_BLOCKS:
            raise AnalysisError(
                f"{run.path}: {shown.height:,} blocks in {MAP_STEPS} steps are more than a page can draw."
            )
        if shown.is_empty():
            continue
        addr = pl.concat([under["addr"], shown["addr"]]).to_numpy()
        size = pl.concat([under["bytes"], shown["block"].alias("bytes")]).to_numpy()
        place, _ = histories.compacted(addr, size)
        paths = sorted(shown["path"].unique())
        rows = []
        for one, at in zip(shown.iter_rows(named=True), place[under.height :], strict=True):
            # Times before the window are negative, after it null: the page says "still held".
            stop = None if one["end_ns"] is None else one["end_ns"] - start
            rows.append(
                [
                    one["start_ns"] - start,
                    stop,
                    int(at),
                    one["block"],
                    one["size"],
                    paths.index(one["path"]),
                    one["stream"],
                ]
            )
        held = [
            [one["start_ns"] - start, None if one["end_ns"] is None else one["end_ns"] - start, int(at), one["bytes"]]
            for one, at in zip(under.iter_rows(named=True), place[: under.height], strict=True)
        ]
        top = int((place + size.astype(place.dtype)).max())
        out.append({"title": title, "span": end - start, "top": top, "paths": paths, "blocks": rows, "segments": held})
    return out


def map_windows(run: Run) -> list[tuple[str, int, int]]:
    """Parts of the run that its block maps show: the beginning, and a few steps when it is warm."""
    steps = run.steps
    first = int(run.trace["time_ns"][0])
    early = min(1, steps.height - 1)
    warm = steps.filter(pl.col("index") == steps.height * 3 // 4)["index"][0]
    windows = [(f"start of the run, to the end of step {early + 1}", first, int(steps["host_ns"][early]))]
    if warm + MAP_STEPS <= steps.height and warm > early + 1:
        start, end = histories.window(steps, warm, warm + MAP_STEPS - 1)
        windows.append((f"steps {warm + 1} to {warm + MAP_STEPS}", start, end))
    return windows


def build(runs: list[Run]) -> str:
    """The page. Raises AnalysisError when a run has nothing to draw."""
    named = name_runs(runs)
    page = Page()
    devices = sorted({run.device for run in runs})
    for name, run in named:
        _ = run.epochs  # a run without epochs says so here
        if not run.ended:
            status = run.summary["status"]
            why = "killed, or still running," if status == "running" else status
            page.note(f"{name}: the run was {why} after epoch {run.epochs.height}; the page shows what it recorded.")
    page.add("measures", **table(named))
    page.add("settings", rows=settings_table(named))

    page.heading("Where the host's time goes", "In the last epoch, validation included.")
    counted = [
        (name, run) for name, run in named if calls.told_per(run) and run.summary["epochs"][-1].get("driver_calls")
    ]
    page.figure(
        lambda: bars.stacked(
            [(name, calls.host_parts(run.driver_calls(-1), run.epochs["wall_s"][-1] * 1e3)) for name, run in counted],
            style.HOST_PARTS,
            unit="host time of the last epoch, ms",
            total=lambda value: f"{value:.4g} ms",
        )
    )
    older = [name for name, run in counted if calls.told_per(run) != "step"]
    per = "epoch" if older else "step"
    page.heading(
        "Sync account",
        f"Driver calls that took the host's time, of one {calls.PERIODS[per]}; epochs after the first. "
        "Hatched: waiting for the device.",
    )
    if older and counted:
        page.note(
            f"{', '.join(older)}: the record counts the driver calls of training and validation together, so they are "
            "of whole epochs and not of a step."
        )
    page.figure(
        lambda: sync.account([(name, calls.account(run, per=per)) for name, run in counted], period=calls.PERIODS[per])
    )
    page.heading("Memory after each step")
    page.figure(lambda: memory.over_steps([(name, run.steps) for name, run in named]))
    page.heading("Where reserved memory went", "At the moment when reserved memory was at its peak.")
    page.figure(lambda: memory.ledger([(name, run.ledger) for name, run in named]))

    page.heading(
        "Timeline of memory: the block map",
        "Each rectangle is a block: from its allocation to its free, at its addresses. Grey: memory held from the "
        "device. Drag to zoom, double-click to go back; the pointer tells what a block is.",
    )
    for name, run in named:
        if not run.has("trace.jsonl"):
            page.note(f"{name}: no block map, because operations were not recorded; run it with --trace.")
            continue
        page.add("map", title=name, data=map_data(run, map_windows(run)))
        levels = map_windows(run)[-1]
        held = histories.reserved(run.calls) if run.has("driver_calls.jsonl") else None
        page.figure(
            lambda run=run, held=held, name=name, levels=levels: memory.within_steps(  # type: ignore[misc]
                run.trace, held, levels[1], levels[2], title=f"{name}, {levels[0]}"
            )
        )

    page.heading("Latency", "Time that one call of the allocator takes, by the path that served it.")
    timed = [(name, run) for name, run in named if run.has("latency.hlog")]
    for name, run in named:
        if not run.has("latency.hlog"):
            page.note(f"{name}: no histograms in its record.")
    for name, run in timed:
        page.figure(
            lambda run=run, name=name: latency.spectrum(  # type: ignore[misc]
                histograms.spectrum(run.histograms), title=name, simulated=run.simulated
            )
        )
    if len(timed) > 1:
        tints = {name: style.colour(run.arm) for name, run in timed}
        page.figure(
            lambda: latency.spectrum(
                pl.concat(
                    histograms.spectrum(run.histograms, "all").with_columns(group=pl.lit(name)) for name, run in timed
                ),
                title="all paths together",
                colours=tints,
                simulated=all(run.simulated for _, run in timed),
            )
        )
    page.heading("Losses")
    page.figure(lambda: loss.curves([(name, run.steps) for name, run in named], over=10))
    losses(page, named)
    title = "One run" if len(runs) == 1 else f"{len(runs)} runs"
    return document(title, ", ".join(devices), page)


def losses(page: Page, named: list[tuple[str, Run]]) -> None:
    """What the losses of runs of the same work say about each other: equal to the last bit, or how far apart."""
    first_name, first = named[0]
    work = ("dataset", "hidden", "layers", "batch", "seed", "init", "lr")
    for name, run in named[1:]:
        if any(first.settings.get(key) != run.settings.get(key) for key in work):
            continue
        if not all(one.has_steps and "loss" in one.steps.columns for one in (first, run)):
            continue
        apart = loss.difference(run.steps, first.steps)
        greatest = float(apart["relative"].max() or 0.0)  # type: ignore[arg-type]
        said = "equal to the last bit" if greatest == 0 else f"at most {greatest:.1e} apart (relative)"
        page.note(f"{name} and {first_name}: losses of {apart.height} steps are {said}.")


def document(title: str, subtitle: str, page: Page) -> str:
    """The whole HTML document with its style sheet and script inside.

    Its content-security policy allows these two by their hashes, and nothing else: whatever a record might smuggle in
    is neither run nor fetched.
    """
    css, script = (Markup((HERE / name).read_text()) for name in ("report.css", "report.js"))
    directives = {
        "default-src": "'none'",
        "script-src": _allowed(script),
        "style-src": _allowed(css),
        "style-src-attr": "'unsafe-inline'",  # SVG's figures have their colours there
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in directives.items())
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "sort_keys": False}
    template = environment.from_string((HERE / "report.html").read_text())
    return template.render(title=title, subtitle=subtitle, policy=policy, css=css, script=script, parts=page.parts)


def _allowed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def gather(paths: list[str]) -> list[Run]:
    """Runs of the given records; an experiment stands for the first repeat of each of its runs."""
    runs: list[Run] = []
    for path in paths:
        if holds_experiment(Path(path)):
            experiment = load_experiment(path)
            chosen = [one for one in experiment.runs if one.done and one.meta.get("repeat") == 0]
            runs += [one.record for one in chosen if one.meta.get("program") in ("trainer", "pytorch")]
            if not runs:
                raise AnalysisError(f"{path}: no run of a trainer in this experiment.")
        else:
            runs.append(load_run(path))
    return runs


def write(paths: list[str], out: Path) -> None:
    """Writes the page; it appears as a whole.

    Raises AnalysisError when a run cannot be read or the page not be written.
    """
    output.check(out)  # before the work
    output.write(out, build(gather(paths)))
