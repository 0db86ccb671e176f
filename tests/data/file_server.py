"""An HTTP server for tests. It supports range requests, records every request, and can fail."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from pathlib import Path


class FileServer:
    """Serves a folder on a free port until it is stopped."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.requests: list[str] = []  # method, path and range of each request
        self.fails = False  # whether every request gets the status 503
        handler = functools.partial(_Handler, self, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
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
        path = Path(self.translate_path(self.path))
        if self.owner.fails:
            self.send_error(503)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(content[start:stop])

    def _note(self) -> None:
        self.owner.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '-')}")
