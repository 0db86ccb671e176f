"""The name of a run's data, for the names of metrics."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from paceline.config.settings import RunSettings
from paceline.core.registry import is_path, load_class
from paceline.data.source import Source

MAX_LENGTH = 80


def data_name(source: str, root: str) -> str:
    """Return the name of the data: of its source or, if the source reads any data, of the file or folder that it reads.

    For example, `cifar10` for the source `cifar10`, and for the source `npz` with the file `cifar10.npz`. A source in a
    user's own file is not loaded, because the name of a run's data must not require trust in its code.
    """
    name = clean_name(Path(source).stem)
    is_default = root in ("", RunSettings.data_root)
    if is_default or is_path(source) or not load_class("source", source, Source).reads_any_data:
        return name
    place = urlsplit(root).path if "://" in root else root  # host and query may contain credentials
    return clean_name(Path(place).name.removesuffix(".npz")) or name


def clean_name(text: str) -> str:
    """Return text that can be part of a metric's name."""
    return re.sub(r"[^\w.-]+", "-", text)[:MAX_LENGTH].strip("-")
