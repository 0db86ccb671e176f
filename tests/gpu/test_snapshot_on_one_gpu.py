"""Copies of GPU tensors are not affected by later training steps."""

from __future__ import annotations

import pytest
import torch

from paceline.runs.tensor_files import HostCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_copies_contain_the_gpu_state_at_the_time_of_the_request() -> None:
    weight = torch.randn(64, 32, 3, 3, device="cuda").to(memory_format=torch.channels_last)
    tensors = {"a": weight, "b": weight, "step": torch.tensor(3.0, device="cuda"), "on_cpu": torch.ones(2)}
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    for _ in range(20):
        large = torch.randn(4096, 4096, device="cuda")
        weight.add_((large @ large).mean())  # this addition is still queued when the copies are requested
        expected = {name: tensor.cpu() for name, tensor in tensors.items()}
        copies = HostCopy(tensors).wait()
        weight.mul_(2)
        assert all(copy.device.type == "cpu" for copy in copies.values()) and copies["a"] is copies["b"]
        assert all(torch.equal(copies[name], expected[name]) for name in tensors)
        assert not torch.equal(copies["a"], before["a"])
