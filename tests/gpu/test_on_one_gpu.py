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
from paceline.runs.tensor_files import HostCopy
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


REAL = {"degradation": "second_order", "stage": "adversarial", "logits": "pixel", "relativistic": False}
ADA = {"ada": "blit,geometry,color", "ada_images": 2000, "ada_target": 0.0}
ESRGAN = {"ema_half_life": "100 images"}
R3GAN = {"burn_in": "400 images"}
MODERN = {"optimizer": "adamw", "size": 32, "trivial_augment": True, "mixup": 0.8, "clip": 1.0, "layer_decay": 0.75}
NAFNET = {"width": 8, "enc_blk_nums": [1, 1], "middle_blk_num": 1, "dec_blk_nums": [1, 1]}
SWINIR = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "mlp_ratio": 2.0}


def library(network: str, arguments: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the settings for a network from timm or spandrel."""
    return {"network": network, "network_args": arguments, **settings}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("classification", {}),
    ("classification", {"precision": "fp16", "clip": 1.0, "ema_half_life": "200 images"}),
    ("classification", {"accumulate": 2, "optimizer": "adamw"}),
    ("classification", {"dropout": 0.5}),
    ("classification", {"mixup": 0.8, "cutmix": 1.0, "trivial_augment": True, "layer_decay": 0.7}),
    ("classification", library("timm:convnext_tiny", {"depths": [1, 1, 1, 1], "dims": [8, 16, 16, 16]}, **MODERN)),
    ("classification", library("timm:vit_tiny_patch16_224", {"depth": 2, "embed_dim": 24, "patch_size": 4}, **MODERN)),
    ("dcgan", {}),
    ("dcgan", {"r1": 1.0, "ema_half_life": "500 images"}),
    ("dcgan", {**R3GAN, **ADA, "r1": 1.0}),
    ("dual_gan", {}),
    ("dual_gan", {**R3GAN, **ADA}),
    ("esrgan", ESRGAN),
    ("esrgan", ESRGAN | REAL),
    ("esrgan", ESRGAN | REAL | {"degradation_order": "fixed"}),
    ("esrgan", ESRGAN | {"stage": "adversarial", "ssim": 0.1, "fft": 0.1}),
    ("r3gan", R3GAN),
    ("r3gan", {**R3GAN, "conditional": "off", "precision": "fp32"}),
    ("r3gan", {**R3GAN, "precision": "fp16"}),
    ("r3gan", {**R3GAN, **ADA}),
    ("r3gan", {**R3GAN, "penalty_every": 2, "ada": "color"}),
    ("r3gan", {**R3GAN, "ada": "blit,cutout", "ada_strength": 0.5, "full_width_px": 16}),
    ("super_resolution", {"stage": "pretrain", "norm": "none"}),
    ("super_resolution", {"stage": "adversarial"}),
    ("super_resolution", library("spandrel:SwinIR", SWINIR, scale="2")),
    ("super_resolution", library("spandrel:HAT", {**SWINIR, "compress_ratio": 2, "squeeze_factor": 4}, scale="2")),
    ("super_resolution", library("spandrel:SPAN", {"feature_channels": 8}, scale="2")),
    ("super_resolution", library("spandrel:RCAN", {"n_resgroups": 1, "n_resblocks": 2, "n_feats": 16}, scale="4")),
    ("super_resolution", library("spandrel:ESRGAN", {"num_filters": 8, "num_blocks": 1}, scale="4")),
    ("restoration", {"adversarial": 0.01, "perceptual": 0.1}),
    ("restoration", library("spandrel:NAFNet", NAFNET)),
    ("restoration", library("spandrel:SwinIR", SWINIR, crop=24)),
    ("translation", {}),
    ("translation", {"norm": "instance", "padding": "reflect", "model": "pix2pix", "target": "dab"}),
]


@pytest.mark.parametrize(("recipe", "settings"), CASES, ids=str)
def test_a_step_captured_as_a_cuda_graph_is_bit_identical_to_an_eager_step(
    recipe: str, settings: dict[str, Any]
) -> None:
    """Training with and without a CUDA graph gives the same weights, EMA, signals and losses."""
    if provider := str(settings.get("network", "")).partition(":")[0]:
        pytest.importorskip(provider)
    eager, graphed = trained(recipe, graph="off", **settings), trained(recipe, graph="on", **settings)
    assert isinstance(graphed.run_step, GraphedStep) and graphed.run_step.captured, "nothing was captured"
    ours, theirs = graphed.recipe.state_dict(), eager.recipe.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    for name, learner in eager.step.learners.items():
        assert all(map(torch.equal, learner.ema, graphed.step.learners[name].ema))
    for name, value in eager.step.signals.items():
        assert torch.equal(graphed.step.signals[name], value), name
    for a, b in zip(eager.entries, graphed.entries, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(a.values, b.values)
    if "ada_target" in settings and recipe != "r3gan":  # after so few steps, r3gan's discriminator is not certain
        assert 0 < eager.step.signals["augment_strength"] <= 0.8


def test_both_networks_of_a_gan_are_compiled() -> None:
    parts = trained("r3gan", graph="auto", deterministic=False, compile=True, **R3GAN)
    assert any(note.startswith("compile: on for 2 of 2 networks") for note in parts.notes), parts.notes
    assert all(value.isfinite().all() for value in parts.recipe.state_dict().values())


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
    ("recipe", "strategy", "settings"),
    [
        ("classification", "dp", {"norm": "none", "lr": 0.02}),
        ("classification", "ddp", {}),
        ("classification", "lightning", {}),
        ("dcgan", "ddp", {"r1": 1}),
        ("dual_gan", "ddp", {"r1": 1}),
        ("translation", "ddp", {}),
        ("esrgan", "ddp", REAL),
        ("r3gan", "ddp", ADA),
        *((recipe, "fsdp", {}) for recipe in ("classification", "dcgan", "super_resolution", "translation")),
    ],
    ids=str,
)
def test_two_replicas_on_one_gpu_produce_the_same_weights_as_a_single_process(
    recipe: str, strategy: str, settings: dict[str, Any]
) -> None:
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [*PACELINE, "verify", recipe, "--strategies", f"single,{strategy}", "--gpus", "0,0"]
    done = subprocess.run([*command, "--steps", "5", *words], capture_output=True, text=True)
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


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_killed_deterministic_run_resumes_and_ends_with_bit_identical_weights(tmp_path: Path, graph: str) -> None:
    def command(out: str) -> list[str]:
        length = ["--images", "40000", "--set", "save_every=100 steps", "--set", "keep=1"]
        words = ["train", "classification", "--preset", "quick", "--deterministic", "--graph", graph]
        return [*PACELINE, *words, *length, "--out", out]

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
