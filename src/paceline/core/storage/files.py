"""Lists and reads files under one root: a local folder, or a URL that fsspec supports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.core.errors import UserError, install_extra
from paceline.core.files import user_path
from paceline.core.text import one_line, print_line, printable, redact

CLIENT_ERRORS = range(400, 500)  # HTTP status codes for requests that the server rejects
RETRIED_STATUS = (408, 425, 429)  # client errors that may not recur
MISSING_STATUS = (404, 410)
DENIED_STATUS = (401, 403, 407)


def cause_of(error: Exception) -> Exception:
    """Return the exception behind a FileNotFoundError that fsspec raised because an HTTP server did not answer.

    A FileNotFoundError with another cause, such as S3's NoSuchKey, is returned as it is: the file is missing.
    """
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    is_answer = getattr(cause, "status", None) in MISSING_STATUS
    is_connection = isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if isinstance(cause, Exception) and is_connection and not is_answer else error


def is_lasting(error: Exception) -> bool:
    """Return whether an error will probably recur: a missing file, wrong credentials, or an HTTP client error."""
    status = getattr(error, "status", None)
    if status in CLIENT_ERRORS:
        return status not in RETRIED_STATUS
    return isinstance(error, (FileNotFoundError, PermissionError)) or type(error).__name__ == "NoCredentialsError"


def unreadable(shown: str, error: Exception) -> UserError:
    """Return the message for files that cannot be read; `shown` is their location, without credentials."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError):
        what, remedy = "not found", "check that the bucket and the files exist"
    elif (
        isinstance(error, PermissionError)
        or type(error).__name__ == "NoCredentialsError"
        or getattr(error, "status", None) in DENIED_STATUS
    ):
        what, remedy = "access denied", "check the credentials in your environment, and the permissions"
    else:
        what, remedy = "cannot be read", "check the URL and the server, then run the same command again to resume"
    return UserError(f"{shown}: {what} ({one_line(error)}); {remedy}")


ANSWER_SECONDS = 30.0  # how long an HTTP server may send nothing; s3fs has limits of its own
REQUEST_SECONDS = 3600.0
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}  # extra to install for each URL scheme


def _options(url: str) -> dict[str, Any]:
    """Return options for HTTP: no compression, because ranges would refer to compressed bytes, and time limits.

    For S3, s3fs alone repeats requests. If botocore did, too, a silent server would be reported minutes later.
    """
    if url.startswith(("s3://", "s3a://")):
        return {"config_kwargs": {"retries": {"max_attempts": 0}}}
    if not url.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout

    limits = ClientTimeout(total=REQUEST_SECONDS, sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
    return {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": limits}}


def open_file_system(url: str, shown: str) -> tuple[Any, str]:
    """Return the fsspec file system and the path for a URL; raise UserError if fsspec does not support it."""
    import fsspec

    if "::" in url:
        raise UserError(f"{redact(shown)}: chained URLs are not supported: use a single URL")
    try:
        found: tuple[Any, str] = fsspec.url_to_fs(url, use_listings_cache=False, **_options(url))
        return found
    except ImportError as error:
        extra = EXTRAS.get(url.partition("://")[0])
        install = install_extra(extra) if extra else str(error)
        raise UserError(f"{redact(shown)}: a package is missing: {install}") from None
    except ValueError as error:
        raise UserError(f"{redact(shown)}: {redact(str(error))}") from None


PARALLEL_REQUESTS = 16
MAX_GAP_BYTES = 2**12  # a label and its image, with their tar headers, are closer
MAX_GROUP_BYTES = 2**20
MAX_DEPTH = 4  # levels of folders that are searched at a URL; local folders have no limit
OPENING_SECONDS = 15.0  # how long to retry when a source is opened
GONE_SECONDS = 15.0  # how long to retry if a file is missing during training: a restarting server may not find it yet
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
Result = TypeVar("Result")


class Span(NamedTuple):
    """A range of bytes [start, stop) in a file."""

    place: str  # path of the file in its storage
    start: int
    stop: int


class StoredFile(NamedTuple):
    """A file in storage."""

    name: str  # path relative to the root, with slashes
    place: str  # path in the storage
    size: int
    version: str  # changes if the file is replaced: an ETag or a modification time


class Storage:
    """Files under a root. The connection is opened again in each process, because it does not survive a fork."""

    def __init__(self, root: str, flag: str) -> None:
        """Open the root without connecting to it; messages name `flag` as the option that sets the root."""
        self.shown = f"{flag} {redact(root)}"
        self.url = root
        self.is_local = "://" not in root or root.startswith(("file://", "local://"))
        self._pid = 0
        self._opened: list[Any] = []  # the last one belongs to this process, earlier ones to its parents
        if not self.is_local:
            self._connection()
        else:
            self._root = str(user_path(root.partition("://")[2] if "://" in root else root))

    def list_files(self) -> list[StoredFile]:
        """Return all files under the root, sorted by name; sizes and versions are -1 and "" if the list lacks them."""
        if self.is_local:
            if not os.path.isdir(self._root):  # unlike pathlib, also for names that are too long
                raise UserError(f"{self.shown}: no such folder")
            return sorted(_walk(Path(self._root)))
        found = self._at_start(self._find)
        start = len(self._root.rstrip("/")) + 1
        return sorted(
            _described(place[start:], place, details)
            for place, details in found.items()
            if details.get("type", "file") == "file" and place[start:]
        )

    def _find(self, files: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = files.find(self._root, maxdepth=MAX_DEPTH, detail=True)
        if not found:
            files.ls(self._root)  # raises if the server does not answer, which `find` ignores
        return found

    def describe_files(self, names: Sequence[str]) -> list[StoredFile]:
        """Return the size and version of files, given by their names; raise UserError if one is missing."""
        with ThreadPoolExecutor(1 if self.is_local else PARALLEL_REQUESTS) as threads:
            return list(threads.map(self._describe, names))

    def read_file(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a small file; None if there is no such file. Raise UserError if it is too large."""
        place = self._place(name)
        if self.is_local:
            content = _read_local(Span(place, 0, max_bytes + 1)) if os.path.isfile(place) else None
        else:
            try:
                content = self._retry(lambda files: _read_start(files, place, max_bytes + 1), OPENING_SECONDS, 0.0)
            except FileNotFoundError:
                return None
            except Exception as error:
                raise unreadable(self.shown, error) from None
        if content is not None and len(content) > max_bytes:
            raise UserError(f"{self.shown}: {printable(name)} has more than {max_bytes:,} bytes; check the file")
        return content

    def read(self, spans: Sequence[Span], wait_seconds: float) -> list[bytes]:
        """Return the bytes of each span. Retry for up to `wait_seconds` if the server does not answer."""
        groups = _groups(spans)
        joined = [Span(group[0].place, group[0].start, max(span.stop for span in group)) for group in groups]
        found: dict[Span, bytes] = {}
        for group, content in zip(groups, self._read_joined(joined, wait_seconds), strict=True):
            begin = group[0].start
            found |= {span: content[span.start - begin : span.stop - begin] for span in group}
        return [found[span] for span in spans]

    def _read_joined(self, spans: Sequence[Span], wait_seconds: float) -> list[bytes]:
        if self.is_local:
            return [_whole(_read_local(span), span) for span in spans]
        found: list[bytes | None] = [None] * len(spans)

        def read_missing(files: Any) -> None:
            rows = [row for row, content in enumerate(found) if content is None]
            asked = [spans[row] for row in rows]
            answers = files.cat_ranges(
                [span.place for span in asked],
                [span.start for span in asked],
                [span.stop for span in asked],
                batch_size=PARALLEL_REQUESTS,
                on_error="return",
            )
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            for row, answer in zip(rows, answers, strict=True):
                if not isinstance(answer, BaseException):
                    found[row] = _whole(answer, spans[row])
            if errors:
                raise errors[0]

        try:
            self._retry(read_missing, wait_seconds, min(wait_seconds, GONE_SECONDS))
        except Exception as error:
            raise unreadable(redact(spans[0].place), error) from None
        return [content for content in found if content is not None]

    def _place(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _describe(self, name: str) -> StoredFile:
        place = self._place(name)
        if self.is_local:
            if not os.path.isfile(place):
                raise UserError(f"{self.shown}: {printable(name):.200}: no such file; check the name")
            return _local_file(name, Path(place))
        found = _described(name, place, self._at_start(lambda files: files.info(place)))
        if found.size < 0:
            raise UserError(
                f"{self.shown}: the server does not report the size of {printable(name)}; use a different server"
            )
        return found

    def _connection(self) -> Any:
        if self._pid != os.getpid():
            files, root = open_file_system(self.url, self.shown)
            # The connection of a parent process is kept, because deleting it here would try to close it and fail.
            self._opened.append(files)
            self._root, self._pid = root.rstrip("/"), os.getpid()
        return self._opened[-1]

    def _at_start(self, operation: Callable[[Any], Result]) -> Result:
        try:
            return self._retry(operation, OPENING_SECONDS, 0.0)
        except Exception as error:  # storage libraries may raise any exception
            raise unreadable(self.shown, error) from None

    def _retry(self, operation: Callable[[Any], Result], wait_seconds: float, gone_seconds: float) -> Result:
        """Repeat an operation until it succeeds; give up sooner if the file is missing or access is denied."""
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                result = operation(self._connection())
            except UserError:
                raise
            except Exception as caught:
                error, waited = cause_of(caught), time.monotonic() - began
                if waited + pause > (gone_seconds if is_lasting(error) else wait_seconds):
                    raise error from None
                if pause == FIRST_PAUSE_SECONDS:
                    print_line(f"{self.shown}: cannot be read ({one_line(error)}); retrying")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            if pause > FIRST_PAUSE_SECONDS:
                print_line(f"{self.shown}: can be read again after {time.monotonic() - began:.1f} s")
            return result


def _described(name: str, place: str, details: dict[str, Any]) -> StoredFile:
    found = (details.get(key) for key in ("ETag", "LastModified", "Last-Modified", "mtime", "modified"))
    size = details.get("size")
    return StoredFile(name, place, -1 if size is None else int(size), str(next(filter(None, found), "")))


def _read_start(files: Any, place: str, size: int) -> bytes:
    """Return at most this many bytes of a remote file, without receiving the rest."""
    content = bytearray()
    streamed = {"block_size": 0} if place.startswith(("http://", "https://")) else {}
    with files.open(place, "rb", **streamed) as opened:
        while len(content) < size and (piece := opened.read(size - len(content))):
            content += piece
    return bytes(content)


def _walk(root: Path) -> Iterator[StoredFile]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder, name) for name in files):
            if path.is_file():
                yield _local_file(path.relative_to(root).as_posix(), path)


def _local_file(name: str, path: Path) -> StoredFile:
    status = path.stat()
    return StoredFile(name, str(path), status.st_size, str(status.st_mtime_ns))


def _read_local(span: Span) -> bytes:
    try:
        opened = os.open(span.place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(opened, span.stop - span.start, span.start)
        finally:
            os.close(opened)
    except OSError as error:
        raise UserError(f"{printable(span.place)}: {error.strerror}; restore the file") from None


def _groups(spans: Sequence[Span]) -> list[list[Span]]:
    """Return groups of spans that are so close together in a file that one request reads all of a group."""
    groups: list[list[Span]] = []
    for span in sorted(set(spans)):
        first, last = (groups[-1][0], groups[-1][-1]) if groups else (span, span)
        is_close = span.place == last.place and span.start <= last.stop + MAX_GAP_BYTES
        if groups and is_close and span.stop <= first.start + MAX_GROUP_BYTES:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _whole(content: bytes, span: Span) -> bytes:
    size = span.stop - span.start
    if len(content) > size:
        raise UserError(
            f"{printable(redact(span.place))}: the server sent {len(content):,} bytes instead of {size:,}, so it does "
            "not support range requests for this file; use a different server"
        )
    if len(content) < size:
        raise UserError(
            f"{printable(redact(span.place))}: shorter than recorded in its index; restore the shard, or index it again"
        )
    return content
