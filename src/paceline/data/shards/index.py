"""The index of a shard: where each of its members (the files in the tar file) starts, with sizes and checksums.

`paceline pack --to-shards` writes an index beside every shard. For other shards, one scan creates the index, which is
then kept in the cache folder. That file can be copied beside the shard, as NAME.tar.index.json.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from paceline.core.checksums import checksum_of_content
from paceline.core.small_files import parse_json

VERSION = 1
SUFFIX = ".index.json"
MAX_INDEX_BYTES = 2**28
MAX_LABEL = 10_000_000  # a network has one output for each class number up to the largest
MAX_SIDE_PX = 2**31
HEADER_BYTES = 512  # size of the tar header before a member
UNKNOWN = -1


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
    header_crc32: int = UNKNOWN  # of its tar header, which contains its name; older versions do not store it


class ShardIndex(NamedTuple):
    """The members of a shard, in order."""

    size: int  # size of the tar file in bytes
    members: tuple[Member, ...]
    problem: str = ""  # what is wrong with the whole shard, such as a missing end

    def without_headers(self) -> ShardIndex:
        """Return the index as older versions wrote it, without the checksums of the tar headers."""
        return self._replace(members=tuple(member._replace(header_crc32=UNKNOWN) for member in self.members))

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
            if read["version"] != VERSION:
                raise ValueError(f"index version {read['version']}, expected {VERSION}")
            size, rows, problem = read["size"], read["members"], read["problem"]
            headers = read.get("headers", [UNKNOWN] * len(rows))
            if not _are(int, size, *headers) or not _are(str, problem):
                raise ValueError("the index contains a value of the wrong type")
            members = (_member(row, header, size) for row, header in zip(rows, headers, strict=True))
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
    is_valid = 0 <= member.crc32 < 2**32 and UNKNOWN <= header < 2**32 and -1 <= member.label <= MAX_LABEL
    if not is_valid or not all(0 <= side < MAX_SIDE_PX for side in (member.height, member.width)):
        raise ValueError(f"the index contains an invalid number for {member.name!r:.40}")
    return member


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)
