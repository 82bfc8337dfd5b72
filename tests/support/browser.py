"""A headless Chromium, controlled over a pipe (the DevTools protocol), for tests.

with Browser.start(tmp_path) as browser:
    page = browser.open(file)
    page.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60


def find_chromium() -> str | None:
    """Return the path of a Chromium; None when there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running browser; one page at a time."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, from_: int) -> None:
        self._process, self._to, self._from = process, to, from_
        self._number, self._rest = 0, b""
        self._session = ""
        self.events: list[dict[str, Any]] = []

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[Browser]:
        """Run a browser with a profile of its own in a folder, until the block ends."""
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        command = [
            find_chromium() or "",
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
        ]
        # it reads from 3 and writes to 4; bash moves our ends there
        moved = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["bash", "-c", moved, "bash", *command],
            pass_fds=(their_in, their_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(their_in)
        os.close(their_out)
        browser = cls(process, our_out, our_in)
        try:
            yield browser
        finally:
            try:
                browser._session = ""
                browser.call("Browser.close")
            except (OSError, AssertionError):
                process.terminate()
            process.wait(PATIENCE_S)
            os.close(our_out)
            os.close(our_in)

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Send one command and return its result; what happens meanwhile goes to `events`."""
        self._number += 1
        reported = {"id": self._number, "method": method, "params": values}
        if self._session:
            reported["sessionId"] = self._session
        os.write(self._to, json.dumps(reported).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(
        self, file: Path, width: int = 1280, height: int = 900, hash_: str = "", wait: bool = True
    ) -> None:
        """Open a file in a new page and wait until it is drawn."""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")
        self.resize(width, height)
        self.call("Page.navigate", url=file.resolve().as_uri() + hash_)
        if wait:
            self.wait_until(
                "document.readyState === 'complete' && 'ready' in document.documentElement.dataset"
            )

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Give the page a window of so many pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def set_color_scheme(self, theme: str) -> None:
        """Let the system prefer "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.wait_for_frame()

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def wait_for_frame(self) -> None:
        """Wait until the page has drawn its next frame."""
        self.evaluate("new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))")

    def send_mouse_event(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send one event of the mouse: mousePressed, mouseMoved, mouseReleased, mouseWheel."""
        buttons = {"button": "left", "clickCount": 1} if kind != "mouseWheel" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**buttons, **more})

    def drag(self, start: tuple[float, float], end: tuple[float, float], **more: Any) -> None:
        """Press, move and let go."""
        self.send_mouse_event("mousePressed", *start, **more)
        for part in (0.3, 0.7, 1.0):
            at = [a + (b - a) * part for a, b in zip(start, end)]
            self.send_mouse_event("mouseMoved", *at, buttons=1, **more)
        self.send_mouse_event("mouseReleased", *end, **more)
        self.wait_for_frame()

    def press_key(self, key: str, **more: Any) -> None:
        """Press one key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **more)
        self.wait_for_frame()

    def save_screenshot(self, file: Path, whole: bool = True) -> None:
        """Save the page as a PNG file."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(taken["data"]))

    def save_pdf(self, file: Path) -> None:
        """Print the page to a PDF file."""
        printed = self.call("Page.printToPDF", printBackground=False)
        file.write_bytes(base64.b64decode(printed["data"]))

    def list_errors(self) -> list[str]:
        """Return the page's errors so far: exceptions, violations of the policy, failed loads."""
        self.evaluate("0")
        collected = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                collected.append(json.dumps(event["params"]["exceptionDetails"])[:400])
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                collected.append(event["params"]["entry"]["text"])
        return collected

    def read_cpu_s(self) -> float:
        """Return the CPU time that the page's main thread has taken."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return float({metric["name"]: metric["value"] for metric in metrics}["TaskDuration"])

    def list_requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            got = os.read(self._from, 1 << 20)
            assert got, "the browser ended"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        content: dict[str, Any] = json.loads(message)
        return content
