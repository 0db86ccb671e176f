"""Headless Chromium, controlled over a pipe with the DevTools protocol. This needs no port, driver or package."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.core.watch import die_with_parent

TIMEOUT_SECONDS = 60.0
KEY_CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


def find_chromium() -> str | None:
    """Return the path to Chromium, or None if it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A headless Chromium with one page."""

    def __enter__(self) -> Browser:
        path = find_chromium()
        assert path
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-chromium-", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def wire() -> None:  # Chromium reads commands from file descriptor 3 and writes responses to file descriptor 4
            die_with_parent()
            reading, writing = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (to_browser, from_browser))
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        words = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        words += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--mute-audio"]
        words += [f"--user-data-dir={self._folder.name}", "--window-size=1400,900", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [path, *words, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=wire,
            close_fds=False,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._unread, self._session = 0, b"", None
        pages = self._call("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        self.errors: list[str] = []
        self._call("Runtime.enable")
        self._call("Log.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def open(self, url: str) -> None:
        """Navigate to a page, and wait until its elements exist."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression on the page, await it if it is a promise, and return its value."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Evaluate a JavaScript expression until it is truthy and return its value."""
        until = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < until:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"not true within {TIMEOUT_SECONDS:g} s: {expression}")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the page; a width below 600 pixels also emulates a touch screen."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setTouchEmulationEnabled", enabled=width < 600)

    def prefer(self, scheme: str) -> None:
        """Set the colour scheme that the user prefers, `light` or `dark`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def mouse(self, kind: str, x: float, y: float, **details: Any) -> None:
        """Send a mouse event such as `mouseMoved`."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **details)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse with the left button pressed."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        self.mouse("mouseMoved", *end, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key such as `Enter`; `text` is the character that it types."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=KEY_CODES.get(key, 0), **typed
            )

    def save_downloads_to(self, folder: Path) -> None:
        """Save downloads to a folder."""
        session, self._session = self._session, None
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self._session = session

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        while True:
            answer = self._read()
            self._note_error(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _note_error(self, event: dict[str, Any]) -> None:
        """Record uncaught exceptions and errors on the console, except for requests that failed."""
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.errors.append(json.dumps(details["args"]))
        elif method == "Log.entryAdded":
            entry = details["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.errors.append(json.dumps(entry))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._in, 2**20)
            assert part, "Chromium exited"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)
