"""The page that `vramlab report` writes for histories, opened in headless Chromium: drawn, answering, silent, alone."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import browser
from tests.conftest import summary, write_run
from tests.hostile import HOSTILE
from tests.repeated import repeated

ROOT = Path(__file__).resolve().parents[2]
READY = "document.documentElement?.dataset.ready === 'yes'"
MIB = 2**20
BASE = 0x7F00_0000_0000
# What a program may call its functions and ranges; half a character is no text to a snapshot's reader.
SAID = HOSTILE.encode(errors="ignore").decode()


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    yield from browser.opened()


@pytest.fixture
def page(chromium: browser.Browser) -> Iterator[browser.Browser]:
    """The browser. In every test the console stays empty and only the page is requested."""
    chromium.console.clear()
    chromium.asked.clear()
    yield chromium
    chromium.evaluate("1")
    assert chromium.console == []
    assert all(address.startswith("file:") and address.endswith(".html") for address in chromium.asked)


def built() -> Path:
    """The program: VRAMLAB, or the last build."""
    named = [Path(os.environ["VRAMLAB"])] if "VRAMLAB" in os.environ else []
    found = [
        path
        for path in (*named, *(ROOT / "target" / kind / "vramlab" for kind in ("debug", "release")))
        if path.is_file()
    ]
    if not found:
        pytest.skip("the program vramlab is not built, so its page was NOT opened: cargo build -p vramlab-cli")
    return max(found, key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def program() -> Path:
    return built()


def frames(line: int) -> list[dict[str, Any]]:
    return [
        {"name": "forward", "filename": "/env/site-packages/torch/nn/modules/linear.py", "line": 125},
        {"name": f"step{SAID}", "filename": "train.py", "line": line},
        {"name": "<module>", "filename": "train.py", "line": 99},
    ]


def snapshot() -> dict[str, Any]:
    """One permanent block, one after it that is allocated and freed twenty times, one on another stream."""
    events: list[dict[str, Any]] = []

    def add(action: str, addr: int, size: int, stream: int = 0, line: int = 1) -> None:
        event = {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 1000 + 10 * len(events)}
        category = {"category": f"weights{SAID}"} if line == 7 else {}
        events.append({**event, **category, "frames": frames(line)})

    add("segment_alloc", BASE, 40 * MIB)
    add("alloc", BASE, 40 * MIB - 100, line=7)
    add("segment_alloc", BASE - 64 * MIB, 20 * MIB, 3)
    add("alloc", BASE - 64 * MIB, 8 * MIB, 3, line=8)
    add("segment_alloc", BASE - 32 * MIB, 20 * MIB)
    for _ in range(20):
        add("alloc", BASE - 32 * MIB, 8 * MIB, line=9)
        add("free_requested", BASE - 32 * MIB, 8 * MIB, line=9)
        add("free_completed", BASE - 32 * MIB, 8 * MIB, line=9)

    def segment(addr: int, size: int, stream: int, block: int, asked: int) -> dict[str, Any]:
        blocks = []
        if block:
            state = "active_allocated"
            blocks = [{"address": addr, "size": block, "requested_size": asked, "state": state, "frames": frames(7)}]
        if size > block:
            left = {
                "address": addr + block,
                "size": size - block,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            }
            blocks.append(left)
        return {
            "device": 0, "address": addr, "total_size": size, "allocated_size": block, "active_size": block,
            "requested_size": asked, "stream": stream, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip

    held = [
        segment(BASE - 64 * MIB, 20 * MIB, 3, 8 * MIB, 8 * MIB),
        segment(BASE - 32 * MIB, 20 * MIB, 0, 0, 0),
        segment(BASE, 40 * MIB, 0, 40 * MIB, 40 * MIB - 100),
    ]
    notes = [
        {
            "stage": stage,
            "name": f"step {n}{SAID}",
            "device": 0,
            "time_us": 1035 + 100 * n + (50 if stage == "END" else 0),
        }
        for n in range(3)
        for stage in ("START", "END")
    ]
    return {"segments": held, "device_traces": [events], "allocator_settings": {}, "external_annotations": notes}


@pytest.fixture(scope="module")
def written(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "a.pickle").write_bytes(pickle.dumps(snapshot(), 4))
    run(program, folder, "a.pickle", "--alloc", "caching,pytorch-expandable")
    return folder / "report.html"


def run(program: Path, folder: Path, *arguments: str) -> None:
    subprocess.run([program, "report", *arguments], cwd=folder, check=True, capture_output=True)


def opened(page: browser.Browser, path: Path, width: int = 1400) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
    page.console.clear()
    page.asked.clear()
    page.open(path.as_uri(), READY)
    assert page.console == []
    assert page.asked == [path.as_uri()]
    page.evaluate("document.querySelector('canvas.blocks').scrollIntoView()")


def drawn(page: browser.Browser) -> None:
    """Waits for the frame after the next."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")


def view(page: browser.Browser, panel: int = 0) -> list[float]:
    drawn(page)
    return [float(one) for one in page.evaluate(f"document.querySelectorAll('.panel')[{panel}].dataset.view").split()]


def point(page: browser.Browser, event: float, place: float) -> tuple[float, float]:
    """Where an event and a place in memory are on the screen."""
    left, top, width, height = page.evaluate(
        "(() => { const b = document.querySelector('canvas.blocks').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    x0, x1, y0, y1 = view(page)
    wide, tall = width - 76 - 10, height - 6 - 17 - 22
    return left + 76 + wide * (event - x0) / (x1 - x0), top + 23 + tall * (1 - (place - y0) / (y1 - y0))


def mouse(page: browser.Browser, kind: str, at: tuple[float, float], **more: Any) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)


def press(page: browser.Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key=key,
            **({"text": key} if len(key) == 1 and kind == "keyDown" else {}),
        )
    drawn(page)


def choose(page: browser.Browser, tool: str, value: str) -> None:
    page.evaluate(
        f"(() => {{ const s = document.querySelector('[data-tool={tool}]'); s.value = '{value}';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    time.sleep(0.1)
    drawn(page)


def pixels(page: browser.Browser) -> int:
    """Different colours on the map."""
    found: int = page.evaluate(
        "(() => { const c = document.querySelector('canvas.blocks'), copy = new OffscreenCanvas(c.width, c.height);"
        " const pen = copy.getContext('2d', {willReadFrequently: true}); pen.drawImage(c, 0, 0);"
        " const d = pen.getImageData(80, 30, c.width - 100, c.height - 60).data; const seen = new Set();"
        " for (let i = 0; i < d.length; i += 4) seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2]); return seen.size; })()"
    )
    return found


def test_it_draws_everything_without_a_network(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    assert page.evaluate("[...document.querySelectorAll('.panel')].map(p => p.dataset.drawn)") == ["22"]
    assert view(page) == [0, 65, 0, 80 * MIB]
    assert pixels(page) > 2
    rows = page.evaluate("[...document.querySelectorAll('.compared tbody th')].map(e => e.textContent)")
    assert rows[0] == "as recorded"
    assert sorted(rows[1:3]) == ["caching", "pytorch-expandable"]
    assert rows[3:] == ["offline placement", "lower bound"]
    figures = dict(
        page.evaluate(
            "[...document.querySelectorAll('dl.figures div')].map(r => [...r.children].map(c => c.textContent))"
        )
    )
    assert figures["peak reserved, recorded"] == "80 MiB"
    assert figures["events"] == "65"
    # What the log says of itself is exactly what the replay did: its ledger and its paths are those of the recording.
    assert "its replay matches every recorded block address" in page.evaluate("document.body.textContent")


def test_pointer_shows_a_block(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    mouse(page, "mouseMoved", point(page, 30, 60 * MIB))
    said = page.evaluate("document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent")
    assert "40.0 MiB requested (41,942,940 bytes), block of 40 MiB" in said
    assert f"at {BASE:#x}, served by driver_alloc, stream 0" in said
    assert "in a segment of 40 MiB (large requests), stream 0" in said
    assert f"category weights{SAID}" in said
    assert "allocated at event 2 (10 µs), live at the end" in said
    # The innermost line of the user's own code, whatever it is called.
    assert "train.py:7 step" in said
    assert SAID in said
    mouse(page, "mouseMoved", point(page, 30.4, 14 * MIB))
    # Held from the device, but no block: the segment, and what is free of it at that moment.
    assert page.evaluate("document.querySelector('.tip').textContent").split("\n") == [
        f"Segment of 20 MiB (large requests), stream 3 at {BASE - 64 * MIB:#x}",
        "allocated at event 3 (20 µs), reserved at the end",
        "after event 31 (300 µs): 1 block with 8 MiB, 12 MiB free, largest free block 12 MiB",
    ]
    assert page.evaluate("document.querySelector('.panel').dataset.frames") == "3"
    mouse(page, "mouseMoved", point(page, 1.5, 14 * MIB))
    assert page.evaluate("document.querySelector('.tip').hidden"), "before that segment was taken"
    # The range of the program that a block was allocated in.
    mouse(page, "mouseMoved", point(page, 14.5, 24 * MIB))
    assert f"during step 1{SAID}" in page.evaluate("document.querySelector('.tip').textContent")


def test_lines_and_ranges_are_distinguished(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    assert page.evaluate("document.querySelector('[data-tool=colour]').value") == "line"
    legend = page.evaluate("[...document.querySelectorAll('.panel .legend')][0].textContent")
    assert all(f":{line} step" in legend for line in (7, 8, 9))
    # A range of the program above the map: the second lasts from 1135 to 1185 us, events 14 to 19.
    x, _ = point(page, 16, 0)
    top = page.evaluate("document.querySelector('canvas.blocks').getBoundingClientRect().top")
    mouse(page, "mouseMoved", (x, top + 10))
    assert page.evaluate("document.querySelector('.tip').textContent") == f"step 1{SAID}"
    mouse(page, "mousePressed", point(page, 30, 60 * MIB), button="left", clickCount=1)
    mouse(page, "mouseReleased", point(page, 30, 60 * MIB), button="left", clickCount=1)
    drawn(page)
    stack = page.evaluate("document.querySelector('.details details pre').textContent")
    assert stack.startswith("/env/site-packages/torch/nn/modules/linear.py:125 forward\n")
    assert page.evaluate("window.hacked") is None
    choose(page, "colour", "category")
    legend = page.evaluate("[...document.querySelectorAll('.panel .legend')][0].textContent")
    assert f"weights{SAID}" in legend
    assert "not recorded" in legend


def test_answers_are_drawn_from_their_figures(written: Path, program: Path, page: browser.Browser) -> None:
    opened(page, written)
    answers = page.evaluate("[...document.querySelectorAll('.answer h3')].map(e => e.textContent)")
    assert answers == ["Settings (advise)", "Explanation (explain)"]

    def said(command: str) -> Any:
        arguments = [str(program), command, "a.pickle", "--json"]
        return json.loads(subprocess.run(arguments, cwd=written.parent, check=True, capture_output=True).stdout)

    def texts(selector: str) -> list[str]:
        found: list[str] = page.evaluate(
            f"[...document.querySelectorAll('.answer {selector}')].map(e => e.textContent)"
        )
        return found

    advice, explained = said("advise"), said("explain")
    rows = page.evaluate(
        "[...document.querySelector('.answer table.confs').tBodies[0].rows].map(r =>"
        " [r.cells[0].textContent, parseFloat(r.querySelector('.bar i').style.width)])"
    )
    assert [name for name, _ in rows[1:]] == [setting["conf"] or "PyTorch's defaults" for setting in advice["settings"]]
    peaks = [one["peak_reserved_bytes"] for one in (advice["recorded"]["replayed"], *advice["settings"])]
    for (_, width), peak in zip(rows, peaks, strict=True):
        assert width / rows[0][1] == pytest.approx(peak / peaks[0], rel=1e-3)

    # The parts of what was reserved fill the bar; lines are those of the explanation, in its order.
    def shares(place: int) -> Any:
        bar = f"document.querySelectorAll('.answer .parts')[{place}].children"
        return page.evaluate(f"[...{bar}].map(e => parseFloat(e.style.flexGrow))")

    parts, whole = shares(0), explained["reserved"]["moment"]["reserved_bytes"]
    assert parts == pytest.approx([p["bytes"] / whole for p in explained["reserved"]["parts"] if p["bytes"]], rel=1e-4)
    # What memory is for stands beside the lines: a bar, and a row for each part.
    who = explained["who"][0]
    assert [purpose["purpose"] for purpose in who["purposes"]] == ["activations"]
    assert shares(1) == pytest.approx([purpose["bytes"] / who["moment"]["active_bytes"] for purpose in who["purposes"]])
    blocks = str(who["purposes"][0]["blocks"])
    assert texts("table.purposes tbody tr:first-child > *")[::3] == ["activations", blocks]
    lines = [line["line"] for line in who["lines"]]
    assert len(lines) > 1
    shown = [text for text in texts(".answer td.left, .answer th.left") if any(text.startswith(line) for line in lines)]
    assert [text.split(" › ")[0] for text in shown[: len(lines)]] == lines
    assert texts(".answer pre") == [], "no screen of a terminal"
    # A moment that the explanation names is a way to the map.
    event = explained["who"][0]["moment"]["event"]
    page.evaluate("document.querySelector('.answer h4 button.way').click()")
    drawn(page)
    assert f"After event {event} of 65" in page.evaluate("document.querySelector('.details').textContent")


def test_it_zooms_and_moves(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    mouse(page, "mouseWheel", point(page, 32.5, 40 * MIB), deltaX=0, deltaY=-100)
    x0, x1, y0, y1 = view(page)
    assert 0 < x0 < 32.5 < x1 < 65
    assert (y0, y1) == (0, 80 * MIB)
    # The pointer's event stays where it is.
    assert abs((32.5 - x0) / (x1 - x0) - 0.5) < 0.01
    mouse(page, "mouseWheel", point(page, 32, 40 * MIB), deltaX=0, deltaY=-100, modifiers=8)
    assert view(page)[3] < 80 * MIB
    start, end = point(page, 32, 40 * MIB), point(page, 36, 40 * MIB)
    before = view(page)
    mouse(page, "mousePressed", start, button="left", clickCount=1)
    mouse(page, "mouseMoved", end, button="left", buttons=1)
    mouse(page, "mouseReleased", end, button="left", clickCount=1)
    assert abs(view(page)[0] - (before[0] - 4)) < 0.1
    page.evaluate("document.querySelector('canvas.blocks').dispatchEvent(new MouseEvent('dblclick'))")
    assert view(page) == [0, 65, 0, 80 * MIB]
    # With Shift, to a box.
    start, end = point(page, 10, 60 * MIB), point(page, 20, 20 * MIB)
    mouse(page, "mousePressed", start, button="left", clickCount=1, modifiers=8)
    mouse(page, "mouseMoved", end, button="left", buttons=1, modifiers=8)
    mouse(page, "mouseReleased", end, button="left", clickCount=1, modifiers=8)
    x0, x1, y0, y1 = view(page)
    assert (round(x0), round(x1), round(y0 / MIB), round(y1 / MIB)) == (10, 20, 20, 60)


def test_keys_work(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    page.evaluate("document.querySelector('canvas.blocks').focus({preventScroll: true})")
    press(page, "+")
    x0, x1, *_ = view(page)
    assert (x0, x1) == (16.25, 48.75)
    press(page, "ArrowRight")
    assert view(page)[0] == pytest.approx(16.25 + 0.15 * 32.5)
    press(page, "PageUp")
    assert view(page)[3] - view(page)[2] == 40 * MIB
    press(page, "ArrowUp")
    assert view(page)[2] == pytest.approx((20 + 0.15 * 40) * MIB)
    press(page, "Home")
    assert view(page) == [0, 65, 0, 80 * MIB]
    for _ in range(2):
        press(page, ".")
    said = page.evaluate("document.querySelector('.details').textContent")
    assert "After event 3 of 65" in said
    assert "segment of 20 MiB allocated" in said
    press(page, ",")
    assert "After event 2 of 65" in page.evaluate("document.querySelector('.details').textContent")
    press(page, "/")
    assert page.evaluate("document.activeElement.type") == "search"


def test_a_block_is_found_by_its_address(written: Path, page: browser.Browser) -> None:
    opened(page, written)

    def find(text: str) -> str:
        page.evaluate(
            "(() => { const f = document.querySelector('form');"
            f" f.querySelector('input').value = '{text}'; f.requestSubmit(); }})()"
        )
        drawn(page)
        found: str = page.evaluate("document.querySelector('output').textContent")
        return found

    # Somewhere inside of the block, as a program's error names it; and as memory_viz names blocks.
    assert find(hex(BASE - 31 * MIB)) == "1 of 20"
    assert find(hex(BASE - 31 * MIB)) == "2 of 20"
    x0, x1, y0, y1 = view(page)
    assert x0 <= 8 < 10 <= x1 < 65
    assert y0 <= 20 * MIB < 28 * MIB <= y1 < 80 * MIB
    assert f"at {BASE - 32 * MIB:#x}" in page.evaluate("document.querySelector('pre.block').textContent")
    assert find(f"b{BASE:x}_0") == "1 of 1"
    assert find(str(BASE)) == "1 of 1"
    assert find(hex(BASE - 50 * MIB)) == "no block"


def test_other_views(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    choose(page, "kind", "stack")
    assert view(page)[3] == pytest.approx(56 * MIB * 1.03)
    assert pixels(page) > 2
    mouse(page, "mouseMoved", point(page, 5.5, 52 * MIB))
    assert "8 MiB requested" in page.evaluate("document.querySelector('.tip').textContent")
    choose(page, "map", "2")
    choose(page, "kind", "map")
    assert (
        page.evaluate("document.querySelector('[data-tool=map]').selectedOptions[0].textContent")
        == "pytorch-expandable"
    )
    assert view(page)[3] == 80 * MIB, "expandable segments grow by 20 MiB"
    for colour in page.evaluate("[...document.querySelector('[data-tool=colour]').options].map(o => o.value)"):
        choose(page, "colour", colour)
        assert pixels(page) > 1
    choose(page, "axis", "time")
    assert view(page)[1] == pytest.approx(641_600, rel=0.01), "64 steps of 10 us, and what follows the last"
    page.evaluate("[...document.querySelectorAll('button')].find(b => b.textContent === 'compare…').click()")
    time.sleep(0.3)
    assert page.evaluate("document.querySelectorAll('.panel').length") == 2
    assert view(page, 1)[:2] == view(page)[:2], "both show the same time"
    assert page.console == []


def test_ranges_within_ranges_are_shown_below_them(program: Path, tmp_path: Path, page: browser.Browser) -> None:
    nested = snapshot()
    outer = [
        {"stage": stage, "name": "epoch", "device": 0, "time_us": at} for stage, at in (("START", 1001), ("END", 1500))
    ]
    nested["external_annotations"] = [outer[0], *nested["external_annotations"], outer[1]]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(nested, 4))
    run(program, tmp_path, "a.pickle", "--alloc", "caching", "--plan", "off", "--advise", "off")
    opened(page, tmp_path / "report.html")
    x, _ = point(page, 16, 0)
    top = page.evaluate("document.querySelector('canvas.blocks').getBoundingClientRect().top")
    for lower, name in ((10, "epoch"), (27, f"step 1{SAID}")):
        mouse(page, "mouseMoved", (x, top + lower))
        assert page.evaluate("document.querySelector('.tip').textContent") == name


def test_segments_at_a_moment(written: Path, page: browser.Browser) -> None:
    opened(page, written)
    choose(page, "kind", "segments")
    box = page.evaluate(
        "(() => { const b = document.querySelector('canvas.blocks').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )

    def told(row: int, share: float) -> str:
        """The element at this share of a row: the largest segment fills the first, two of half its size the second."""
        wide, tall = box[2] - 86, (box[3] - 45) / 2
        mouse(page, "mouseMoved", (box[0] + 76 + wide * share, box[1] + 23 + tall * (row + 0.5)))
        said: str = page.evaluate(
            "document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent"
        )
        return said

    # Of 80 MiB in three segments, when most was reserved: after event 5, before the block that comes and goes.
    assert page.evaluate("document.querySelector('.panel').dataset.frames") == "3"
    assert told(0, 0.5).startswith("40.0 MiB requested")
    assert told(1, 0.1).startswith("8 MiB requested")
    assert told(1, 0.4).startswith(f"Segment of 20 MiB (large requests), stream 3 at {BASE - 64 * MIB:#x}")
    # The events around the chosen one, each a way to it.
    page.evaluate("document.querySelector('canvas.blocks').focus({preventScroll: true})")
    press(page, ".")
    listed = page.evaluate("[...document.querySelectorAll('.events li')].map(e => [e.value, e.textContent])")
    assert listed[:3] == [
        [1, "segment of 40 MiB allocated"],
        [2, f"allocation of 40.0 MiB at {BASE:#x}"],
        [3, "segment of 20 MiB allocated"],
    ]
    page.evaluate("document.querySelectorAll('.events button')[0].click()")
    drawn(page)
    assert "After event 1 of 65" in page.evaluate("document.querySelector('.details').textContent")
    assert page.evaluate("document.querySelector('.panel').dataset.frames") == "1"
    assert told(0, 0.5).startswith("Segment of 40 MiB")


def test_several_histories_stand_side_by_side(program: Path, tmp_path: Path, page: browser.Browser) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"x{HOSTILE.replace('/', '')}.pickle".replace("\0", "")[:60]).write_bytes(
            pickle.dumps(snapshot(), 4)
        )
    files = [str(path) for path in sorted(tmp_path.glob("*/*"))]
    assert len(files) == 2
    run(program, tmp_path, *files, "--alloc", "caching", "--plan", "off")
    opened(page, tmp_path / "report.html", 1800)
    assert page.evaluate("document.querySelectorAll('.panel').length") == 2
    lefts = page.evaluate("[...document.querySelectorAll('.panel')].map(p => p.getBoundingClientRect().left)")
    assert lefts[0] < lefts[1]
    opened(page, tmp_path / "report.html", 800)
    lefts = page.evaluate("[...document.querySelectorAll('.panel')].map(p => p.getBoundingClientRect().left)")
    assert lefts[0] == lefts[1]
    assert page.evaluate("document.documentElement.scrollWidth") <= 800
    assert page.evaluate("window.hacked") is None


def test_a_long_history_is_repeated_from_a_short_one(program: Path, tmp_path: Path, page: browser.Browser) -> None:
    # The blocks that are live at the end go before the next round, so the whole is a history.
    long = repeated(snapshot(), 300)
    (tmp_path / "long.pickle").write_bytes(pickle.dumps(long, 4))
    run(program, tmp_path, "long.pickle", "--alloc", "caching", "--plan", "off")
    opened(page, tmp_path / "report.html")
    blocks = sum(event["action"] == "alloc" for event in long["device_traces"][0])
    assert page.evaluate("document.querySelector('.panel').dataset.drawn") == str(blocks)
    assert view(page)[1] == len(long["device_traces"][0]) >= 300


def test_runs_are_drawn_from_their_records(tmp_path: Path, page: browser.Browser, program: Path) -> None:
    for name in ("naive", "caching"):
        write_run(tmp_path / name, summary(name), trace=name == "caching")
    subprocess.run([program, "report", "naive", "caching", "--plan", "off"], cwd=tmp_path, check=True)
    opened(page, tmp_path / "report.html")
    rows = page.evaluate("[...document.querySelectorAll('table.measures tbody th')].map(e => e.innerText)")
    assert rows == ["naive", "caching"]
    charts = page.evaluate(
        "[...document.querySelectorAll('figure.chart svg')].map(s => ({w: s.getBoundingClientRect().width,"
        " lines: s.querySelectorAll('polyline').length, words: s.querySelectorAll('text').length}))"
    )
    # Memory of two runs, two operations of each, losses.
    assert len(charts) == 7
    assert all(chart["w"] > 300 and chart["lines"] > 0 and chart["words"] > 2 for chart in charts), charts
    bars = page.evaluate("[...document.querySelectorAll('table.stacked .parts')].map(e => e.children.length)")
    assert len(bars) == 4
    assert min(bars) > 1
    notes = page.evaluate("[...document.querySelectorAll('.runs .note')].map(e => e.textContent).join()")
    assert "naive: The run has no recorded operations" in notes
    assert "losses of 4 steps are bit-identical" in notes
    # Only the run with events has a block map.
    assert page.evaluate("document.querySelectorAll('canvas.blocks').length") == 1
    opened(page, tmp_path / "report.html", 800)


def test_installed_packages_do_not_change_a_page(tmp_path: Path, program: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(snapshot(), 4))
    write_run(tmp_path / "run", trace=True)
    # With this environment's Python and the analysis package, and without any Python.
    for name, path in (("with", f"{Path(sys.executable).parent}:{os.environ['PATH']}"), ("without", str(tmp_path))):
        arguments = [str(program), "report", "a.pickle", "run", "--alloc", "caching", "--out", f"{name}.html"]
        subprocess.run(arguments, cwd=tmp_path, env={"PATH": path}, check=True, capture_output=True)
    assert (tmp_path / "with.html").read_bytes() == (tmp_path / "without.html").read_bytes()
