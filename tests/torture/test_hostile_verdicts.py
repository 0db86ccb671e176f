"""Both functions that decode image files accept or reject each malicious image as expected."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_images import write_hostile_images

from paceline.core.text import printable
from paceline.images.decode import BadImage, decode
from paceline.images.encode import read_image


@pytest.fixture(autouse=True)
def never_blocks() -> Iterator[None]:
    signal.alarm(120)
    yield
    signal.alarm(0)


def verdict(read: Any, path: Path) -> str:
    try:
        read(path)
    except BadImage as problem:
        return "rejected" if str(problem).isprintable() else f"unprintable: {problem!r}"
    return "ok"


def test_every_malicious_image_is_accepted_or_rejected_as_expected(tmp_path: Path) -> None:
    images = write_hostile_images(tmp_path)
    assert len(images) >= 60
    wrong = []
    for image in images:
        expected = "ok" if image.verdict == "ok" else "rejected"
        for read in (decode, read_image):
            found = verdict(read, image.path)
            if found != expected:
                wrong.append(f"{printable(image.name)}: {read.__name__}: {found} instead of {expected}")
    assert not wrong, "\n".join(wrong)
