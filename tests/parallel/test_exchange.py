"""Summing across processes keeps a tensor's shape and dtype, whether the tensor is small or large."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel import batchnorm
from paceline.parallel.batchnorm import sum_over_processes

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("few_bytes", [0, 2**16])
@pytest.mark.parametrize(
    "own",
    [torch.tensor(2), torch.tensor([1, 2], dtype=torch.int32), torch.tensor(1.5), torch.rand(2, 3), torch.zeros(0)],
    ids=["scalar", "32-bit integers", "fraction", "matrix", "empty"],
)
def test_a_sum_across_processes_keeps_the_shape_and_dtype(
    own: torch.Tensor, few_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchnorm, "SMALL_BYTES", few_bytes)
    found = sum_over_processes(own.clone())
    assert found.dtype == own.dtype and torch.equal(found, own)


def test_a_sum_across_processes_has_no_gradient() -> None:
    assert not sum_over_processes(torch.ones(2, requires_grad=True)).requires_grad
