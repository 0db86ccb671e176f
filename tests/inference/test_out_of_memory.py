"""Out-of-memory errors are recognised on every platform and told apart from other errors."""

from __future__ import annotations

import pytest
import torch

from paceline.inference.tiles import is_out_of_memory


def raised_by_torch() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried"),
        raised_by_torch(),
    ],
)
def test_an_out_of_memory_error_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_are_not_mistaken_for_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("expected scalar type Float but found Half"))
