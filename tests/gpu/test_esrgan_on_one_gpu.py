"""ESRGAN's degradations on one GPU: captured, by Triton kernels, and compared with the CPU."""

from __future__ import annotations

import pytest
import torch

from paceline.images.degradation import second_order
from paceline.images.degradation.second_order import NUM_NUMBERS, degrade, fastest_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def inputs(channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight smooth images and their random numbers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, channels, 16, 16, generator=generator)
    images = torch.nn.functional.interpolate(images, (128, 144), mode="bicubic").clamp(0, 1) * 2 - 1
    return images.cuda(), torch.rand(8, NUM_NUMBERS, generator=generator).cuda()


def test_degraded_images_on_the_gpu_equal_those_on_the_cpu_apart_from_rare_rounding() -> None:
    images, numbers = inputs()
    on_cpu = degrade(images.cpu().double(), numbers.cpu().double(), 4)
    on_gpu = degrade(images.double(), numbers.double(), 4).cpu()
    assert ((on_cpu - on_gpu).abs() > 1e-6).double().mean() < 0.001


@pytest.mark.parametrize("channels", [1, 3])
def test_triton_kernels_degrade_images_as_torch_does_apart_from_rare_rounding(channels: int) -> None:
    pytest.importorskip("triton")
    torch.set_float32_matmul_precision("high")  # as in a run with bf16; degradations are still computed in float32
    images, numbers = inputs(channels)
    assert fastest_steps(images) is not second_order.TORCH_STEPS
    found = degrade(images, numbers, 4)
    wanted = degrade(images, numbers, 4, steps=second_order.TORCH_STEPS)
    difference = (found - wanted).abs()
    # One pixel that is rounded differently in the first round changes its neighbours in the next rounds. On one H200,
    # up to 1.6 % of an image's values differed in the median.
    assert difference.mean() * 127.5 < 0.5
    assert (difference > 1e-6).float().mean((1, 2, 3)).median() < 0.05


def test_a_captured_degradation_has_the_bits_of_an_eager_one() -> None:
    images, numbers = inputs()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            degrade(images, numbers, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = degrade(images, numbers, 4)
    numbers.copy_(numbers.flip(0))
    graph.replay()
    assert torch.equal(captured, degrade(images, numbers, 4))


def test_a_degraded_image_on_the_gpu_has_the_same_bits_in_any_batch() -> None:
    images, numbers = inputs()
    together = degrade(images, numbers, 4)
    alone = degrade(images[3:4], numbers[3:4], 4)
    assert torch.equal(together[3:4], alone)
