"""The precision of float32 matrix products and convolutions on GPUs: full, or TF32 with a 10-bit mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in matrix products and convolutions in this process."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")


@contextmanager
def keeping_tf32() -> Iterator[None]:
    """Restore at the end whether TF32 is allowed."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Allow or forbid TF32 inside the context, whatever the run's precision is."""
    with keeping_tf32():
        allow_tf32(tf32)
        yield
