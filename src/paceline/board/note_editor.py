"""Whether tags and notes may be edited, and the checks before they are written."""

from __future__ import annotations

import dataclasses
import threading

from starlette.exceptions import HTTPException

from paceline.board.files import Files, LocalFiles
from paceline.board.notes import Notes, check_notes, write_notes
from paceline.board.run import Run
from paceline.core.small_files import parse_json, why


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
