"""Mirror destinations: URLs that fsspec supports, and URLs that other packages add.

A package adds a URL scheme through the entry point group `paceline.mirrors`. The name of the entry point is the scheme.
The object that it refers to is called with the URL and returns a `Destination`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import UserError
from paceline.core.file_systems import open_file_system
from paceline.core.secrets import has_credentials, one_line, redact

GROUP = "paceline.mirrors"
# On these file systems, readers can see a partly written file. So a file is renamed to its final name after writing.
OF_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
WRITING = ".writing"


class Destination(Protocol):
    """A remote folder. File names are relative to it and use slashes. Every failure raises an exception."""

    def send(self, file: Path, name: str) -> None:
        """Upload a file atomically, replacing any existing file with the same name."""

    def fetch(self, name: str, file: Path) -> None:
        """Download a file to a new local file; raise FileNotFoundError if it does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file under a folder, by name; empty if there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


def open_destination(url: str, flag: str) -> Destination:
    """Return the destination for a URL, without connecting to it; `flag` is the option that set the URL."""
    if has_credentials(url):
        raise UserError(
            f"{flag} {redact(url)}: contains a credential: use an environment variable or the service's config file"
        )
    scheme = url.partition("://")[0] if "://" in url else ""
    for entry in entry_points(group=GROUP):
        if entry.name == scheme:
            try:
                destination: Destination = entry.load()(url)
            except UserError:
                raise
            except ImportError as error:
                raise UserError(f"{flag} {url}: {entry.value} cannot be imported: {error}") from error
            except (Exception, SystemExit) as error:  # the plugin's code may raise any exception
                raise UserError(f"{flag} {url}: {entry.value}: {one_line(error)}; correct the plugin") from error
            if destination is None:
                raise UserError(f"{flag} {url}: {entry.value} returns None; return a destination")
            return destination
    return FsspecDestination(*open_file_system(url, f"{flag} {url}"))


class FsspecDestination:
    """A folder at a URL that fsspec supports."""

    def __init__(self, file_system: Any, root: str) -> None:
        self._files, self._root = file_system, root.rstrip("/")
        protocols = file_system.protocol
        self._of_folders = bool(OF_FOLDERS & set([protocols] if isinstance(protocols, str) else protocols))

    def send(self, file: Path, name: str) -> None:
        place = self._place(name)
        if not self._of_folders:
            self._files.put_file(str(file), place)
            return
        self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), place + WRITING)
        self._files.mv(place + WRITING, place)

    def fetch(self, name: str, file: Path) -> None:
        self._files.get_file(self._place(name), str(file))

    def sizes(self, folder: str) -> dict[str, int]:
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._place(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = len(self._root) + 1
        files = {place: details for place, details in found.items() if details.get("type", "file") == "file"}
        return {place[start:]: int(details["size"] or 0) for place, details in files.items()}

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(self._place(name))
        except FileNotFoundError:
            return

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"
