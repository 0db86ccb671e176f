"""A fixed train/test split for data that has none."""

import numpy as np
from numpy.typing import NDArray

TEST_SHARE = 0.2
SPLIT_KEY = 1797  # must never change: test results are compared between versions


def fixed_split(length: int, split: str) -> NDArray[np.int64]:
    """Return the sorted sample indices of `split`: a fixed random fifth for testing, the rest for training."""
    order = np.random.Generator(np.random.Philox(key=SPLIT_KEY)).permutation(length)
    num_test = max(1, round(length * TEST_SHARE))
    return np.sort(order[-num_test:] if split == "test" else order[:-num_test])
