"""A board in a separate process, queried over HTTP."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.core.watch import die_with_parent

TIMEOUT_SECONDS = 60.0
# The command `paceline`, but the first list of runs waits for all metrics, however slow the machine is.
START = """
from paceline.board import gallery
from paceline.cli.start import main
gallery.FIRST_READING_SECONDS = 60.0
main()
"""


@dataclass
class Answer:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Served:
    """A running board."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.url).query)["token"][0]

    def ask(
        self,
        path: str,
        *,
        token: bool = True,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """Send one HTTP request without normalising the path, and return the response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        sent = ({"Authorization": f"Bearer {self.token}"} if token else {}) | (headers or {})
        try:
            connection.putrequest(method, path, skip_host="Host" in sent)
            for name, value in sent.items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """Request a path under /api/ and return the parsed JSON response."""
        answer = self.ask(path)
        assert answer.status == 200, answer
        return json.loads(answer.body)

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return the runs that the board lists, keyed by name."""
        return {run["name"]: run for run in self.json("/api/runs")["runs"]}

    def wait_for(self, name: str, condition: Any) -> dict[str, Any]:
        """Wait until a run meets a condition, and return the run."""
        until = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < until:
            run = self.runs().get(name)
            if run and condition(run):
                return run
            time.sleep(0.1)
        raise AssertionError(f"condition not met within {TIMEOUT_SECONDS:g} s: {self.runs().get(name)}")

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


@contextmanager
def serve(root: str | Path, *arguments: str) -> Iterator[Served]:
    """Run `paceline board ROOT` on a free port inside the `with` block, and check that it exits cleanly."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, "board", str(root), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout and process.stderr
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if not found:
        raise AssertionError(f"{line}\n{process.stderr.read()}")
    try:
        yield Served(found[0], process)
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, (process.returncode, errors)
    assert not errors, errors
