"""An HTTP server for tests. It supports range requests, records every request, and can fail."""

from __future__ import annotations

import functools
import gzip
import http.server
import re
import threading
from contextlib import suppress
from pathlib import Path


class FileServer:
    """Serves a folder on a free port until it is stopped."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.requests: list[str] = []  # method, path and range of each request
        self.fails = False  # whether every request gets the status 503
        self.stopped = threading.Event()
        self.is_silent = False  # whether every request is left without an answer until the server stops
        self.ranges_supported = True
        self.compresses = False  # whether files are sent with gzip if the client accepts that
        self.extra_bytes = 0  # size of a shards.json that contains only spaces; 0 if there is no such file
        self.sent_bytes = 0  # how many of these bytes have been sent
        handler = functools.partial(_Handler, self, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, name: str) -> list[str]:
        """Return the ranges of a file that were requested."""
        return [line.split()[2] for line in self.requests if line.startswith(f"GET /{name} ")]


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: FileServer, *arguments: object, **options: object) -> None:
        self.owner = server
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._note()
        super().do_HEAD()

    def do_GET(self) -> None:
        self._note()
        if self.owner.is_silent:
            self.owner.stopped.wait()
            return
        path = Path(self.translate_path(self.path))
        if self.owner.fails:
            self.send_error(503)
            return
        if self.owner.extra_bytes and path.name == "shards.json":
            self._send_spaces()
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match or not path.is_file() or not self.owner.ranges_supported:
            super().do_GET()
            return
        content, is_compressed = path.read_bytes(), False
        if self.owner.compresses and "gzip" in self.headers.get("Accept-Encoding", ""):
            content, is_compressed = gzip.compress(content), True  # the range selects compressed bytes
        start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206)
        if is_compressed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(content[start:stop])

    def _send_spaces(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.owner.extra_bytes))
        self.end_headers()
        with suppress(ConnectionError):
            for _ in range(0, self.owner.extra_bytes, 2**20):
                self.wfile.write(b" " * 2**20)
                self.owner.sent_bytes += 2**20

    def _note(self) -> None:
        self.owner.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '-')}")
