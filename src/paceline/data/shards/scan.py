"""Scans a tar file once and returns its index. Nothing is extracted, and no name in the tar file is used as a path."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from zlib import crc32

from paceline.core.errors import UserError
from paceline.core.storage.files import Span, StoredFile
from paceline.core.storage.reader import Reader
from paceline.data.file_lists import SUFFIXES
from paceline.data.shards.index import MAX_LABEL, Member, ShardIndex
from paceline.images.decode import BadImage
from paceline.images.readers import image_size

CHUNK_BYTES = 2**22  # bytes that are read together
MAX_READ_BYTES = 2**29  # maximum size of a member, and of a tar header
LABEL_SUFFIX = ".cls"
MAX_LABEL_DIGITS = 32  # Python parses long integers in quadratic time
# Reading these formats can execute code that the file contains.
PICKLES = {".pyd", ".pickle", ".pkl", ".pth", ".pt"}
# The first bytes of compressed files, and the name of each format.
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
END = bytes(tarfile.BLOCKSIZE)  # a tar file ends with two such blocks


def scan(reader: Reader, file: StoredFile) -> ShardIndex:
    """Read a whole tar file; return its index, in which problems are recorded."""
    opened = _RemoteFile(reader, file)
    members: list[Member] = []
    problem = ""
    try:
        with tarfile.open(fileobj=opened, mode="r:") as archive:
            for member in _files(archive, file.size):
                opened.seek(member.offset)
                members.append(_described(member, opened.read(member.size)))
            opened.seek(archive.offset)
            problem = _problem_at_end(opened)
    except UserError:
        raise
    # tarfile recurses for every header that describes the next one, so a long chain exceeds the recursion limit
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        problem = "" if members else _compression_problem(opened)
        problem = problem or f"truncated, or not an uncompressed tar file ({' '.join(str(error).split())})"
    return ShardIndex(file.size, tuple(members), problem)


def _files(archive: tarfile.TarFile, size: int) -> Iterator[Member]:
    """Yield the files in a tar file, before their content is read."""
    known: dict[str, Member] = {}
    while (entry := archive.next()) is not None:
        if entry.issparse():  # its size includes holes, which are not stored
            known[entry.name] = Member(entry.name, 0, 0, 0, problem="sparse files are not supported")
        elif entry.size < 0 or entry.offset_data + entry.size > size:
            raise ValueError(f"{entry.name!r} has {entry.size:,} bytes, more than the tar file contains")
        elif entry.isreg():
            known[entry.name] = Member(entry.name, entry.offset_data, entry.size, 0)
        elif entry.islnk() and entry.linkname in known and entry.name not in known:
            known[entry.name] = known[entry.linkname]._replace(name=entry.name)  # a file with several names
        elif entry.issym():
            known[entry.name] = Member(entry.name, 0, 0, 0, problem="symbolic links are not supported")
        else:
            continue  # folders, devices, and files that were given to `tar` twice
        yield known[entry.name]


def _described(member: Member, content: bytes) -> Member:
    """Return a member with its checksum and its image size or class index."""
    suffix, member = PurePosixPath(member.name).suffix.lower(), member._replace(crc32=crc32(content))
    if member.problem:
        return member
    if suffix in PICKLES:
        return member._replace(problem="pickled data is not read, because it can execute code; store it as an image")
    if suffix == LABEL_SUFFIX:
        digits = content.strip()
        if not digits.isdigit():
            return member._replace(problem="not a class number")
        if len(digits) > MAX_LABEL_DIGITS or int(digits) > MAX_LABEL:
            return member._replace(problem=f"a class number above {MAX_LABEL:,}, the maximum")
        return member._replace(label=int(digits))
    if suffix not in SUFFIXES:
        return member
    try:
        height, width = image_size(content)
    except BadImage as error:
        return member._replace(problem=f"unreadable image ({error})")
    return member._replace(height=height, width=width)


def _compression_problem(opened: _RemoteFile) -> str:
    """Return the problem if a file is compressed, whatever its name; "" if it is not."""
    opened.seek(0)
    start = opened.read(max(map(len, COMPRESSIONS)))
    found = next((name for marker, name in COMPRESSIONS.items() if start.startswith(marker)), "")
    return f"compressed with {found}, although its name ends in .tar; decompress it" if found else ""


def _problem_at_end(opened: _RemoteFile) -> str:
    """Return what is wrong with the end of a tar file, where `opened` is positioned; "" if nothing is wrong."""
    position, block = opened.tell(), opened.read(len(END))
    if len(block) < len(END):
        return "no end marker, so the file may be truncated"
    if block != END:
        return f"damaged at byte {position:,}"
    return (
        "data after the end marker: concatenated tar files are not supported" if any(opened.read(CHUNK_BYTES)) else ""
    )


class _RemoteFile(io.RawIOBase):
    """A file that reads large chunks, for the module `tarfile`."""

    def __init__(self, reader: Reader, file: StoredFile) -> None:
        self._reader, self._file = reader, file
        self._position, self._begin, self._chunk = 0, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = self._file.size - self._position
        count = max(0, left if size is None or size < 0 else min(size, left))
        if count > MAX_READ_BYTES:
            raise ValueError(f"a member has {count:,} bytes; the limit is {MAX_READ_BYTES:,}")
        pieces = []
        while count:
            if not self._begin <= self._position < self._begin + len(self._chunk):
                self._begin = self._position // CHUNK_BYTES * CHUNK_BYTES
                stop = min(self._begin + CHUNK_BYTES, self._file.size)
                self._chunk = self._reader.read([Span(self._file.place, self._begin, stop)])[0]
            start = self._position - self._begin
            piece = self._chunk[start : start + count]
            pieces.append(piece)
            self._position += len(piece)
            count -= len(piece)
        return b"".join(pieces)
