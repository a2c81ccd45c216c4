"""The page, opened in headless Chromium: every figure is drawn, the console is silent, nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser
from tests.conftest import summary, write_run
from vramlab import report
from vramlab.errors import AnalysisError

READY = "document.documentElement?.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Browser]:
    yield from browser.opened()


@pytest.fixture
def records(tmp_path: Path) -> list[str]:
    return [str(write_run(tmp_path / name, summary(name), trace=name == "caching")) for name in ("naive", "caching")]


def test_the_page_draws_everything_and_fetches_nothing(
    tmp_path: Path, records: list[str], page: browser.Browser
) -> None:
    out = tmp_path / "report.html"
    report.write(records, out)
    page.console.clear()
    page.asked.clear()
    page.open(out.as_uri(), READY)
    assert page.console == []
    assert page.asked == [out.as_uri()]
    figures = page.evaluate(
        "[...document.querySelectorAll('figure.drawn svg')].map(s => ({w: s.getBoundingClientRect().width,"
        " h: s.getBoundingClientRect().height, marks: s.querySelectorAll('path, use').length,"
        " words: s.querySelectorAll('text').length}))"
    )
    assert len(figures) == 9
    for figure in figures:
        assert figure["w"] > 300
        assert figure["h"] > 80
        assert figure["marks"] > 10
        assert figure["words"] > 4
    assert page.evaluate("[...document.querySelectorAll('figure.map')].map(f => f.dataset.drawn)") == ["6"]
    # More than one colour on the canvas: something was drawn.
    tints = page.evaluate(
        "(() => { const c = document.querySelector('canvas');"
        " const d = c.getContext('2d').getImageData(80, 10, c.width - 90, c.height - 60).data; const seen = new Set();"
        " for (let i = 0; i < d.length; i += 4) seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2]); return seen.size; })()"
    )
    assert tints > 2
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    rows = page.evaluate("[...document.querySelectorAll('table tbody tr th')].map(e => e.innerText)")
    assert rows[:2] == ["naive", "caching"]


def test_the_map_answers_the_pointer(tmp_path: Path, records: list[str], page: browser.Browser) -> None:
    out = tmp_path / "report.html"
    report.write(records[1:], out)
    page.open(out.as_uri(), READY)
    box = page.evaluate(
        "(() => { const c = document.querySelector('canvas'); c.scrollIntoView(); const b = c.getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    # The long-lived block lies at the bottom; its life covers the whole width.
    left, top, width, height = box
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=top + height - 34 - 0.06 * height)
    said = page.evaluate("document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent")
    assert "asked for" in said
    buttons = page.evaluate("[...document.querySelectorAll('.pick button')].map(b => b.textContent)")
    assert buttons[0].startswith("start of the run")


def test_a_page_names_nothing_outside(tmp_path: Path, records: list[str]) -> None:
    text = report.build(report.gather(records))
    outside = set(re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', text)) | set(re.findall(r"url\((?!#)[^)]*\)", text))
    assert outside == set()
    assert "losses of 4 steps are equal to the last bit" in text
    assert "run it with --trace" in text


def test_runs_whose_steps_were_not_kept_have_a_page_too(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, summary(name)) for name in ("naive", "caching")]
    (folders[1] / "steps.csv").unlink()
    text = report.build(report.gather([str(folder) for folder in folders]))
    assert f"{folders[1]}: no steps.csv in this run record; it was not kept." in text
    assert "to the last bit" not in text


def test_a_killed_run_is_shown_with_a_word_of_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "killed", summary(status="running"))
    text = report.build(report.gather([str(folder)]))
    assert "the run was killed, or still running, after epoch 2" in text
    early = write_run(tmp_path / "early", summary(status="running", epochs=0))
    with pytest.raises(AnalysisError, match="ended no epoch"):
        report.build(report.gather([str(early)]))


def test_runs_of_one_allocator_are_told_apart(tmp_path: Path) -> None:
    told = [summary("caching"), summary("caching"), summary("caching")]
    told[1]["settings"] = {**told[1]["settings"], "hidden": 128}
    runs = report.gather([str(write_run(tmp_path / str(n), one)) for n, one in enumerate(told)])
    assert [name for name, _ in report.name_runs(runs)] == [
        "caching, hidden 64", "caching, hidden 128", "caching, hidden 64 (2)",
    ]  # fmt: skip


def test_runs_are_told_apart_by_their_arithmetic(tmp_path: Path) -> None:
    # A record from before there were types says nothing, and was f32.
    told = [summary("caching"), summary("caching"), summary("caching")]
    told[1]["settings"] = {**told[1]["settings"], "dtype": "f32", "fuse": "none", "loss_scale": 1.0}
    told[2]["settings"] = {**told[2]["settings"], "dtype": "f16", "fuse": "none", "loss_scale": 1024.0}
    runs = report.gather([str(write_run(tmp_path / str(n), one)) for n, one in enumerate(told)])
    assert [name for name, _ in report.name_runs(runs)] == [
        "caching, dtype f32, loss scale 1.0", "caching, dtype f32, loss scale 1.0 (2)",
        "caching, dtype f16, loss scale 1024.0",
    ]  # fmt: skip
    assert runs[2].label == runs[1].label.replace("batch 64", "batch 64, f16")
