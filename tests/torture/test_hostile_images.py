"""With damaged or malicious images, no command executes code, hangs or writes to unexpected places."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_images import HostileImage, write_hostile_images
from photographs import photograph
from PIL import Image
from probes import Ended, changes, fingerprint, run_command, run_probe
from running import run_fork

from paceline.core.text import printable
from paceline.images.decode import BadImage, decode
from paceline.images.encode import read_image

pytestmark = pytest.mark.timeout(1500)
CPU = ("--accelerator", "cpu")
EXPECTED = ("out", "data", "stdout-", "stderr-")  # how the names of files in the working folder start


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a classifier and a restoration network, both trained for a few steps on small photographs."""
    folder = tmp_path_factory.mktemp("models")
    for number in range(8):
        for name in ("a", "b"):
            (folder / "classes" / name).mkdir(parents=True, exist_ok=True)
            crop = photograph("astronaut")[40 * number :, 180:][:32, :32]
            Image.fromarray(crop).save(folder / "classes" / name / f"{number}.png")
    shutil.copytree(folder / "classes" / "a", folder / "photos")
    small = ("--images", "32", "--batch-size", "8", *CPU, "--set", "width=8", "--set", "validation=0.25")
    classes = ("--data", "folder", "--data-root", "classes", "--set", "size=16", "--set", "pad_crop=0")
    photos = ("--data", "degraded", "--data-root", "photos", "--set", "crop=16", "--set", "depth=2")
    for recipe, data, out in (("classification", classes, "classifier"), ("restoration", photos, "restorer")):
        trained = run_fork(folder, "train", recipe, *small, *data, "--out", out)
        assert trained.wait() == 0, trained.stderr
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[HostileImage]:
    found = write_hostile_images(tmp_path_factory.mktemp("images"))
    assert {image.verdict for image in found} == {"ok", "rejected", "not-an-image"}
    return found


def is_reported(image: HostileImage, ended: Ended) -> bool:
    return any(printable(image.path.name) in line for line in ended.errors.splitlines())


def fault_in_folder(image: HostileImage, ended: Ended, used: set[str]) -> str:
    """Describe what a command did wrong with an image; return an empty string if it did nothing wrong."""
    if image.verdict == "ok":
        return "" if image.path.name in used else "was not used"
    if image.verdict == "rejected" and image.path.name in used:
        return "was used"
    return "" if image.verdict == "not-an-image" or is_reported(image, ended) else "was neither used nor reported"


def used_by_apply(out: Path, ended: Ended, images: list[HostileImage]) -> set[str]:
    stems = {file.stem for file in out.rglob("*") if file.is_file()}
    return {image.path.name for image in images if image.path.stem in stems}


def used_by_predict(out: Path, ended: Ended, images: list[HostileImage]) -> set[str]:
    lines = [line for line in ended.text.splitlines() if "%)" in line and not line.startswith("not used")]
    return {image.path.name for image in images if any(f"{printable(image.path)}:" in line for line in lines)}


Used = Callable[[Path, Ended, list[HostileImage]], set[str]]


@pytest.mark.torture
@pytest.mark.parametrize(
    ("command", "model", "used_by"), [("apply", "restorer", used_by_apply), ("predict", "classifier", used_by_predict)]
)
def test_a_folder_of_malicious_images_is_processed_safely(
    place: Path, images: list[HostileImage], tmp_path: Path, tally: Any, command: str, model: str, used_by: Used
) -> None:
    counted, folder = tally(f"hostile images: {command}"), images[0].path.parent
    before = fingerprint([folder, place])
    out = tmp_path / "out"
    arguments = [command, str(place / model), str(folder), *CPU]
    ended = run_probe(tmp_path, run_command, [*arguments, *(["--out", str(out)] if command == "apply" else [])])
    general = ended.fault or changes(before, fingerprint([folder, place])) or unexpected(tmp_path)
    used = used_by(out, ended, images)
    for image in images:
        counted.add(image.name, general or fault_in_folder(image, ended, used))
    counted.check()


def unexpected(folder: Path) -> str:
    """Describe the unexpected files that a command wrote to its working folder."""
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(EXPECTED)]
    return f"wrote {', '.join(others)}" if others else ""


def arguments_of(command: str, data: Path, out: Path) -> list[str]:
    if command == "pack":
        return ["pack", str(data), str(out), "--data", "photos"]
    steps = ["--images", "16", "--batch-size", "8", "--set", "crop=16", "--set", "width=4", "--set", "depth=2"]
    return ["train", "restoration", "--data", "degraded", "--data-root", str(data), *steps, *CPU, "--out", str(out)]


@pytest.mark.torture
@pytest.mark.parametrize("command", ["pack", "train"])
def test_one_malicious_image_among_photographs_does_no_harm(
    place: Path, images: list[HostileImage], tmp_path: Path, tally: Any, command: str
) -> None:
    counted = tally(f"hostile images: {command}")
    for number, image in enumerate(images):
        here = tmp_path / str(number)
        shutil.copytree(place / "photos", here / "data")
        if image.path.is_fifo():
            os.mkfifo(here / "data" / image.path.name)
        else:
            shutil.copy(image.path, here / "data" / image.path.name, follow_symlinks=False)
        ended = run_probe(here, run_command, arguments_of(command, here / "data", here / "out"))
        fault = ended.fault or unexpected(here)
        if not fault and image.verdict == "ok" and ended.code:
            fault = f"was rejected: {ended.errors.strip()}"
        if not fault and image.verdict == "rejected" and not (ended.code == 2 and is_reported(image, ended)):
            fault = f"exit code {ended.code}, {ended.errors.strip()!r}"
        counted.add(image.name, fault)
        shutil.rmtree(here)
    counted.check()


def verdict(read: Callable[[Path], object], path: Path) -> str:
    try:
        read(path)
    except BadImage as problem:
        return "rejected" if str(problem).isprintable() else f"unprintable: {problem!r}"
    return "ok"


def test_both_functions_that_decode_images_accept_or_reject_each_malicious_image(images: list[HostileImage]) -> None:
    wrong = []
    signal.alarm(120)  # a pipe must not block
    for image in images:
        expected = "ok" if image.verdict == "ok" else "rejected"
        for read in (decode, read_image):
            if (found := verdict(read, image.path)) != expected:
                wrong.append(f"{printable(image.name)}: {read.__name__}: {found} instead of {expected}")
    signal.alarm(0)
    assert not wrong, "\n".join(wrong)
