"""A stranger's packed folder is validated as a whole before use, even if all of its checksums are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hostile_packs import DAMAGES, GOOD, Pack

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.source import check_split
from paceline.data.sources.packed import Packed

PLACE_ELSEWHERE = "another image's checksum"  # found when the image is read


def open_packed(root: Path) -> Packed:
    settings = RunSettings(data="packed", data_root=str(root), workers=0)
    Packed.splits_of(settings)
    source = Packed("train", settings)
    check_split(source, "train", "packed")
    return source


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_pack_with_right_checksums_but_wrong_content_is_rejected_in_one_line(damage: str, tmp_path: Path) -> None:
    pack = Pack()
    DAMAGES[damage](pack)
    pack.write(tmp_path / "in" / "packed")
    (tmp_path / "outside.pixels").write_bytes(pack.train.pixels.get("image", b""))
    with pytest.raises(UserError, match="packed") as caught:
        source = open_packed(tmp_path / "in" / "packed")
        if damage == PLACE_ELSEWHERE:
            source.read_many(np.arange(len(source)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 + 2 * len(str(tmp_path))


@pytest.mark.parametrize("kind", GOOD)
def test_a_valid_pack_from_another_program_is_read(kind: str, tmp_path: Path) -> None:
    pack = Pack()
    GOOD[kind](pack)
    pack.write(tmp_path / "packed")
    source = open_packed(tmp_path / "packed")
    found = source.read_many(np.arange(len(source)))
    assert np.array_equal(found["image"], pack.train.images)
    assert np.array_equal(found["label"], pack.index[:, -1])
