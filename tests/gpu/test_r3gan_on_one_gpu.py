"""r3gan on one GPU: captured steps with penalties, classes, burn-in and adaptive augmentation; two processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from paceline.commands.configure import configure
from paceline.training.build import Parts, assemble
from paceline.training.graph import GraphedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STEPS = 40
ADA = {"ada": "blit,geometry,color", "ada_images": 2000, "ada_target": 0.0}


def trained(recipe: str, **settings: Any) -> Parts:
    """Train for a few steps without a run folder, and return the run's parts."""
    small = {"deterministic": True, "precision": "bf16", "images": 10**6, "burn_in": "400 images"} | settings
    parts = assemble(configure(recipe, small, small=True))
    parts.recipe.train()
    for data in parts.feed.steps(0, STEPS * parts.feed.images_per_step):
        parts.run_step(data)
    torch.cuda.synchronize()
    return parts


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("r3gan", {}),
        ("r3gan", {"conditional": "off", "precision": "fp32"}),
        ("r3gan", {"precision": "fp16"}),
        ("r3gan", ADA),
        ("r3gan", {"penalty_every": 2, "ada": "color"}),
        ("r3gan", {"ada": "blit,cutout", "ada_strength": 0.5, "full_width_px": 16}),
        ("dcgan", {**ADA, "r1": 1.0}),
        ("dual_gan", ADA),
    ],
    ids=str,
)
def test_a_captured_step_trains_the_same_weights_as_an_eager_step(recipe: str, settings: dict[str, Any]) -> None:
    captured, eager = trained(recipe, graph="on", **settings), trained(recipe, graph="off", **settings)
    assert isinstance(captured.run_step, GraphedStep) and captured.run_step.captured and not captured.run_step.failed
    for name, value in eager.recipe.state_dict().items():
        assert torch.equal(captured.recipe.state_dict()[name], value), name
    for name, learner in eager.step.learners.items():
        assert all(map(torch.equal, learner.ema, captured.step.learners[name].ema))
    for name, value in eager.step.signals.items():
        assert torch.equal(captured.step.signals[name], value), name
    if "ada_target" in settings and recipe != "r3gan":  # after so few steps, r3gan's discriminator is not certain
        assert 0 < eager.step.signals["augment_strength"] <= 0.8


def test_both_networks_are_compiled() -> None:
    parts = trained("r3gan", graph="auto", deterministic=False, compile=True)
    assert any(note.startswith("compile: on for 2 of 2 networks") for note in parts.notes), parts.notes
    assert all(value.isfinite().all() for value in parts.recipe.state_dict().values())


def test_two_processes_on_one_gpu_train_the_same_weights_as_one() -> None:
    words = [word for name, value in ADA.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "paceline", "verify", "r3gan", "--strategies", "single,ddp", "--gpus", "0,0"]
    done = subprocess.run([*command, "--backend", "gloo", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
