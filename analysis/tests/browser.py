"""A headless Chromium, spoken to over its own debugging pipe: no driver and no package in between.

How long pages of `vramlab report` take from navigation to their first complete drawing, five times each, is printed by
python3 -m tests.browser PAGE.html... (in analysis/).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The small build has no network prediction, which opens connections of its own; the whole browser has it.
SMALL = ("chromium-headless-shell", "chrome-headless-shell")
WHOLE = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
NAMES = SMALL + WHOLE


def find(names: tuple[str, ...] = NAMES) -> str | None:
    """The program: CHROMIUM, where it is one of these, or the first of them that PATH has."""
    named = os.environ.get("CHROMIUM")
    if named and (names == NAMES or (Path(named).name in SMALL) == (names == SMALL)):
        return named
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser. Collects console messages and requested addresses."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()

        def connect() -> None:
            # The protocol is spoken over descriptors 3 and 4.
            spare_in, spare_out = os.dup2(to_browser, 100), os.dup2(from_browser, 101)
            os.dup2(spare_in, 3)
            os.dup2(spare_out, 4)

        arguments = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                     "--disable-background-networking", "--disable-component-update", "--disable-sync",
                     "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1100,900",
                     f"--user-data-dir={self.profile.name}", "about:blank"]  # fmt: skip
        self.process = subprocess.Popen(
            [program, *arguments],
            close_fds=False,
            preexec_fn=connect,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer = b""
        self.number = 0
        self.console: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            piece = os.read(self.read, 1 << 16)
            if not piece:
                raise RuntimeError(f"Chromium ended with exit code {self.process.wait(10)}")
            self.buffer += piece
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if hasattr(self, "session"):
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(self, url: str, ready: str, patience_s: float = 60.0) -> None:
        """Opens a page and waits until the script `ready` returns true."""
        self.call("Page.navigate", url=url)
        end = time.monotonic() + patience_s
        while not self.evaluate(ready):
            if time.monotonic() > end:
                raise RuntimeError(f"{url}: not ready after {patience_s:.0f} s; console: {self.console}")
            time.sleep(0.1)

    def picture(self, path: Path) -> None:
        import base64

        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12_000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self.write)
        os.close(self.read)
        self.profile.cleanup()


def opened(names: tuple[str, ...] = NAMES) -> Iterator[Browser]:
    """For a fixture: a browser, closed at the end. Where there is none the test is skipped; where there is none of any
    name, it fails on CI.
    """
    program = find(names)
    if program is None:
        said = (
            f"no Chromium on this machine (looked for {', '.join(names)}; CHROMIUM may name it), so the page was NOT "
            f"opened in this browser. On Debian: apt-get install {names[0]}"
        )
        if os.environ.get("CI") and find() is None:
            pytest.fail(said)
        print(f"\nWARNING: {said}")
        pytest.skip(said)
    browser = Browser(program)
    yield browser
    browser.close()


def main(pages: list[str], times: int = 5) -> None:
    """Opens each page several times and prints the time of its first drawing."""
    program = find()
    if program is None or not pages:
        sys.exit("error: name pages of `vramlab report`, and have Chromium on this machine (CHROMIUM names it)")
    browser = Browser(program)
    for page in pages:
        path, first = Path(page).resolve(), []
        for _ in range(times):
            browser.open(path.as_uri(), "document.documentElement?.dataset.ready === 'yes'")
            first.append(int(browser.evaluate("document.documentElement.dataset.first")))
        print(f"{page}: {path.stat().st_size / 1e6:.1f} MB, drawn after {min(first)} to {max(first)} ms")
    browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
