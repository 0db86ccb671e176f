"""Gives requests precedence over reading metrics, because one Python interpreter does both, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

PATIENCE_SECONDS = 0.1  # longest pause for requests before the next chunk of metrics is read
PAGE_SECONDS = 0.4  # how long reading pauses after the page is opened, while the browser needs the CPU


class Requests:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self.newest = time.monotonic()  # when the newest request began
        self._num, self._ended = 0, threading.Condition()
        self._opening_until = 0.0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.newest = time.monotonic()
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count a request while the block runs, because the request waits for the files to be read."""
        self._change(-1)
        try:
            yield
        finally:
            self._change(1)

    def note_opening(self) -> None:
        """Record that the page is being opened."""
        self._opening_until = time.monotonic() + PAGE_SECONDS

    def let_pass(self) -> None:
        """Wait until no request is being answered, but not for long."""
        with self._ended:
            self._ended.wait_for(lambda: self._num <= 0, timeout=PATIENCE_SECONDS)
        time.sleep(max(0.0, self._opening_until - time.monotonic()))

    def _change(self, by: int) -> None:
        with self._ended:
            self._num += by
            self._ended.notify_all()


class CountRequests:
    """ASGI middleware that counts requests while they are being answered."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._requests.answering():
            await self._app(scope, receive, send)
