"""Where a mirror is: a URL that fsspec supports, or one that a package adds.

A package adds a kind of URL through the entry point group `paceline.mirrors`: the name is the URL's scheme, the object
is called with the URL and returns a `Destination`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from paceline.core.errors import UserError, install_extra
from paceline.core.secrets import has_credentials, redact

GROUP = "paceline.mirrors"
EXTRAS = {"s3": "s3", "s3a": "s3"}  # of this package, by scheme
# File systems where readers can see a file that is being written: files are written under a temporary name and moved.
OF_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
WRITING = ".writing"


class Destination(Protocol):
    """A remote folder. Names are relative to it, with slashes; every failure is raised."""

    def send(self, file: Path, name: str) -> None:
        """Upload a file under a name, whole or not at all; what had the name before is replaced."""

    def fetch(self, name: str, file: Path) -> None:
        """Download a file into a new local file; raise FileNotFoundError where nothing has the name."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file under a folder, by name; empty where there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove a file; one that does not exist is no error."""


def open_destination(url: str, flag: str) -> Destination:
    """Return the destination behind a URL without connecting to it. `flag` is where the URL was given."""
    if has_credentials(url):
        raise UserError(
            f"{flag} {redact(url)}: holds a credential: pass it through the environment or the service's own file"
        )
    scheme = url.partition("://")[0] if "://" in url else ""
    for entry in entry_points(group=GROUP):
        if entry.name == scheme:
            try:
                destination: Destination = entry.load()(url)
                return destination
            except ImportError as error:
                raise UserError(f"{flag} {url}: {entry.value} cannot be imported: {error}") from error
    return FsspecDestination(*open_file_system(url, f"{flag} {url}"))


def open_file_system(url: str, shown: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it; raise UserError where there is none."""
    import fsspec

    if "::" in url:
        raise UserError(f"{redact(shown)}: give one URL, not a chain of them")
    try:
        found: tuple[Any, str] = fsspec.url_to_fs(url, use_listings_cache=False)
        return found
    except ImportError as error:
        extra = EXTRAS.get(url.partition("://")[0])
        install = install_extra(extra) if extra else str(error)
        raise UserError(f"{redact(shown)}: a package is missing: {install}") from None
    except ValueError as error:
        raise UserError(f"{redact(shown)}: {redact(str(error))}") from None


class FsspecDestination:
    """A folder behind a URL that fsspec supports."""

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
        return {place[start:]: int(details["size"] or 0) for place, details in found.items()}

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(self._place(name))
        except FileNotFoundError:
            return

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"
