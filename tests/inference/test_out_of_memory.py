"""Out-of-memory errors are recognised on every platform and told apart from other errors."""

from __future__ import annotations

import pytest
import torch

from paceline.inference.tiles import is_out_of_memory


def test_an_out_of_memory_error_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised_by_torch:
        torch.empty(10**15)
    failed = "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried"
    errors = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(failed), raised_by_torch.value]
    assert all(map(is_out_of_memory, errors))
    assert not is_out_of_memory(RuntimeError("expected scalar type Float but found Half"))
