import torch
from torch import nn

from paceline.models.concurrent import apply_concurrently


def test_networks_that_run_concurrently_compute_the_same_results_as_one_after_another():
    torch.manual_seed(0)
    networks, images = (nn.Conv2d(3, 1, 3), nn.Conv2d(3, 2, 3)), torch.rand(2, 3, 8, 8)
    outputs = apply_concurrently(networks, images)
    assert [output.shape[1] for output in outputs] == [1, 2]
    assert all(torch.equal(output, network(images)) for output, network in zip(outputs, networks, strict=True))
