"""Photographs for tests, from those that ship with Paceline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data.bundled import FOLDER
from paceline.images.decode import decode


def photograph(name: str) -> NDArray[np.uint8]:
    """Return a bundled photograph by the name of its file without the suffix."""
    (file,) = FOLDER.glob(f"{name}.*")
    return np.array(decode(file))
