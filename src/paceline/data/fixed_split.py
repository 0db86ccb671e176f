"""The fixed split of sources that come without one."""

import numpy as np
from numpy.typing import NDArray

TEST_SHARE = 0.2
SPLIT_KEY = 1797  # never changes: results on the test split are compared between versions


def fixed_split(length: int, split: str) -> NDArray[np.int64]:
    """Return the samples of `split` in order: a fixed random fifth is for testing, the rest for training."""
    order = np.random.Generator(np.random.Philox(key=SPLIT_KEY)).permutation(length)
    num_test = max(1, round(length * TEST_SHARE))
    return np.sort(order[-num_test:] if split == "test" else order[:-num_test])
