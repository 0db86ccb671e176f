"""Small runs that the tests of this folder start, stop and kill."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> str:
    """The path of a recipe whose steps take a millisecond."""
    return str(Path(__file__).with_name("tiny.py"))
