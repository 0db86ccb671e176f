"""Mirror destinations, and the published snapshots of a run folder there, each listed in a manifest."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.files import RUN_FORMAT, check_format
from paceline.core.errors import UserError
from paceline.core.files import checksum_of_content, checksum_of_file, parse_json, read_bounded, why
from paceline.core.storage.files import open_file_system
from paceline.core.text import has_credentials, one_line, redact
from paceline.runs.logger import LOGGER_RUNS
from paceline.runs.metrics import METRICS, SAMPLES
from paceline.runs.record import CONFIG

# On these file systems, readers can see a partly written file. So a file is renamed to its final name after writing.
OF_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
WRITING = ".writing"


class Destination:
    """A remote folder at a URL. File names are relative to it and use slashes. Every failure raises an exception."""

    def __init__(self, url: str, flag: str) -> None:
        """Open the folder without connecting to it; `flag` is the option that set the URL."""
        if has_credentials(url):
            raise UserError(
                f"{flag} {redact(url)}: contains a credential: use an environment variable or the service's config file"
            )
        self._files, root = open_file_system(url, f"{flag} {url}")
        self._root = root.rstrip("/")
        protocols = self._files.protocol
        self._of_folders = bool(OF_FOLDERS & set([protocols] if isinstance(protocols, str) else protocols))

    def send(self, file: Path, name: str) -> None:
        """Upload a file atomically, replacing any existing file with the same name."""
        target = f"{self._root}/{name}"
        if not self._of_folders:
            self._files.put_file(str(file), target)
            return
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), target + WRITING)
        self._files.mv(target + WRITING, target)

    def fetch(self, name: str, file: Path) -> None:
        """Download a file to a new local file; raise FileNotFoundError if it does not exist."""
        self._files.get_file(f"{self._root}/{name}", str(file))

    def sizes(self, *folders: str) -> dict[str, int]:
        """Return the size of every file under some folders, by name; a missing folder contains no files."""
        self._files.invalidate_cache()
        sizes: dict[str, int] = {}
        for folder in folders:
            with suppress(FileNotFoundError, NotADirectoryError):
                for path, details in self._files.find(f"{self._root}/{folder}", detail=True).items():
                    if details.get("type", "file") == "file":
                        sizes[path[len(self._root) + 1 :]] = int(details["size"] or 0)
        return sizes

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")


MANIFESTS = "mirror"
OBJECTS = f"{MANIFESTS}/files"
CHECKPOINTS = "checkpoints"
CHANGING = (METRICS, CONFIG, "protocols.json", "data_spec.json", LOGGER_RUNS)
RESTORING = ".restoring"
_MANIFEST_NAME = re.compile(rf"{MANIFESTS}/(\d{{12}})-(\d{{4,}})\.json")
CHECKPOINT_FILE = re.compile(rf"{CHECKPOINTS}/\d{{12}}/[\w-][\w.-]*")
_OBJECT_NAME = re.compile(rf"{OBJECTS}/[0-9a-f]{{64}}")
SAMPLE_FILE = re.compile(rf"{SAMPLES}/[^/\\]+-\d{{12}}\.png")


@dataclass(frozen=True)
class Piece:
    """One file of a snapshot."""

    object: str  # name at the destination
    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """One published snapshot."""

    run: str  # identity of the run
    images: int  # images seen at the newest checkpoint
    files: Mapping[str, Piece]  # files by name in the run folder

    def encode(self) -> bytes:
        """Return the content of the manifest file."""
        content = {
            "format": RUN_FORMAT,
            "run": self.run,
            "images": self.images,
            "files": {name: vars(piece) for name, piece in self.files.items()},
        }
        return json.dumps(content | {"seal": checksum_of_content(content)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes) -> Manifest:
        """Parse the content of a manifest file.

        Raise ValueError if it is damaged or lists files that are not part of a snapshot. Raise UserError if its format
        is not supported.
        """
        try:
            read: Any = parse_json(content)
            if read.pop("seal") != checksum_of_content(read):
                raise ValueError("the manifest does not match its recorded SHA-256")
            check_format(read["format"], "its snapshots")
            files = {
                str(name): Piece(str(one["object"]), str(one["sha256"]), int(one["size"]))
                for name, one in read["files"].items()
            }
            manifest = cls(str(read["run"]), int(read["images"]), files)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"the manifest cannot be read: {one_line(error)}") from None
        for name, piece in files.items():
            own = piece.object == name and (CHECKPOINT_FILE.fullmatch(name) or SAMPLE_FILE.fullmatch(name))
            if not own and not (name in CHANGING and _OBJECT_NAME.fullmatch(piece.object)):
                raise ValueError(f"the manifest lists {name!r}, which is not part of a snapshot")
        return manifest


def manifest_name(images: int, serial: int) -> str:
    """Return the name of a manifest; newer manifests sort later."""
    return f"{MANIFESTS}/{images:012d}-{serial:04d}.json"


def order_of(name: str) -> tuple[int, int]:
    """Return the number of images and the serial number in a manifest's name."""
    match = _MANIFEST_NAME.fullmatch(name)
    assert match, name
    return int(match[1]), int(match[2])


def list_manifests(destination: Destination) -> list[str]:
    """Return the names of all manifests, newest first."""
    names = [name for name in destination.sizes(MANIFESTS) if _MANIFEST_NAME.fullmatch(name)]
    return sorted(names, key=order_of, reverse=True)


def read_manifest(destination: Destination, name: str) -> Manifest:
    """Download one manifest; raise ValueError if it is damaged."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        file = Path(folder) / "manifest.json"
        destination.fetch(name, file)
        try:
            return Manifest.parse(read_bounded(file))
        except OSError as error:
            raise ValueError(why(error)) from None


def restore(
    destination: Destination, folder: Path, later_than: int, report: Callable[[str], None], beat: Callable[[], None]
) -> int | None:
    """Download the newest intact snapshot to a run folder, if its number of images exceeds `later_than`.

    Return that snapshot's number of images, or None if nothing is published. `report` is called for each damaged
    snapshot. Checkpoints are moved into place last, so that an interrupted download starts over at the next call.
    """
    names = list_manifests(destination)
    for name in names:
        images = order_of(name)[0]
        if images <= later_than:
            return images
        restored = folder / RESTORING
        shutil.rmtree(restored, ignore_errors=True)
        try:
            manifest = read_manifest(destination, name)
            _fetch_all(destination, manifest, restored, report, beat)
        except UserError:
            raise  # the format of the mirror is not supported
        except (ValueError, FileNotFoundError) as error:
            report(f"the snapshot {name} is damaged ({one_line(error)}); using the previous one")
            continue
        _move_into_place(restored, folder)
        return manifest.images
    if names:
        raise UserError("all snapshots are damaged: use a different mirror")
    return None


def fetch_config(destination: Destination, folder: Path) -> None:
    """Download the config.toml of the newest snapshot that has an intact one; do nothing if there is none."""
    for name in list_manifests(destination):
        with suppress(ValueError, FileNotFoundError):
            manifest = read_manifest(destination, name)
            files = {name: piece for name, piece in manifest.files.items() if name == CONFIG}
            _fetch_all(destination, replace(manifest, files=files), folder, lambda line: None, lambda: None)
            if files:
                return


def _fetch_all(
    destination: Destination,
    manifest: Manifest,
    restored: Path,
    report: Callable[[str], None],
    beat: Callable[[], None],
) -> None:
    there = destination.sizes(CHECKPOINTS, OBJECTS, SAMPLES)
    for name, piece in manifest.files.items():
        beat()
        file = restored / name
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            if piece.object not in there:  # never fetch an unlisted entry: a device file could be endless
                raise FileNotFoundError(f"{piece.object} is missing")
            if there[piece.object] == piece.size:
                destination.fetch(piece.object, file)
            if there[piece.object] != piece.size or checksum_of_file(file) != piece.sha256:
                raise ValueError(f"{name} does not match its recorded SHA-256")
        except (ValueError, FileNotFoundError):
            if not SAMPLE_FILE.fullmatch(name):  # a run can resume without an old sample
                raise
            file.unlink(missing_ok=True)
            report(f"skipping {name}: it is missing or does not match its recorded SHA-256")


def _move_into_place(restored: Path, folder: Path) -> None:
    for name in CHANGING:
        if (restored / name).exists():
            (restored / name).replace(folder / name)
    for file in sorted((restored / SAMPLES).glob("*")):
        (folder / SAMPLES).mkdir(exist_ok=True)
        file.replace(folder / SAMPLES / file.name)
    for checkpoint in sorted((restored / CHECKPOINTS).glob("*")):  # the newest checkpoint is moved last
        place = folder / CHECKPOINTS / checkpoint.name
        place.parent.mkdir(exist_ok=True)
        if place.exists():
            shutil.rmtree(place)
        checkpoint.rename(place)
    shutil.rmtree(restored)
