"""EMA weights are evaluated and saved with BatchNorm statistics of their own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import make_parts, run_steps
from torch import Tensor, nn

import paceline
from paceline.cli.app import run as cli
from paceline.contracts.recipe import Batch
from paceline.training.build import Parts
from paceline.training.evaluate import EvaluatedWeights, _use_own, averaged_norms
from paceline.training.resume import check_fits, restore_snapshot, take_snapshot

BY_CLASS = """
from tiny_gan import TinyGan
from torch import nn
from paceline import Draw


class ByClass(TinyGan):
    def __init__(self, settings, spec):
        super().__init__(settings, spec)
        self.generator = nn.Sequential(self.generator, nn.BatchNorm1d(64))
        self.draws |= {"class": Draw((), "uniform")}
        self.num_classes, self.generated = spec.num_classes, []

    def predict(self, batch):
        if not self.training:
            self.generated += (batch["class"] * self.num_classes).long().tolist()
        return super().predict(batch)
"""
TIED = """
from torch import nn
from paceline import Evaluation, Loss, Phase, Recipe


class Tied(Recipe):
    phases = (Phase("fit", "net"),)
    ema = ("net",)
    evaluation = Evaluation("accuracy", best="validation/loss", mode="min")

    def __init__(self, settings, spec):
        super().__init__(settings, spec)
        block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), block, block, nn.Flatten(), nn.Linear(4 * 6 * 6, 10))

    def fit_loss(self, batch):
        return Loss({"loss": nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])})

    def predict(self, batch):
        return {"logits": self.net(batch["image"])}
"""
FAST = {"lr": 0.02, "ema_half_life": "400 images"}
SMALL = {"data": "digits", "nz": 16, "ngf": 4, "ndf": 4, "batch_size": "16", "accelerator": "cpu", "validation": 0.0}
STEPS = 60


@pytest.fixture(scope="module")
def gan() -> Parts:
    """A GAN whose generator's weights changed quickly, so that they differ much from their EMA."""
    parts = make_parts("dcgan", **SMALL, **FAST)
    run_steps(parts, STEPS)
    return parts


def evaluated(parts: Parts) -> EvaluatedWeights:
    """Return the weights that are evaluated, with statistics that are not recomputed yet."""
    return EvaluatedWeights(parts.step, parts.feed)


def variances(parts: Parts, batch: Batch) -> list[float]:
    """Return the mean variance of what each evaluated BatchNorm returns before its weight and bias."""
    found: list[float] = []

    def record(norm: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
        scale = (norm.running_var + norm.eps).sqrt().view(1, -1, 1, 1)
        found.append((inputs[0] / scale).var((0, 2, 3)).mean().item())

    handles = [norm.register_forward_hook(record) for norm in averaged_norms(parts.step).values()]
    with torch.no_grad():
        parts.recipe.eval().predict(batch)
    parts.recipe.train()
    for handle in handles:
        handle.remove()
    return found


def test_batchnorm_normalises_the_activations_of_ema_weights(gan: Parts) -> None:
    other = next(gan.feed.steps(640, 641)).fetched[0][0]
    batch = gan.step.finish(other | gan.feed.drawer.table(640, len(other["index"])))
    with gan.step.learners[gan.recipe.ema[0]].ema_weights():
        with_latest_statistics = variances(gan, batch)
    with evaluated(gan).at(0):
        with_own_statistics = variances(gan, batch)
    assert all(0.7 < variance < 1.4 for variance in with_own_statistics), with_own_statistics
    assert not all(0.7 < variance < 1.4 for variance in with_latest_statistics), with_latest_statistics


def test_training_continues_with_its_own_statistics_and_random_state(gan: Parts) -> None:
    before = {name: buffer.clone() for name, buffer in gan.recipe.named_buffers()}
    state, hooks = torch.get_rng_state(), [module._forward_pre_hooks for module in gan.recipe.modules()]
    with evaluated(gan).at(0):
        assert gan.recipe.training
        assert not torch.equal(gan.recipe.generator.main[1].running_var, before["generator.main.1.running_var"])
    assert all(torch.equal(buffer, before[name]) for name, buffer in gan.recipe.named_buffers())
    assert not any(hooks) and torch.equal(torch.get_rng_state(), state)
    first = evaluated(gan).statistics(0)
    torch.rand(3)
    second = evaluated(gan).statistics(0)
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    assert not evaluated(make_parts("dcgan", **SMALL)).statistics(0), "networks without an EMA need no statistics"


def test_a_batch_with_one_value_per_channel_has_statistics() -> None:
    norm, found = nn.BatchNorm1d(3).double().eval(), []
    _use_own(found, norm, (torch.ones(1, 3, dtype=torch.float64),), {})
    assert all(torch.isfinite(value).all() for value in found[0])


def test_a_layer_may_be_called_with_its_input_as_a_keyword(gan: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = evaluated(gan).statistics(0)
    layers = gan.recipe.generator.main

    def by_keyword(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(input=x)
        return x

    monkeypatch.setattr(layers, "forward", by_keyword)
    found = evaluated(gan).statistics(0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_layer_that_stays_in_eval_mode_keeps_its_statistics() -> None:
    parts = make_parts("dcgan", **SMALL, **FAST)
    frozen, trained = parts.recipe.generator.main[1], parts.recipe.generator.main[4]
    frozen.train = lambda mode=True: type(frozen).train(frozen, False)
    run_steps(parts, 2)
    expected = frozen.running_var.clone()
    with evaluated(parts).at(0):
        assert torch.equal(frozen.running_var, expected)
        assert not torch.equal(trained.running_var, torch.ones_like(trained.running_var))
        assert parts.recipe.training and not frozen.training


def test_the_statistics_are_recomputed_only_after_training_steps() -> None:
    parts = make_parts("dcgan", **SMALL, **FAST)
    run_steps(parts, 2)
    weights, norm = evaluated(parts), parts.recipe.generator.main[1]
    with weights.at(32):
        first = norm.running_var.clone()
    assert torch.equal(weights.statistics(32)["ema/generator.main.1.running_var"], first)
    parts.recipe.predict = None  # type: ignore[assignment]  # nothing is predicted to use the same statistics again
    with weights.at(32):
        assert torch.equal(norm.running_var, first)
    del parts.recipe.predict
    run_steps(parts, 2)
    assert not torch.equal(weights.statistics(64)["ema/generator.main.1.running_var"], first)


def test_a_run_resumes_from_a_checkpoint_with_or_without_these_statistics(gan: Parts) -> None:
    taken = take_snapshot(STEPS * 16, gan.step, None, -1, evaluated(gan).statistics(0))()
    assert "ema/generator.main.1.running_var" in taken.weights
    old = replace(taken, weights=taken.weights | {})
    for name in evaluated(gan).statistics(0):
        del old.weights[name]
    for snapshot in (taken, old):
        fresh = make_parts("dcgan", **SMALL, **FAST)
        check_fits(snapshot, fresh.step)
        restore_snapshot(snapshot, fresh.step)
        again = evaluated(fresh).statistics(0)
        assert all(torch.equal(again[name], taken.weights[name]) for name in again)


def test_the_statistics_of_a_generator_by_class_are_those_of_the_classes_in_the_data(tmp_path: Path) -> None:
    recipe, data, labels = tmp_path / "by_class.py", tmp_path / "rare.npz", np.repeat([0, 2], [38, 2])
    recipe.write_text(BY_CLASS)
    np.savez(data, x_train=np.zeros((40, 8, 8), np.uint8), y_train=labels)
    parts = make_parts(str(recipe), data="npz", data_root=str(data), evaluate_every="never")
    assert evaluated(parts).statistics(0)
    shares = np.bincount(parts.recipe.generated, minlength=3) / len(parts.recipe.generated)
    assert shares == pytest.approx([0.95, 0, 0.05], abs=0.01)


def test_a_saved_generator_has_the_same_metrics_as_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    length = {"images": 960, "evaluate_every": "100%", "generated_images": 64, "few_images": "allow"}
    trained = paceline.train("dcgan", out="run", **FAST, **length, **SMALL)
    capsys.readouterr()
    assert cli(["evaluate", "run", "--accelerator", "cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    shown = {f"train/{name}": float(value) for name, value in lines}
    assert shown["train/FID[pixels-8x8]"] == pytest.approx(trained.metrics["train/FID[pixels-8x8]"], rel=1e-3)


def test_a_checkpoint_of_tied_modules_is_evaluated_with_the_same_ema_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tied.py").write_text(TIED)
    settings = ("--set", "size=8", "--set", "ema_half_life=400 images", "--lr", "0.1", "--images", "640")
    assert cli(["train", "tied.py", "--data", "digits", "--accelerator", "cpu", "--out", "run", *settings]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    expected = next(line["validation/loss"] for line in reversed(lines) if "validation/loss" in line)
    assert cli(["evaluate", "run", "--checkpoint", "last", "--split", "validation", "--trust"]) == 0
    found = re.search(r"^  loss +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert found and float(found[1]) == pytest.approx(expected, rel=1e-6)
