"""Copies of GPU tensors are not affected by later training steps."""

from __future__ import annotations

import pytest
import torch

from paceline.runs.tensor_files import HostCopy, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_copies_contain_the_gpu_state_at_the_time_of_the_request() -> None:
    weight = torch.randn(64, 32, 3, 3, device="cuda").to(memory_format=torch.channels_last)
    tensors = {"a": weight, "b": weight, "step": torch.tensor(3.0, device="cuda"), "on_cpu": torch.ones(2)}
    bytes_before = pack(tensors)
    for _ in range(20):
        large = torch.randn(4096, 4096, device="cuda")
        weight.add_((large @ large).mean())  # this addition is still queued when the copies are requested
        expected = pack(tensors)
        copies = HostCopy(tensors).wait()
        weight.mul_(2)
        assert all(copy.device.type == "cpu" for copy in copies.values()) and copies["a"] is copies["b"]
        assert pack(copies) == expected != bytes_before
