"""With a malicious run folder, no command writes outside the folder, hangs or prints a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.config.files import read_file
from paceline.core.errors import UserError
from paceline.core.files import checksum_of_content, open_append, read_bounded, read_json
from paceline.runs.checkpoint import Checkpoints, Damaged, load
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import read_metrics
from paceline.runs.published import Destination, Manifest, list_manifests, restore
from paceline.runs.record import read_record
from paceline.runs.status import Status
from paceline.runs.weights import from_json, read_data_spec

FOLDERS = ("checkpoints", "logs", "samples", "tensorboard", ".mirror", ".restoring", "wandb")
FILES = (".lock", "config.toml", "metrics.jsonl", "status.json", "mirror.json", "protocols.json", "data_spec.json")
DEEPER = ("checkpoints/000000000064", "samples/samples-000000000064.png", "logs/rank-0.txt", "logs/rank-1.txt")


def test_a_link_to_a_path_outside_the_run_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in (*FOLDERS, *FILES, *DEEPER):
        link = tmp_path / "run" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        for target in (tmp_path / "elsewhere", Path("../../elsewhere"), tmp_path / "missing"):
            link.symlink_to(target)
            with pytest.raises(UserError, match=rf"{name}: is a symbolic link that points outside the run folder"):
                RunFolder(tmp_path / "run").claim()
            link.unlink()
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "missing").exists()


def test_a_named_pipe_in_a_run_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("metrics.jsonl", "logs/rank-0.txt", ".lock"):
        os.mkfifo(tmp_path / name)
        for write in (RunFolder(tmp_path).claim, lambda name=name: os.close(open_append(tmp_path / name))):
            with pytest.raises(UserError, match=rf"{name}: is neither a file nor a folder"):
                write()
        (tmp_path / name).unlink()


def test_links_to_a_run_folder_and_inside_it_are_followed(tmp_path: Path) -> None:
    """Links within a run folder are legitimate: some loggers write a link to their newest file."""
    (tmp_path / "disk/wandb/run-1").mkdir(parents=True)
    (tmp_path / "disk/wandb/latest").symlink_to("run-1")
    (tmp_path / "run").symlink_to("disk")
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    folder.release()


def test_a_mirror_with_a_device_or_a_file_of_the_wrong_size_is_rejected_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "mirror/mirror").mkdir(parents=True)
    (tmp_path / "mirror/mirror/000000000064-0001.json").symlink_to("/dev/zero")
    assert list_manifests(Destination(f"file://{tmp_path}/mirror", "--resume-from")) == []
    (tmp_path / "mirror/mirror/000000000064-0001.json").unlink()
    files = {"metrics.jsonl": {"object": f"mirror/files/{'0' * 64}", "sha256": "0" * 64, "size": 3}}
    for wrong in ({}, {"../x": files["metrics.jsonl"]}, {"/etc/x": files["metrics.jsonl"]}):
        content = {"format": 2, "run": "x", "images": 64, "files": files | wrong}
        sealed = json.dumps(content | {"seal": checksum_of_content(content)}).encode()
        (tmp_path / "mirror/mirror/000000000064-0001.json").write_bytes(sealed)
        if wrong:
            with pytest.raises(ValueError, match="is not part of a snapshot"):
                Manifest.parse(sealed)
        (tmp_path / "mirror/mirror/files").mkdir(exist_ok=True)
        (tmp_path / f"mirror/mirror/files/{'0' * 64}").unlink(missing_ok=True)
        (tmp_path / f"mirror/mirror/files/{'0' * 64}").symlink_to("/dev/zero")
        destination = Destination(f"file://{tmp_path}/mirror", "--resume-from")
        with pytest.raises(UserError, match="all snapshots are damaged"):
            restore(destination, tmp_path / "run", 0, print, lambda: None)


def place_at(path: Path, kind: str) -> None:
    """Create a directory entry that is not a regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    place = {"pipe": os.mkfifo, "zero": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}
    place[kind](path)


@pytest.mark.parametrize("kind", ["pipe", "zero", "folder"])
def test_no_reader_hangs_on_an_entry_that_is_not_a_regular_file(kind: str, tmp_path: Path) -> None:
    """Reading from a pipe would block, and reading /dev/zero would exhaust the memory."""
    for name in ("config.toml", "data_spec.json", "protocols.json", "status.json", "metrics.jsonl", "c/manifest.json"):
        place_at(tmp_path / name, kind)
    for read in (
        lambda: read_record(tmp_path),
        lambda: read_data_spec(tmp_path),
        lambda: RunFolder(tmp_path).protocol_of("test/FID"),
        lambda: load(tmp_path / "c"),
        lambda: read_file(str(tmp_path / "config.toml")),
        lambda: read_metrics(tmp_path),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert Status.of(tmp_path) is None and read_json(tmp_path / "status.json") == {}


BOMBS = {
    "a dotted key": "a." * 30_000 + "a = 1\n",
    "many dotted keys": ("a." * 150 + "a = 1\n") * 800,
    "a dotted key in a table": "x = {" + "a." * 30_000 + "a = 1}\n",
    "a dotted table": "[" + "a." * 30_000 + "a]\n",
    "nested arrays": "x = " + "[" * 30_000 + "\n",
    "nested tables": "x = " + "{a = " * 30_000 + "\n",
    "a large number": f"x = {'9' * 5000}\n",
    "a large file": "#" * 2**21,
    "not UTF-8": "x = '\udcff'",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_malicious_toml_file_is_quickly_rejected_in_one_line(bomb: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(bomb, encoding="utf-8", errors="surrogateescape")
    for read in (lambda: read_record(tmp_path), lambda: read_file(str(tmp_path / "config.toml"))):
        began = time.process_time()
        with pytest.raises(UserError) as caught:
            read()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
        assert time.process_time() - began < 20  # without the limits, this would take minutes


JSON_BOMBS = {"nested": "[" * 100_000, "objects": '{"a":' * 100_000, "a number": '{"images": ' + "9" * 5000 + "}"}


@pytest.mark.parametrize("bomb", [*JSON_BOMBS.values(), '{"images": 1e999}', '{"images": NaN}', "[]", "3", '"x"'])
def test_a_malicious_json_file_is_rejected_in_one_line(bomb: str, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in ("data_spec.json", "protocols.json", "status.json", "metrics.jsonl", "c/manifest.json"):
        (tmp_path / name).write_text(bomb)
    with pytest.raises(UserError):
        read_data_spec(tmp_path)
    with pytest.raises(Damaged):
        load(tmp_path / "c")
    for read in (lambda: RunFolder(tmp_path).protocol_of("test/FID"), lambda: Manifest.parse(bomb.encode())):
        try:
            read()
        except ValueError as error:  # UserError is a subclass of ValueError
            assert "\n" not in str(error)
    assert Status.of(tmp_path) is None and isinstance(read_metrics(tmp_path), list)


@pytest.mark.parametrize(
    "values",
    [{"channels": "3"}, {"height": 1e999}, {"width": -1}, {"num_classes": None}, {"class_names": 3}, {"panels": [1]},
     {"channels": 10**9}, {"flip_allowed": 3}, {"unknown": 1}],
)  # fmt: skip
def test_a_data_spec_with_a_wrong_value_is_rejected(values: dict[str, object]) -> None:
    spec = {"channels": 1, "height": 8, "width": 8, "num_classes": 2, "class_names": ["a", "b"], "flip_allowed": True}
    from_json(json.dumps(spec | {"scale": 0, "panels": []}))
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_json(json.dumps(spec | {"scale": 0, "panels": []} | values))


def test_a_file_that_is_too_large_is_not_read_completely(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)  # a sparse file, which takes no disk space
    code = "import sys, resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
    code += "from paceline.core.files import read_bounded\nread_bounded(__import__('pathlib').Path(sys.argv[1]))"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "large.json")], capture_output=True, text=True)
    assert "larger than" in ended.stderr and "MemoryError" not in ended.stderr
    (tmp_path / "small.json").write_bytes(b"{}")
    assert read_bounded(tmp_path / "small.json") == b"{}"


def test_only_folder_names_that_paceline_writes_count_as_checkpoints(tmp_path: Path) -> None:
    for name in ("000000000064", "²", "٣", "64", "-00000000001", "9" * 200, "damaged-000000000064"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path).all() == [64]
