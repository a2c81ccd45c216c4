"""The page of `vramlab report` on a desk's screen and on a telephone's: nothing is cut, nothing leaves its place."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser
from tests.conftest import summary, write_experiment, write_run
from tests.test_history_page import READY, built, snapshot

# Elements that are wider than what holds them. What has a scroll of its own may be, but none of the tables needs it.
WIDER = """(() => {
  const found = [], scrolls = (e) => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const name = (e) => e.tagName.toLowerCase() + (e.className ? "." + e.className : "");
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) found.push(`the page: ${page.scrollWidth} of ${page.clientWidth}`);
  for (const e of document.querySelectorAll("main *")) {
    if (!e.getClientRects().length || e.ownerSVGElement || e.tagName === "SELECT") continue;
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    const around = e.parentElement.getBoundingClientRect();
    const out = Math.max(box.right - around.right, around.left - box.left);
    if (style.position !== "absolute" && !scrolls(e.parentElement) && out > 1.5)
      found.push(`${name(e)} is ${out.toFixed(0)} beyond ${name(e.parentElement)}: ${e.textContent.slice(0, 40)}`);
    if (style.display !== "inline" && style.textOverflow !== "ellipsis" && e.scrollWidth > e.clientWidth + 1)
      found.push(`${name(e)} holds ${e.scrollWidth} in ${e.clientWidth}: ${e.textContent.slice(0, 40)}`);
  }
  return found;
})()"""
PAGES = ("a history", "two histories", "a run", "several runs", "an experiment", "replays")


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    yield from browser.opened()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("widths")
    for name in ("a.pickle", "another-history-with-a-rather-long-name-of-a-file.pickle"):
        (folder / name).write_bytes(pickle.dumps(snapshot(), 4))
    runs = ["naive", "caching", "stream-ordered"]
    for name in runs:
        told = summary(name)
        told["latency"].append({"operation": "deallocate", "path": "driver_free", "count": 9, "p50_ns": 7, "p99_ns": 8})
        write_run(folder / name, told, trace=True)
    arms = [(name, {"hidden": hidden}, summary(name)) for name in runs for hidden in (64, 128)]
    write_experiment(folder / "experiment", arms)
    write_replays(folder / "replays", ["a.pickle", "another-history-with-a-rather-long-name-of-a-file.pickle"])
    inputs = [["a.pickle"], sorted(path.name for path in folder.glob("*.pickle")), ["caching"], runs, ["experiment"]]
    inputs.append(["replays"])
    made = {}
    for name, arguments in zip(PAGES, inputs, strict=True):
        made[name] = folder / f"{name.replace(' ', '-')}.html"
        out = ["--alloc", "caching,pytorch-expandable", "--out", str(made[name])]
        subprocess.run([built(), "report", *arguments, *out], cwd=folder, check=True, capture_output=True)
    return made


def write_replays(folder: Path, histories: list[str]) -> None:
    """An experiment of replays, each with the program's output."""
    folder.mkdir()
    (folder / "experiment.json").write_text(json.dumps({"name": "mine", "question": "Which of them reserves least?"}))
    for number, (history, alloc) in enumerate(itertools.product(histories, ("caching", "bfc", "remap:steal=always"))):
        arguments = ["replay", history, "--alloc", alloc, "--json"]
        said = subprocess.run([built(), *arguments], cwd=folder.parent, check=True, capture_output=True).stdout
        one = folder / "runs" / f"{number:02}"
        one.mkdir(parents=True)
        meta = {"program": "replay", "arm": "replay", "status": "done", "repeat": 0}
        (one / "run.json").write_text(json.dumps(meta | {"options": {"history": history, "alloc": alloc}}))
        (one / "result.json").write_bytes(said)


def test_replays_are_a_matrix(pages: dict[str, Path], chromium: browser.Browser) -> None:
    opened(chromium, pages["replays"], 1280)
    assert chromium.evaluate("document.querySelector('h1').textContent") == "GPU memory of 6 replays"
    table = "document.querySelector('table.matrix')"
    heads = chromium.evaluate(f"[...{table}.tHead.rows[0].cells].map((one) => one.textContent)")
    assert heads == ["allocator", "a", "another-history-with-a-rather-long-name-of-a-file"]
    cells = chromium.evaluate(
        f"[...{table}.tBodies[0].rows].map((row) => [...row.cells].map((one) => one.textContent))"
    )
    assert [row[0] for row in cells] == ["caching", "bfc", "remap:steal=always"]
    told = json.loads((pages["replays"].parent / "replays/runs/01/result.json").read_text())[0]
    assert cells[1][1] == f"{told['peak_reserved_bytes'] / told['lower_bound_bytes']:.3f}"
    # The more is reserved, the darker the cell.
    shades = chromium.evaluate(
        f"[...{table}.querySelectorAll('.cell')].map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(shades)) > 1


def test_note_of_several_runs_is_printed_once(pages: dict[str, Path], chromium: browser.Browser) -> None:
    opened(chromium, pages["an experiment"], 1280)
    notes = chromium.evaluate("[...document.querySelectorAll('.runs > .note')].map((one) => one.textContent)")
    assert len(notes) == 1
    assert notes[0].startswith("6 of 6 runs: The run has no recorded operations")


def opened(chromium: browser.Browser, page: Path, width: int) -> None:
    chromium.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    chromium.console.clear()
    chromium.open(page.as_uri(), READY)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut(pages: dict[str, Path], chromium: browser.Browser, name: str, width: int) -> None:
    opened(chromium, pages[name], width)
    # What is folded is looked at, too, and a block that was chosen with all that is said of it.
    chromium.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    chromium.evaluate("document.querySelectorAll('button.more').forEach((one) => one.click())")
    chromium.evaluate("document.querySelector('button.way')?.click()")
    assert chromium.evaluate(WIDER) == []
    assert chromium.console == []


def test_a_narrow_table_names_each_cell_and_stays_folded(pages: dict[str, Path], chromium: browser.Browser) -> None:
    opened(chromium, pages["a history"], 390)
    assert chromium.evaluate("getComputedStyle(document.querySelector('table.purposes thead')).display") == "none"
    cell = "document.querySelector('table.purposes td')"
    assert chromium.evaluate(f"getComputedStyle({cell}, '::before').content") != "none"
    assert chromium.evaluate(f"{cell}.dataset.name") == "bytes"
    chromium.evaluate(f"{cell}.parentElement.hidden = true")
    assert chromium.evaluate(f"{cell}.parentElement.getClientRects().length") == 0


def test_text_that_is_too_wide_is_found(pages: dict[str, Path], chromium: browser.Browser) -> None:
    opened(chromium, pages["a run"], 390)
    chromium.evaluate("document.querySelector('h1').style.width = '420px'")
    assert any(one.startswith("h1 is ") for one in chromium.evaluate(WIDER))
