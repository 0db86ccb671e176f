"""The index of a shard: where each file in the tar starts, found in one scan without extracting anything."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from zlib import crc32

from paceline.core.errors import UserError
from paceline.core.files import checksum_of_content, parse_json
from paceline.core.storage.files import Span, StoredFile
from paceline.core.storage.reader import Reader
from paceline.data.file_lists import SUFFIXES
from paceline.images.decode import BadImage
from paceline.images.deep import image_size

VERSION = 1
SUFFIX = ".index.json"
MAX_INDEX_BYTES = 2**28
MAX_LABEL = 10_000_000  # a network has one output for each class number up to the largest
MAX_SIDE_PX = 2**31
HEADER_BYTES = 512  # size of the tar header before a member


class Member(NamedTuple):
    """A file in a tar file."""

    name: str
    offset: int  # position of its first byte in the tar file
    size: int
    crc32: int
    height: int = 0  # upright height of the image in pixels; 0 if the member is not a readable image
    width: int = 0
    label: int = -1  # class index, if the member contains one
    problem: str = ""  # why the member cannot be used; "" if it can
    header_crc32: int = 0  # of its tar header, which contains its name


class ShardIndex(NamedTuple):
    """The members of a shard, in order."""

    size: int  # size of the tar file in bytes
    members: tuple[Member, ...]
    problem: str = ""  # what is wrong with the whole shard, such as a missing end

    def encode(self) -> bytes:
        """Return the content of an index file."""
        content = {
            "version": VERSION,
            "size": self.size,
            "problem": self.problem,
            "members": [list(member[:-1]) for member in self.members],
            "headers": [member.header_crc32 for member in self.members],
        }
        return json.dumps(content | {"sha256": checksum_of_content(content)}).encode()

    @classmethod
    def parse(cls, content: bytes) -> ShardIndex:
        """Parse the content of an index file; raise ValueError if it is damaged or has an unknown version."""
        try:
            read: Any = parse_json(content)
            if read.pop("sha256") != checksum_of_content(read):
                raise ValueError("the index does not match its recorded SHA-256")
            size, problem, headers = read["size"], read["problem"], read["headers"]
            if read["version"] != VERSION or not _are(int, size, *headers) or not _are(str, problem):
                raise ValueError("the index has another version, or contains a value of the wrong type")
            members = (_member(row, header, size) for row, header in zip(read["members"], headers, strict=True))
            return cls(size, tuple(members), problem)
        except (KeyError, TypeError, AttributeError, OverflowError, UnicodeDecodeError) as error:
            raise ValueError(f"the index cannot be read: {' '.join(str(error).split())}") from None


def _member(row: list[Any], header: int, size: int) -> Member:
    member = Member._make([*row, header])
    name, *numbers, problem, _ = member
    if not _are(str, name, problem) or not _are(int, *numbers):
        raise ValueError("the index contains a value of the wrong type")
    if not 0 <= member.size <= size - member.offset or member.offset < (0 if problem else HEADER_BYTES):
        raise ValueError("the index lists bytes outside the shard")
    are_valid = (0 <= member.crc32 < 2**32, 0 <= header < 2**32, -1 <= member.label <= MAX_LABEL)
    if not all(are_valid) or not all(0 <= side < MAX_SIDE_PX for side in (member.height, member.width)):
        raise ValueError(f"the index contains an invalid number for {member.name!r:.40}")
    return member


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)


CHUNK_BYTES = 2**22  # bytes that are read together
MAX_READ_BYTES = 2**29  # maximum size of a member
MAX_HEADER_BYTES = 2**16  # maximum size of the tar headers of one member
MAX_HEADER_DIGITS = 255  # before Python 3.11.10, `tarfile` needs quadratic time for consecutive digits in a header
MAX_LENGTH_DIGITS = 6  # of the length of a record in such a header
EXTENDED, RECORDS = b"xgXLK", b"xgX"  # types of tar headers that describe the next member; some contain records
MAX_GLOBALS = 100  # maximum number of values in global tar headers, which `tarfile` copies for every member
LABEL_SUFFIX = ".cls"
MAX_LABEL_DIGITS = 32  # Python parses long integers in quadratic time
# Reading these formats can execute code that the file contains.
PICKLES = {".pyd", ".pickle", ".pkl", ".pth", ".pt"}
END = bytes(tarfile.BLOCKSIZE)  # a tar file ends with two such blocks


def scan(reader: Reader, file: StoredFile) -> ShardIndex:
    """Read a whole tar file; return its index, in which problems are recorded."""
    opened, problem = _RemoteFile(reader, file), ""
    members: list[Member] = []
    try:
        _check_headers(opened, 0)
        with tarfile.open(fileobj=opened, mode="r:") as archive:
            for member in _files(archive, opened, file.size):
                header = opened.read_at(max(0, member.offset - HEADER_BYTES), HEADER_BYTES)
                content = opened.read_at(member.offset, member.size)
                members.append(_described(member._replace(header_crc32=crc32(header)), content))
            problem = _problem_at_end(opened, archive.offset)
    except UserError:
        raise
    # tarfile recurses for every header that describes the next one, so a long chain exceeds the recursion limit
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        problem = f"truncated, or not an uncompressed tar file ({' '.join(str(error).split())})"
    return ShardIndex(file.size, tuple(members), problem)


def _files(archive: tarfile.TarFile, opened: _RemoteFile, size: int) -> Iterator[Member]:
    """Yield the files in a tar file, before their content is read."""
    known: dict[str, Member] = {}
    last = -1
    while (entry := archive.next()) is not None:
        opened.header_bytes = 0
        _check_headers(opened, archive.offset)
        archive.members.clear()  # type: ignore[attr-defined]  # `tarfile` keeps all members with their headers
        if entry.offset <= last:  # the size of a sparse file can be negative
            raise ValueError(f"{entry.name!r} comes after a later member")
        if len(archive.pax_headers) > MAX_GLOBALS:
            raise ValueError(f"more than {MAX_GLOBALS} values in global headers")
        last = entry.offset
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


def _check_headers(opened: _RemoteFile, position: int) -> None:
    """Raise ValueError if `tarfile` needs much more time or memory for the headers at a position than they are long."""
    while (kind := (block := opened.read_at(position, HEADER_BYTES))[156:157]) and kind in EXTENDED:
        try:
            size = tarfile.nti(block[124:136])  # type: ignore[attr-defined]
        except tarfile.HeaderError:
            return  # `tarfile` reports it
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a tar header of {size:,} bytes; the limit for a member is {MAX_HEADER_BYTES:,}")
        content = opened.read_at(position + HEADER_BYTES, size).partition(b"\0")[0]
        if max(map(len, re.findall(rb"\d+", content)), default=0) > MAX_HEADER_DIGITS:
            raise ValueError(f"a tar header has more than {MAX_HEADER_DIGITS} consecutive digits, the limit")
        while kind in RECORDS and content:
            digits = content[:MAX_LENGTH_DIGITS].partition(b" ")[0]
            length = int(digits) if digits.isdigit() else 0
            if length < len(b"5 a=\n") or content[length - 1 : length] != b"\n":
                raise ValueError(f"damaged extended header at byte {position:,}")
            content = content[length:]
        position += HEADER_BYTES + -(-size // HEADER_BYTES) * HEADER_BYTES


def _described(member: Member, content: bytes) -> Member:
    """Return a member with its checksum and its image size or class index."""
    suffix, member = PurePosixPath(member.name).suffix.lower(), member._replace(crc32=crc32(content))
    if member.problem:
        return member
    if suffix in PICKLES:
        return member._replace(problem="pickled data is not read, because it can execute code; store it as an image")
    if suffix == LABEL_SUFFIX:
        try:
            return member._replace(label=parse_label(content))
        except ValueError as error:
            return member._replace(problem=str(error))
    if suffix not in SUFFIXES:
        return member
    try:
        height, width = image_size(content)
    except BadImage as error:
        return member._replace(problem=f"unreadable image ({error})")
    return member._replace(height=height, width=width)


def parse_label(content: bytes) -> int:
    """Return the class number in a member; raise ValueError if it contains none."""
    digits = content.strip()
    if not digits.isdigit():
        raise ValueError("not a class number")
    if len(digits) > MAX_LABEL_DIGITS or int(digits) > MAX_LABEL:
        raise ValueError(f"a class number above {MAX_LABEL:,}, the maximum")
    return int(digits)


def _problem_at_end(opened: _RemoteFile, position: int) -> str:
    """Return what is wrong with the end of a tar file, which is at `position`; "" if nothing is wrong."""
    if opened.read_at(position, len(END)) != END:
        return f"no end marker at byte {position:,}, so the file is truncated or damaged"
    is_longer = any(opened.read_at(position, CHUNK_BYTES))
    return "data after the end marker: concatenated tar files are not supported" if is_longer else ""


class _RemoteFile(io.RawIOBase):
    """A file that reads large chunks. The module `tarfile` reads only headers from it, whose size is limited."""

    def __init__(self, reader: Reader, file: StoredFile) -> None:
        self._reader, self._file = reader, file
        self._position, self._begin, self._chunk = 0, 0, b""
        self.header_bytes = 0  # how many bytes `tarfile` has read for the next member

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
        content = self.read_at(self._position, MAX_READ_BYTES if size is None or size < 0 else size)
        self._position += len(content)
        self.header_bytes += len(content)
        if self.header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"tar headers of more than {MAX_HEADER_BYTES:,} bytes, the limit for a member")
        return content

    def read_at(self, position: int, size: int) -> bytes:
        """Return bytes at a position; fewer at the end of the file."""
        count = max(0, min(size, self._file.size - position))
        if count > MAX_READ_BYTES:
            raise ValueError(f"a member has {count:,} bytes; the limit is {MAX_READ_BYTES:,}")
        pieces = []
        while count:
            if not self._begin <= position < self._begin + len(self._chunk):
                self._begin = position // CHUNK_BYTES * CHUNK_BYTES
                stop = min(self._begin + CHUNK_BYTES, self._file.size)
                self._chunk = self._reader.read([Span(self._file.place, self._begin, stop)])[0]
            start = position - self._begin
            piece = self._chunk[start : start + count]
            pieces.append(piece)
            position += len(piece)
            count -= len(piece)
        return b"".join(pieces)
