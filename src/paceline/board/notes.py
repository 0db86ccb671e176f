"""The tags and the note that a user gives to a run, stored in the file notes.json in the run's folder.

The board is the only program that writes the file. It replaces the file as a whole and follows no symbolic
links, because a run folder may come from an untrusted source.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.files import WRITING, json_text, parse_json, sync_open
from paceline.core.text import printable, printable_lines
from paceline.core.types import Json

NOTES = "notes.json"
MAX_TAGS = 20
MAX_TAG_LENGTH = 40
MAX_NOTE_LENGTH = 4000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Notes:
    """A run's tags and note. `version` identifies the content of the file; it is empty if there is no file."""

    tags: tuple[str, ...] = ()
    text: str = ""
    version: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Notes:
        """Parse a notes file; parts that are too long or of the wrong type are left out."""
        version = hashlib.sha256(content).hexdigest()[:16]
        try:
            read = parse_json(content)
        except ValueError:
            return cls(version=version)
        kept: dict[str, Json] = read if isinstance(read, dict) else {}
        tags, note = kept.get("tags"), kept.get("note")
        words = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        text = printable_lines(note)[:MAX_NOTE_LENGTH] if isinstance(note, str) else ""
        return cls(tuple(printable(word)[:MAX_TAG_LENGTH] for word in words[:MAX_TAGS]), text, version)

    def to_json(self) -> bytes:
        """Return the content of the notes file."""
        return (json_text({"tags": list(self.tags), "note": self.text}, indent=1) + "\n").encode()


def check_notes(content: Json) -> Notes:
    """Return the notes in a request; raise ValueError with the reason if they are not valid."""
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object with tags and note")
    tags, note = content.get("tags"), content.get("note")
    if not isinstance(tags, list) or not isinstance(note, str):
        raise ValueError("expected tags (a list of strings) and note (a string)")
    words: dict[str, None] = {}
    for tag in tags:
        if not isinstance(tag, str) or not tag.strip() or len(tag.split()) != 1 or not tag.isprintable():
            raise ValueError("a tag must be one word without control characters")
        if len(tag.strip()) > MAX_TAG_LENGTH:
            raise ValueError(f"a tag can have at most {MAX_TAG_LENGTH} characters")
        words[tag.strip()] = None
    if len(words) > MAX_TAGS:
        raise ValueError(f"a run can have at most {MAX_TAGS} tags")
    if len(note) > MAX_NOTE_LENGTH:
        raise ValueError(f"a note can have at most {MAX_NOTE_LENGTH} characters")
    return Notes(tuple(words), printable_lines(note.replace("\r\n", "\n")).strip())


def write_notes(root: Path, folder: str, notes: Notes) -> None:
    """Replace the notes file of the run in `folder`, a path relative to `root`; follow no symbolic link below `root`.

    Raise OSError if the file cannot be written.
    """
    parts = Path(folder).parts
    if ".." in parts:
        raise FileNotFoundError(folder)
    opened = os.open(root, _FOLDER)
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=opened)
            os.close(opened)
            opened = inner
        _replace(opened, NOTES, notes.to_json())
    finally:
        os.close(opened)


def _replace(folder: int, name: str, content: bytes) -> None:
    temporary = f".{secrets.token_hex(8)}{WRITING}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o644, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            sync_open(stream.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
