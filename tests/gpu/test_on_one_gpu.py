"""Tests that need one GPU. For several devices, two processes or two DataParallel replicas share the GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.commands.configure import configure
from paceline.core.errors import UserError
from paceline.training.build import Parts, assemble
from paceline.training.graph import GraphedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STEPS = 40
PACELINE = [sys.executable, "-m", "paceline"]


def trained(recipe: str, steps: int = STEPS, **settings: Any) -> Parts:
    """Train for a few steps without a run folder, and return the run's parts."""
    small = {"deterministic": True, "precision": "bf16", "images": 10**6} | settings
    parts = assemble(configure(recipe, small, small=True))
    parts.recipe.train()
    for data in parts.feed.steps(0, steps * parts.feed.images_per_step):
        parts.entries = parts.run_step(data)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    return parts


CASES = [
    ("classification", {}),
    ("classification", {"precision": "fp16", "clip": 1.0, "ema_half_life": "200 images"}),
    ("classification", {"accumulate": 2, "optimizer": "adamw"}),
    ("classification", {"dropout": 0.5}),
    ("classification", {"mixup": 0.8, "cutmix": 1.0, "trivial_augment": True, "layer_decay": 0.7}),
    ("dcgan", {}),
    ("dcgan", {"r1": 1.0, "ema_half_life": "500 images"}),
    ("dual_gan", {}),
    ("super_resolution", {"stage": "pretrain", "norm": "none"}),
    ("super_resolution", {"stage": "adversarial"}),
    ("restoration", {"adversarial": 0.01, "perceptual": 0.1}),
    ("translation", {}),
    ("translation", {"norm": "instance", "padding": "reflect", "model": "pix2pix", "target": "dab"}),
]


CONVNEXT = {"network": "timm:convnext_tiny", "network_args": {"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 16]}}
VIT = {"network": "timm:vit_tiny_patch16_224", "network_args": {"depth": 2, "embed_dim": 24, "patch_size": 4}}
MODERN = {"optimizer": "adamw", "size": 32, "trivial_augment": True, "mixup": 0.8, "clip": 1.0, "layer_decay": 0.75}


@pytest.mark.parametrize("network", [CONVNEXT, VIT], ids=lambda one: str(one["network"]))
def test_a_captured_step_of_a_network_from_timm_is_bit_identical_to_an_eager_step(network: dict[str, Any]) -> None:
    pytest.importorskip("timm")
    check_capture("classification", {**network, **MODERN})


@pytest.mark.parametrize(("recipe", "settings"), CASES, ids=str)
def test_a_step_captured_as_a_cuda_graph_is_bit_identical_to_an_eager_step(
    recipe: str, settings: dict[str, Any]
) -> None:
    check_capture(recipe, settings)


def check_capture(recipe: str, settings: dict[str, Any]) -> None:
    """Assert that training with and without a CUDA graph gives the same weights, EMA and losses."""
    eager, graphed = trained(recipe, graph="off", **settings), trained(recipe, graph="on", **settings)
    assert isinstance(graphed.run_step, GraphedStep) and graphed.run_step.captured, "nothing was captured"
    ours, theirs = graphed.recipe.state_dict(), eager.recipe.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    for name, learner in eager.step.learners.items():
        for a, b in zip(learner.ema, graphed.step.learners[name].ema, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(eager.entries, graphed.entries, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(a.values, b.values)


@pytest.fixture
def waiting(tmp_path: Path) -> str:
    """The path to a recipe whose loss waits for the GPU, so that its step cannot be captured."""
    recipe = tmp_path / "waiting.py"
    recipe.write_text(
        "from paceline.contracts.recipe import Loss\n"
        "from paceline.recipes.classification import Classification\n\n\n"
        "class Waiting(Classification):\n"
        "    def classifier_loss(self, batch):\n"
        "        loss = super().classifier_loss(batch)\n"
        "        loss.terms['cross_entropy'].item()\n"
        "        return loss\n"
    )
    return str(recipe)


def test_a_recipe_that_waits_for_the_gpu_is_reported_and_trained_eagerly(
    waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = trained(waiting, steps=20, graph="auto")
    assert isinstance(parts.run_step, GraphedStep) and parts.run_step.failed
    printed = capsys.readouterr().out
    assert "classifier_loss" in printed and "waiting.py:8" in printed
    assert all(value.isfinite().all() for value in parts.recipe.state_dict().values())


def test_dropout_works_and_memory_does_not_grow_after_a_failed_capture(waiting: str) -> None:
    parts = trained(waiting, steps=20, graph="auto", dropout=0.5, loader="workers", workers=1)
    taken = torch.cuda.memory_allocated()
    per_step = parts.feed.images_per_step
    for data in parts.feed.steps(20 * per_step, 60 * per_step):
        parts.run_step(data)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= taken + 2**20


def test_graph_on_raises_if_the_step_cannot_be_captured(waiting: str) -> None:
    with pytest.raises(UserError, match=r"--graph on: classifier_loss \(.*waiting.py:8\) cannot be captured"):
        trained(waiting, steps=20, graph="on")
    torch.rand(3, device="cuda")  # fails if the process is still in capture mode


@pytest.mark.parametrize(
    ("strategies", "more"),
    [
        ("single,dp", ["--set", "norm=none", "--lr", "0.02"]),
        ("single,ddp", ["--backend", "gloo"]),
        ("single,lightning", ["--backend", "gloo"]),
    ],
)
def test_two_replicas_on_one_gpu_produce_the_same_weights_as_a_single_process(strategies: str, more: list[str]) -> None:
    command = [*PACELINE, "verify", "classification", "--strategies", strategies, "--gpus", "0,0", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan"])
def test_a_gradient_penalty_with_batchnorm_produces_the_same_weights_on_two_processes(recipe: str) -> None:
    command = [*PACELINE, "verify", recipe, "--strategies", "single,ddp", "--gpus", "0,0", "--set", "r1=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_ddp_step_over_nccl_is_captured_including_its_communication(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    command = [*PACELINE, "train", "dual_gan", "--strategy", "ddp", "--graph", "on", "--images", "1000", "--out", "run"]
    sizes = ["--set", "ngf=8", "--set", "ndf=8", "--batch-size", "32", "--set", "few_images=allow"]
    done = subprocess.run(
        command + sizes, cwd=tmp_path, env=os.environ | alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step: one CUDA graph" in done.stdout and "eager from now on" not in done.stdout


def test_a_recipe_with_many_networks_produces_the_same_weights_on_two_processes() -> None:
    command = [*PACELINE, "verify", "translation", "--strategies", "single,ddp", "--gpus", "0,0", "--backend", "gloo"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_killed_deterministic_run_resumes_and_ends_with_bit_identical_weights(tmp_path: Path, graph: str) -> None:
    def command(out: str) -> list[str]:
        length = ["--images", "40000", "--set", "save_every=100 steps", "--set", "keep=1"]
        return [
            *PACELINE,
            "train",
            "classification",
            "--preset",
            "quick",
            "--deterministic",
            "--graph",
            graph,
            *length,
            "--out",
            out,
        ]

    def final(out: Path) -> bytes:
        return max((out / "checkpoints").iterdir()).joinpath("weights.safetensors").read_bytes()

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(str(whole)), check=True, capture_output=True)
    running = subprocess.Popen(command(str(killed)), stdout=subprocess.DEVNULL)
    while not any((killed / "checkpoints").glob("0*")):
        assert running.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert max((killed / "checkpoints").glob("0*")).name < max((whole / "checkpoints").glob("0*")).name
    again = subprocess.run(command(str(killed)), check=True, capture_output=True, text=True)
    assert "resuming from" in again.stdout
    assert final(killed) == final(whole)
