"""Hostile records: for every value of a field a reader ends with a page, a table or one error, and no script runs."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser
from tests.conftest import summary, write_experiment, write_run
from tests.hostile import HOSTILE, WRONG, mutations, places, poisoned, replaced
from tests.test_history_page import READY, built
from vramlab_analysis import __main__ as cli
from vramlab_analysis import calls, histograms, histories, losses, records, steps
from vramlab_analysis.errors import AnalysisError, printable
from vramlab_analysis.experiments import results
from vramlab_analysis.measures import measures
from vramlab_analysis.plots import latency

ROOT = Path(__file__).resolve().parents[2]
RECORDED = results("where-time-goes", "sim").select(alloc="naive")[0].path


def one_line(error: AnalysisError) -> None:
    """The error is one line without control characters."""
    assert printable(str(error)) == str(error)


def recorded() -> dict[str, object]:
    document: dict[str, object] = json.loads((RECORDED / "summary.json").read_text())
    return document


def ends_well(folder: Path) -> bool:
    """Whether the record is accepted; every command that reads it ends with an error or with its output."""
    try:
        run = records.load_run(folder)
    except AnalysisError as error:
        one_line(error)
        return False
    try:
        measures(run)
        calls.account(run)
    except AnalysisError as error:
        one_line(error)
    for show in (steps.show, losses.show):
        for as_json in (False, True):
            try:
                json.dumps(show([str(folder)], as_json=as_json)).encode()
            except AnalysisError as error:
                one_line(error)
    return True


def test_every_field_of_a_summary_mutated(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trace=True)
    tried = taken = 0
    for name, text in mutations(summary()):
        (folder / "summary.json").write_text(text)
        try:
            taken += ends_well(folder)
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
        tried += 1
    # Most of what is wrong is refused; what no reader looks at is left alone.
    assert tried > 2000
    assert 0 < taken < tried / 2


def test_every_field_of_a_recorded_summary_mutated(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    shutil.copy(RECORDED / "steps.csv", folder)
    document = recorded()
    for at, _ in list(places(document)):
        for kind in ("null", "text", "huge", "deep"):
            (folder / "summary.json").write_text(json.dumps(replaced(document, at, WRONG[kind])))
            try:
                ends_well(folder)
            except Exception as error:
                pytest.fail(f"{at} {kind}: {type(error).__name__}: {error}")


@pytest.mark.parametrize("file", ["experiment.json", "runs/00-caching-r0/run.json"])
def test_every_field_of_an_experiment_mutated(tmp_path: Path, file: str) -> None:
    folder = write_experiment(
        tmp_path / "e", [("caching", {"hidden": 64}, summary("caching"))], runs=[{"id": "00-caching-r0"}, "01-r0"]
    )
    whole = json.loads((folder / file).read_text())
    refused = 0
    for name, text in mutations(whole):
        (folder / file).write_text(text)
        try:
            steps.gather([str(folder)])
        except AnalysisError as error:
            one_line(error)
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {type(error).__name__}: {error}")
    assert refused


@pytest.mark.parametrize("file", ["trace.jsonl", "driver_calls.jsonl"])
def test_every_field_of_a_line_mutated(tmp_path: Path, file: str) -> None:
    folder = write_run(tmp_path / "run", trace=True)
    lines = (folder / file).read_text().splitlines()
    taken = 0
    for place in (0, 1, len(lines) - 1):
        for name, text in mutations(json.loads(lines[place])):
            (folder / file).write_text("\n".join([*lines[:place], text, *lines[place + 1 :]]) + "\n")
            run = records.load_run(folder)
            try:
                histories.levels(run.trace)
                histories.lives(run.trace)
                histories.segments(run.calls)
                histories.reserved(run.calls)
                taken += 1
            except AnalysisError as error:
                one_line(error)
            except Exception as error:
                pytest.fail(f"{name}: {type(error).__name__}: {error}")
    assert taken


@pytest.mark.parametrize("value", ["", "x", "-1", "nan", "inf", "1e308", "9" * 30, "9007199254740993", '"', HOSTILE])
def test_every_cell_of_the_steps_mutated(tmp_path: Path, value: str) -> None:
    folder = write_run(tmp_path / "run", trace=True)
    rows = [line.split(",") for line in (folder / "steps.csv").read_text().splitlines()]
    for row, column in ((r, c) for r in range(len(rows)) for c in range(len(rows[0]))):
        changed = [list(line) for line in rows]
        changed[row][column] = value.replace("\ud800", "").replace("\x00", "")
        (folder / "steps.csv").write_text("\n".join(",".join(line) for line in changed) + "\n")
        try:
            ends_well(folder)
        except Exception as error:
            pytest.fail(f"row {row}, column {rows[0][column]}: {type(error).__name__}: {error}")


def test_histograms_cut_and_changed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    log = folder / "latency.hlog"
    text = log.read_text()
    for at in range(0, len(text), 7):
        for changed in (text[:at], text[:at] + "~" + text[at + 1 :], text[:at] + "A" + text[at + 1 :]):
            log.write_text(changed)
            try:
                run = records.load_run(folder)
                latency.spectrum(histograms.spectrum(run.histograms))
            except AnalysisError as error:
                one_line(error)
            except Exception as error:
                pytest.fail(f"at {at}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": [1]}, "epochs[0]"),
        ({"device": {}}, "device.name: is missing"),
        ({"step_losses": None}, "step_losses"),
        ({"step_losses": "../../other"}, "step_losses"),
    ],
)
def test_error_of_a_command_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    said: str,
) -> None:
    folder = write_run(tmp_path / "run", summary())
    (folder / "summary.json").write_text(json.dumps(summary() | changes))
    for command in (["steps"], ["losses"]):
        monkeypatch.setattr(sys, "argv", ["vramlab-analysis", *command, str(folder)])
        assert cli.main() == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert said in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "[NaN]", "1e999", "9" * 5000, '"\\ud800"', "\xff"])
def test_other_contents_than_a_document_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(sys, "argv", ["vramlab-analysis", "steps", str(folder)])
    assert cli.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_message_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a\x1b]0;title\x07\x1b[2J\u202eb"
    monkeypatch.setattr(sys, "argv", ["vramlab-analysis", "steps", str(folder)])
    assert cli.main() == 2
    error = capsys.readouterr().err
    assert "\\x1b]0;title\\x07" in error
    assert printable(error.rstrip("\n")) == error.rstrip("\n")


def hostile_run(folder: Path) -> Path:
    """A record in which every string is hostile, but for the version, the name of a file, and half characters."""
    write_run(folder)
    told = poisoned(summary("caching"), frozenset({"step_losses", "operation"}))
    for where in (told, *told["epochs"]):
        where["driver_calls"] = {name + HOSTILE: one for name, one in where["driver_calls"].items()}
    told["settings"]["allocator_settings"] = {"an option" + HOSTILE: HOSTILE}
    (folder / "summary.json").write_text(json.dumps(told).replace("\\ud800", ""))
    log = (folder / "latency.hlog").read_text()
    tag = HOSTILE.replace("\ud800", "").replace("\x00", "").replace(",", "")
    (folder / "latency.hlog").write_text(log.replace("deallocate.hit", f"deallocate.hit{tag}"))
    return folder


def report(out: Path, *folders: Path) -> None:
    subprocess.run([built(), "report", *folders, "--out", out], check=True, capture_output=True)


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Browser]:
    yield from browser.opened()


def test_strings_of_a_record_are_escaped_in_the_page(tmp_path: Path, page: browser.Browser) -> None:
    first = hostile_run(tmp_path / "'\"><img src=x onerror=window.hacked=4>")
    second = hostile_run(tmp_path / "<script>window.hacked=5<")
    out = tmp_path / "report.html"
    report(out, first, second)
    page.console.clear()
    page.asked.clear()
    page.open(out.as_uri(), READY)
    assert page.console == []
    assert page.asked == [out.as_uri()]
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert page.evaluate("document.querySelectorAll('img, iframe, object, embed, form, base').length") == 0
    # No policy stops a link that connects or a refresh that navigates: all of these are the template's.
    assert page.evaluate("document.querySelectorAll('meta').length") == 3
    assert page.evaluate("[...document.querySelectorAll('link')].map(e => e.rel).join()") == "icon"
    handlers = (
        "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => a.name.startsWith('on'))"
    )
    assert page.evaluate(f"{handlers}.length") == 0
    # It is there, as text: in the table, in the settings and in the legend of latencies.
    script = "<script>window.hacked=1</script>"
    for place in ("table.measures tbody th", "details td", ".legend.charted"):
        assert script in page.evaluate(f"[...document.querySelectorAll('{place}')].map(e => e.textContent).join()")


class Outside(http.server.ThreadingHTTPServer):
    """A server that a page must not connect to: counts connections and requests."""

    def __init__(self) -> None:
        self.connected = 0
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Asked)

    def process_request(self, request: object, client_address: object) -> None:
        self.connected += 1
        super().process_request(request, client_address)  # type: ignore[arg-type]


class Asked(http.server.BaseHTTPRequestHandler):
    """Notes each request, and answers that there is nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module", params=[browser.SMALL, browser.WHOLE], ids=["headless-shell", "whole-browser"])
def either(request: pytest.FixtureRequest) -> Iterator[browser.Browser]:
    yield from browser.opened(request.param)


def test_content_policy_stops_unescaped_scripts(tmp_path: Path, either: browser.Browser) -> None:
    page, out = either, tmp_path / "report.html"
    report(out, write_run(tmp_path / "run"))
    with Outside() as outside:
        threading.Thread(target=outside.serve_forever, daemon=True).start()
        there = f"http://127.0.0.1:{outside.server_port}"
        loading = (
            f"<script>window.hacked=1</script><img src='x' onerror='window.hacked=2'><img src='{there}/p'>"
            f"<style>@import '{there}/c'; body {{ display: none }}</style>"
            f"<script src='{there}/s'></script><base href='{there}/'><link rel='stylesheet' href='{there}/l'>"
            f"<script type='module'>import('{there}/m')</script><object data='{there}/o'></object>"
            f"<link rel='prefetch' href='{there}/n'><video src='{there}/v'></video>"
        )
        framed = f"{loading}<iframe src='{there}/f'></iframe>"
        text, main = out.read_text(), '<main id="page">'
        for injected in (loading, framed):
            out.write_text(text.replace(main, main + injected, 1))
            page.open(out.as_uri(), READY)
            assert page.evaluate("typeof window.hacked") == "undefined"
            assert page.evaluate("getComputedStyle(document.body).display") == "block"
            assert outside.asked == []
            # The whole browser connects to a frame's server before it asks the policy, and then sends nothing.
            assert not outside.connected or injected == framed
        # Without the policy all of it would have happened.
        out.write_text(re.sub("<meta http-equiv[^>]*>", "", text).replace(main, main + framed, 1))
        page.open(out.as_uri(), READY)
        assert page.evaluate("typeof window.hacked") == "number"
        assert {"/p", "/c", "/s", "/l", "/f"} <= set(outside.asked)
        outside.shutdown()
    page.open("about:blank", "true")
    page.console.clear()
