"""ESRGAN and its degradations on one GPU: captured steps, equality with the CPU, two processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from paceline.commands.configure import configure
from paceline.images.degradation.parameters import NUM_NUMBERS, NUM_ORDER_NUMBERS
from paceline.images.degradation.second_order import degrade
from paceline.training.build import Parts, assemble
from paceline.training.graph import GraphedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

REAL = {"degradation": "second_order", "stage": "adversarial", "logits": "pixel", "relativistic": False}


def trained(**settings: Any) -> Parts:
    small = {"deterministic": True, "precision": "bf16", "images": 10**6, "ema_half_life": "100 images"} | settings
    parts = assemble(configure("esrgan", small, small=True))
    parts.recipe.train()
    for data in parts.feed.steps(0, 30 * parts.feed.images_per_step):
        parts.run_step(data)
    torch.cuda.synchronize()
    return parts


@pytest.mark.parametrize(
    "settings", [{}, REAL, REAL | {"degradation_order": "fixed"}, {"stage": "adversarial", "ssim": 0.1, "fft": 0.1}]
)
def test_a_captured_step_trains_the_same_weights_as_an_eager_step(settings: dict[str, Any]) -> None:
    captured, eager = trained(graph="on", **settings), trained(graph="off", **settings)
    assert isinstance(captured.run_step, GraphedStep) and not captured.run_step.failed
    for name, value in eager.recipe.state_dict().items():
        assert torch.equal(captured.recipe.state_dict()[name], value), name


def test_degraded_images_on_the_gpu_equal_those_on_the_cpu_apart_from_rare_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 16, 16, generator=generator)
    images = torch.nn.functional.interpolate(images, (128, 128), mode="bicubic").clamp(0, 1) * 2 - 1
    numbers, orders = (torch.rand(8, count, generator=generator) for count in (NUM_NUMBERS, NUM_ORDER_NUMBERS))
    on_cpu = degrade(images.double(), numbers.double(), 4, orders=orders)
    on_gpu = degrade(images.cuda().double(), numbers.cuda().double(), 4, orders=orders.cuda()).cpu()
    assert ((on_cpu - on_gpu).abs() > 1e-6).double().mean() < 0.001


def test_degraded_images_on_the_gpu_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 128, 128, generator=generator).cuda() * 2 - 1
    numbers, orders = (torch.rand(8, count, generator=generator).cuda() for count in (NUM_NUMBERS, NUM_ORDER_NUMBERS))
    together = degrade(images, numbers, 4, orders=orders)
    alone = degrade(images[3:4], numbers[3:4], 4, orders=orders[3:4])
    assert ((together[3:4] - alone).abs() > 1e-6).float().mean() < 0.001


def test_two_processes_on_one_gpu_train_the_same_weights_as_one() -> None:
    words = [word for name, value in REAL.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "paceline", "verify", "esrgan", "--strategies", "single,ddp", "--gpus", "0,0"]
    done = subprocess.run([*command, "--backend", "gloo", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
