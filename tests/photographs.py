"""Photographs for tests, loaded from the files bundled with Paceline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data.bundled import FOLDER
from paceline.images.decode import decode


def photograph(name: str) -> NDArray[np.uint8]:
    """Return the pixels of a bundled photograph, given its file name without the suffix."""
    (file,) = FOLDER.glob(f"{name}.*")
    return np.array(decode(file))
