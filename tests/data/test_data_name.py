"""The name of a run's data: the source's or, for sources that read any data, that of the file or folder."""

from __future__ import annotations

import pytest

from paceline.config.settings import RunSettings
from paceline.data.open_sources import data_name


@pytest.mark.parametrize(
    ("source", "root", "name"),
    [
        ("digits", "elsewhere", "digits"),
        ("cifar10", "downloads", "cifar10"),
        ("npz", "arrays/cifar10.npz", "cifar10"),
        ("npz", "my cats & dogs.npz", "my-cats-dogs"),
        ("folder", "photos/birds-v1.5/", "birds-v1.5"),
        ("packed", ".", "packed"),
        ("folder", RunSettings.data_root, "folder"),
        ("shards", "s3://bucket/flowers", "flowers"),
        ("shards", "https://user:secret@host?token=secret", "shards"),
        ("./not_loaded.py", "birds", "not_loaded"),
    ],
)
def test_data_is_named_after_its_source_or_its_root(source: str, root: str, name: str) -> None:
    assert data_name(source, root) == name
