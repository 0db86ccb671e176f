"""The precision of float32 matrix products and convolutions on GPUs: full, or TF32 with a 10-bit mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions inside the context, whatever the run's precision is."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
