"""The HTTP server for the board's page and its JSON API. It writes nothing except the notes of runs."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.board.files import UNREADABLE, Files, LocalFiles
from paceline.board.gallery import MAX_FOLDERS, Gallery
from paceline.board.guard import Guard
from paceline.board.metrics import CAPACITY, ROWS, Numbers
from paceline.board.notes import Notes, check_notes, write_notes
from paceline.board.run import Run, make_row, search, tail
from paceline.core.files import parse_json, why
from paceline.core.types import Json, JsonObject


class NoteEditor:
    """Writes the tags and notes of runs. `obstacle` is the reason why this board cannot write them; empty if it can."""

    def __init__(self, files: Files, *, allowed: bool) -> None:
        self._files, self._lock = files, threading.Lock()
        self.obstacle = ""
        if not isinstance(files, LocalFiles):
            self.obstacle = "notes can be edited only for runs in a local folder"
        elif not allowed:
            self.obstacle = "this board is read-only; start it with --edit to edit notes"

    def write(self, run: Run, content_type: str, body: bytes) -> Notes:
        """Write a run's notes from the JSON in a request; raise HTTPException if that is not possible.

        The JSON contains `tags`, `note` and `notes_version`, the version that was edited. If the notes have been
        changed since then, they are not overwritten.
        """
        files = self._files
        if self.obstacle or not isinstance(files, LocalFiles):
            raise HTTPException(403, self.obstacle)
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "expected application/json")
        try:
            content = parse_json(body)
            notes = check_notes(content)
        except ValueError as error:  # UnicodeDecodeError is a ValueError too
            raise HTTPException(400, str(error)) from None
        with self._lock:
            if content.get("notes_version", "") != run.read_notes().version:
                raise HTTPException(409, "the notes were changed in the meantime; reload the page")
            try:
                write_notes(files.root, run.folder, notes)
            except OSError as error:
                raise HTTPException(403, f"notes.json cannot be written: {why(error)}") from None
            run.notes = dataclasses.replace(notes, version=run.read_notes().version)
            run.revision += 1
        return run.notes


PAGE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MANY_FOLDERS = (
    f"only the first {MAX_FOLDERS:,} folders are searched for runs: start the board with a subfolder to see others"
)
UNREADABLE_LOG = "This log cannot be read: check the permissions of the file."
MAX_BODY_BYTES = 2**16
MAX_FIND_LENGTH = 200
UNCOMPRESSED = {"content-encoding": "identity"}  # disables gzip for content that compresses poorly


class Curve(NamedTuple):
    """A downsampled curve of one metric from one run."""

    label: JsonObject
    points: Numbers


def make_app(gallery: Gallery, token: str, host: str, port: int, editor: NoteEditor) -> Starlette:
    """Return the board's web application for a gallery of runs."""
    board = Board(gallery, editor)
    routes = [
        Route("/", board.page),
        Route("/page/{file}", board.page),
        Route("/api/runs", board.runs),
        Route("/api/series", board.series),
        Route("/api/leaderboard", board.leaderboard),
        Route("/api/runs/{run}/notes", board.write_notes, methods=["PUT"]),
        Route("/api/runs/{run}/settings", board.settings),
        Route("/api/runs/{run}/samples", board.samples),
        Route("/api/runs/{run}/image", board.sample),
        Route("/api/runs/{run}/log", board.log),
    ]
    middleware = [
        Middleware(Guard, token=token, host=host, port=port),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1),
    ]
    return Starlette(routes=routes, middleware=middleware)


class Board:
    """The request handlers: one method per route. Starlette calls those that are not `async` in a thread."""

    def __init__(self, gallery: Gallery, editor: NoteEditor) -> None:
        self.gallery, self.editor = gallery, editor
        self._page = {file.name: file.read_bytes() for file in PAGE.iterdir() if file.suffix in KINDS}

    async def page(self, request: Request) -> Response:
        """Return one of the page's static files, cached in memory."""
        name = request.path_params.get("file", "index.html")
        if name not in self._page:
            raise HTTPException(404)
        return Response(self._page[name], media_type=KINDS[Path(name).suffix], headers={"cache-control": "no-cache"})

    def runs(self, request: Request) -> Response:
        """Return every run with its state, progress and newest values.

        With `?after=N`, where N is the `sequence` of an earlier answer, return only runs that have changed since then.
        """
        self.gallery.wait_until_fresh()
        found = self.gallery.summaries(_whole(request.query_params.get("after", "0"), "after"))
        return _json(
            {
                "paceline": __version__,
                "root": self.gallery.files.shown,
                "local": self.gallery.files.local,
                "read_only": self.editor.obstacle,
                "now": time.time(),
                "refresh_seconds": self.gallery.seconds,
                "error": self.gallery.error,
                "notice": MANY_FOLDERS if self.gallery.truncated else "",
                **found._asdict(),
            }
        )

    def series(self, request: Request) -> Response:
        """Return downsampled curves, by default those of all runs and metrics.

        A query such as `?run=ID&run=ID&name=NAME&points=400` selects runs, metrics and the number of points.
        """
        runs = self._runs(request)
        at_most = _whole(request.query_params.get("points", str(CAPACITY)), "points")
        found: list[Curve] = []
        for run in runs:
            table = run.metrics.table
            with table.lock:
                for name in request.query_params.getlist("name") or list(table.series):
                    if name in table.series:
                        series = table.series[name]
                        label: JsonObject = {"run": run.identity, "name": name, "values": series.values}
                        found.append(Curve(label, series.points(at_most)))
        if request.query_params.get("format") == "binary":
            return _binary(found)
        return _json(
            {"series": [label | dict(zip(ROWS, _lists(points), strict=True)) for label, points in found]},
        )

    def leaderboard(self, request: Request) -> Response:
        """Return the results and settings of runs, by default of all runs; `?run=ID&run=ID` selects runs."""
        return _json({"rows": [make_row(run) for run in self._runs(request)]})

    async def write_notes(self, request: Request) -> Response:
        """Replace a run's tags and note; see `NoteEditor` for the conditions."""
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > MAX_BODY_BYTES:
                raise HTTPException(413, "the notes are too long")
        run = await run_in_threadpool(self._run, request.path_params["run"])
        notes = await run_in_threadpool(self.editor.write, run, request.headers.get("content-type", ""), content)
        return _json({"tags": list(notes.tags), "note": notes.text, "notes_version": notes.version})

    def settings(self, request: Request) -> Response:
        """Return a run's settings, versions and hardware."""
        return _json(self._run(request.path_params["run"]).settings())

    def samples(self, request: Request) -> Response:
        """Return how many images a run had seen each time it saved sample images, and the size of its real images."""
        run = self._run(request.path_params["run"])
        return _json({"samples": run.samples(), "real_bytes": run.real_bytes()})

    def sample(self, request: Request) -> Response:
        """Return one sample image, selected by a query such as `?name=samples&images=5120`."""
        run = self._run(request.path_params["run"])
        images = _whole(request.query_params.get("images", ""), "images")
        try:
            content = run.sample(request.query_params.get("name", ""), images)
        except OSError:
            raise HTTPException(404, "no such image") from None
        return Response(
            content, media_type="image/png", headers=UNCOMPRESSED | {"cache-control": "private, max-age=60"}
        )

    def log(self, request: Request) -> Response:
        """Return the end of a rank's log, selected by a query such as `?rank=0`.

        With `&find=TEXT`, return the lines in the log that contain a text.
        """
        run = self._run(request.path_params["run"])
        logs = run.logs()
        rank = _whole(request.query_params.get("rank", "0"), "rank")
        answer: JsonObject = {"ranks": list(logs), "rank": rank}
        wanted = request.query_params.get("find", "").strip()[:MAX_FIND_LENGTH]
        if rank not in logs:
            return _json(answer | {"text": ""})
        try:
            if not wanted:
                return _json(answer | {"text": tail(run.files, logs[rank])})
            found = search(run.files, logs[rank], wanted)
        except UNREADABLE:
            return _json(answer | {"text": UNREADABLE_LOG})
        matches: list[Json] = [{"line": line, "text": text} for line, text in found.matches]
        return _json(answer | {"matches": matches, "total": found.total, "searched_share": found.searched_share})

    def _runs(self, request: Request) -> list[Run]:
        """Return the runs that a query selects with `run=ID`, or all runs."""
        return [self._run(one) for one in request.query_params.getlist("run")] or list(self.gallery.runs.values())

    def _run(self, identity: str) -> Run:
        if not self.gallery.runs:
            self.gallery.wait_until_fresh()
        run = self.gallery.runs.get(identity)
        if run is None:
            raise HTTPException(404, "no such run")
        return run


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise HTTPException(400, f"{name}: expected an integer")
    return int(text)


def _lists(points: Numbers) -> list[list[float | None]]:
    return [[number if math.isfinite(number) else None for number in row] for row in points.tolist()]


def _json(content: object) -> Response:
    """Return a JSON response in ASCII: text in a run's files may contain characters that UTF-8 cannot encode."""
    return Response(json.dumps(content, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _binary(found: list[Curve]) -> Response:
    """Return curves in the binary format that the page reads.

    It contains the length of a JSON header, the header, and the rows of each curve as float32 numbers.
    """
    labels = [label | {"points": points.shape[1]} for label, points in found]
    header = json.dumps({"rows": ROWS, "series": labels}).encode()
    header += b" " * (-len(header) % 4)  # aligns the numbers to 4 bytes, as a Float32Array requires
    numbers = b"".join(np.ascontiguousarray(points, dtype="<f4").tobytes() for _, points in found)
    content = len(header).to_bytes(4, "little") + header + numbers
    return Response(content, media_type="application/octet-stream", headers=UNCOMPRESSED)
