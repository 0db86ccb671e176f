"""A training step computes the same result with any number of processes."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from ranks import difference, make_parts, note_steps, run_steps, spoil_and_check, weights
from running import run_fork, start_function_in_ranks
from sharded import Case, trace_all
from torch import nn

from paceline.commands.verify import compare
from paceline.config.settings import LearnerSettings
from paceline.contracts.recipe import Phase
from paceline.core.errors import UserError
from paceline.parallel.precision import Precision
from paceline.training.build import schedule_of
from paceline.training.learner import Learner
from paceline.training.log import LossLog
from paceline.training.resume import restore_snapshot, take_snapshot
from paceline.training.step import groups

STEPS = 4


@pytest.fixture(scope="session")
def duet() -> str:
    """The path to a recipe with two networks and three phases."""
    return str(Path(__file__).parents[1] / "duet.py")


def seen_by(parts: Any, phase: str) -> list[dict[str, torch.Tensor]]:
    return [batch for name, batch in parts.recipe.seen if name == phase]


@pytest.fixture(scope="module")
def watched() -> Any:
    """Train the two-network test recipe for seven steps in one process and record all inputs."""
    parts = make_parts(str(Path(__file__).parents[1] / "duet.py"))
    parts.recipe.watched = True
    run_steps(parts, 7)
    return parts


def test_each_phase_runs_as_often_as_declared_and_repetitions_use_new_data(watched: Any) -> None:
    order = [phase for phase, _ in watched.recipe.seen]
    plain = ["generator", "critic", "critic"]
    assert order == [*plain, "penalty", *plain, *plain] * 2 + [*plain, "penalty"]
    assert watched.feed.images_per_step == 2 * 24
    samples = [batch["index"].tolist() for batch in seen_by(watched, "critic")]
    flat = [sample for batch in samples for sample in batch]
    assert len(set(flat)) == len(flat) == 7 * 48, "no sample comes twice in an epoch"
    assert [batch["index"].tolist() for batch in seen_by(watched, "generator")] == samples[::2]
    assert not torch.equal(seen_by(watched, "critic")[0]["noise"], seen_by(watched, "critic")[1]["noise"])


def test_shared_tensors_are_passed_to_later_phases_with_the_same_data(watched: Any) -> None:
    critics = seen_by(watched, "critic")
    assert all("fake" in batch for batch in critics[::2]) and not any("fake" in batch for batch in critics[1::2])
    assert len(critics[0]["fake"]) == 24
    assert not torch.equal(critics[0]["fake"], critics[2]["fake"])


def test_a_phase_receives_the_latest_signals_from_this_or_the_previous_step(watched: Any) -> None:
    generators, critics = seen_by(watched, "generator"), seen_by(watched, "critic")
    assert generators[0]["gap"].unique().item() == 0.5, "the value before the first step"
    for step in range(7):
        level = critics[2 * step]["fake"].mean().item()
        for batch in critics[2 * step : 2 * step + 2]:
            assert batch["level"].tolist() == pytest.approx([level] * 24, abs=1e-15)
    gaps = [batch["gap"][0].item() for batch in generators]
    assert len(set(gaps)) == 7
    assert gaps[1] != critics[1]["gap"][0].item(), "the second repetition's gap, not the first's"
    assert seen_by(watched, "penalty")[0]["gap"][0].item() == gaps[1]


def test_signals_optimizers_and_emas_are_restored_from_a_snapshot(watched: Any, duet: str) -> None:
    taken = take_snapshot(336, watched.step, None, -1, {})()
    fresh = make_parts(duet)
    restore_snapshot(taken, fresh.step)
    again = take_snapshot(336, fresh.step, None, -1, {})()
    for before, after in ((taken.weights, again.weights), (taken.state, again.state)):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert {"signals/gap", "signals/level", "critic/0.weight/exp_avg"} <= taken.state.keys()
    assert "ema/generator.0.weight" in taken.weights and "ema/critic.0.weight" not in taken.weights


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, np.ndarray]]]:
    """Train the two-network test recipe in 1, 2 and 3 processes and load what each rank recorded."""
    folder = tmp_path_factory.mktemp("spread")
    duet = str(Path(__file__).parents[1] / "duet.py")
    running = {}
    for size in (1, 2, 3):
        settings = {"devices": size, "batch_size": "25", "accumulate": 2, "lr": 1e-3}
        running[size] = start_function_in_ranks(folder, size, note_steps, f"steps-{size}", duet, STEPS, settings)
    for ranks in running.values():
        assert [rank.wait() for rank in ranks] == [0] * len(ranks), "\n".join(rank.stderr for rank in ranks)
    return {size: [dict(np.load(folder / f"steps-{size}-{rank}.npz")) for rank in range(size)] for size in running}


def joined(ranks: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([notes[name] for notes in ranks])


def test_samples_and_random_numbers_do_not_depend_on_the_number_of_processes(spread: dict[int, Any]) -> None:
    names = [name for name in spread[1][0] if name.endswith(("/index", "/noise", "/mix"))]
    assert len(names) == 3 * 2 * (STEPS * 3 + 2)
    for name in names:
        for size in (2, 3):
            assert np.array_equal(joined(spread[size], name), spread[1][0][name])
    for size in (2, 3):
        rows = {row.tobytes() for notes in spread[size] for row in notes["000/generator/noise"]}
        assert len(rows) == len(spread[1][0]["000/generator/noise"]), "ranks hold different rows"


def test_signals_and_weights_do_not_depend_on_the_number_of_processes(spread: dict[int, Any]) -> None:
    alone = spread[1][0]
    for size in (2, 3):
        for kind in ("signals/", "weights/"):
            for notes in spread[size]:
                found = {name: notes[name] for name in alone if name.startswith(kind)}
                assert difference({name: alone[name] for name in found}, found) < 1e-9
        for name in (name for name in alone if name[0].isdigit() and name.endswith(("/gap", "/level", "/real"))):
            column = joined(spread[size], name)
            assert len(set(column.tolist())) == 1, "a fact is the same for all samples of all ranks"


def test_every_sample_is_evaluated_once_with_any_number_of_processes(spread: dict[int, Any]) -> None:
    for size, ranks in spread.items():
        assert Counter(joined(ranks, "evaluated").tolist()) == Counter(range(144)), size
        for notes in ranks:
            assert notes["results/count"] == 144
            assert notes["results/loss"] == pytest.approx(float(spread[1][0]["results/loss"]), rel=1e-9)


def test_gradient_accumulation_equals_one_large_batch_without_batchnorm(duet: str, tiny: str) -> None:
    for recipe in (duet, tiny):
        whole, parted = (make_parts(recipe, norm="none", batch_size="26", accumulate=count) for count in (1, 4))
        for parts in (whole, parted):
            run_steps(parts, 3)
        assert difference(weights(whole), weights(parted)) < 1e-12


@pytest.mark.parametrize(("clip", "shortened"), [(0.01, True), (1e6, False)])
def test_gradient_clipping_changes_only_gradients_above_the_limit(tiny: str, clip: float, shortened: bool) -> None:
    parts = make_parts(tiny, clip=clip, optimizer="sgd", momentum=0.0, schedule="constant", lr=1.0)
    before = [p.detach().clone() for p in parts.recipe.parameters()]
    gradients: list[torch.Tensor] = []
    parts.recipe.train()
    data = next(parts.feed.steps(0, 16))
    parts.step(data, watch=lambda phase, learner: gradients.extend(p.grad.clone() for p in learner.parameters))
    after = [p.detach() for p in parts.recipe.parameters()]
    length, moved = norm(gradients), norm([a - b for a, b in zip(after, before, strict=True)])
    assert (length > clip) == shortened
    assert moved == pytest.approx(clip if shortened else length, rel=1e-4)


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def test_the_ema_half_life_is_counted_in_images() -> None:
    network = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(network.weight)
    learner = Learner("network", network, LearnerSettings(), lambda images: 0.0, Precision("fp64", "cpu"), 1000)
    nn.init.ones_(network.weight)
    for images, expected in ((250, 1 - 0.5**0.25), (750, 0.5), (1000, 0.75)):
        learner.update_ema(images)
        assert learner.ema[0].item() == pytest.approx(expected, abs=1e-12)
    with learner.ema_weights():
        assert network.weight.item() == pytest.approx(0.75)
    assert network.weight.item() == 1.0


def test_the_ema_does_not_depend_on_the_batch_size(tiny: str) -> None:
    constant = {"lr": 0.0, "ema_half_life": "64 images"}
    small, large = (make_parts(tiny, batch_size=size, **constant) for size in ("16", "64"))
    for parts, steps in ((small, 4), (large, 1)):
        with torch.no_grad():
            for parameter in parts.recipe.parameters():
                parameter.add_(1.0)
        run_steps(parts, steps)
    for a, b in zip(small.step.learners["classifier"].ema, large.step.learners["classifier"].ema, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


RATES: dict[str, tuple[dict[str, str | float], dict[int, float]]] = {
    "constant": ({"schedule": "constant"}, {0: 0.5, 500: 0.5, 1000: 0.5}),
    "constant after a warm-up": (
        {"schedule": "constant", "warmup": "2 epochs"},
        {0: 0.0, 100: 0.25, 200: 0.5, 900: 0.5},
    ),
    "step": ({"schedule": "step", "milestones": "50%"}, {499: 0.5, 500: 0.05, 1000: 0.05}),
    "two steps": (
        {"schedule": "step", "milestones": "3 epochs,600 images", "gamma": 0.5},
        {299: 0.5, 300: 0.25, 599: 0.25, 600: 0.125},
    ),
    "cosine": ({"schedule": "cosine"}, {0: 0.5, 250: 0.25 * (1 + math.sqrt(0.5)), 500: 0.25, 1000: 0.0, 1200: 0.0}),
    "cosine after a warm-up": (
        {"schedule": "cosine", "warmup": "20%"},
        {0: 0.0, 100: 0.25, 200: 0.5, 600: 0.25, 1000: 0.0},
    ),
    "linear": ({"schedule": "linear"}, {0: 0.5, 250: 0.375, 1000: 0.0}),
    "linear with a hold": ({"schedule": "linear", "hold": "50%"}, {0: 0.5, 500: 0.5, 750: 0.25, 1000: 0.0}),
    "linear after a warm-up": (
        {"schedule": "linear", "warmup": "20 steps"},
        {0: 0.0, 100: 0.25, 200: 0.5, 600: 0.25, 1000: 0.0},
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_the_learning_rate_follows_its_schedule_in_images(name: str) -> None:
    settings, expected = RATES[name]
    rate = schedule_of(LearnerSettings(lr=0.25, **settings), 2.0, epoch=100, step=10, total=1000)  # type: ignore[arg-type]
    assert {images: rate(images) for images in expected} == pytest.approx(expected, abs=1e-15)


def test_each_network_can_have_its_own_optimizer_settings(duet: str) -> None:
    parts = make_parts(duet, lr=0.25, generator={"lr": 0.5, "optimizer": "sgd", "momentum": 0.0})
    generator, critic = parts.step.learners["generator"], parts.step.learners["critic"]
    assert (generator.settings.lr, critic.settings.lr) == (0.5, 0.25)
    assert type(generator.optimizer).__name__ == "SGD" and type(critic.optimizer).__name__ == "Adam"
    assert generator.ema and not critic.ema, "only one network has an EMA"


def test_a_phase_that_returns_different_loss_names_in_a_later_step_is_rejected(duet: str) -> None:
    parts = make_parts(duet)
    loss_log, plain = LossLog(parts.world), parts.recipe.critic_loss
    first, second = parts.feed.steps(0, 2 * parts.feed.images_per_step)
    loss_log.add(first.images, parts.step(first))
    parts.recipe.critic_loss = lambda batch: plain(batch)._replace(terms={"renamed": plain(batch).terms["both"]})
    with pytest.raises(UserError, match="phase 'critic' returned the losses and signals both, gap, real, then renamed"):
        loss_log.add(second.images, parts.step(second))


def test_a_setting_for_an_unknown_network_is_rejected(duet: str) -> None:
    with pytest.raises(UserError, match="unknown network 'generater'; did you mean 'generator'"):
        make_parts(duet, generater={"lr": 0.5})


@pytest.mark.slow
def test_verify_passes_for_a_recipe_with_several_networks_and_phases(tmp_path: Path, duet: str) -> None:
    command = ("verify", duet, "--strategies", "single,ddp", "--devices", "2", "--steps", "7")
    verified = run_fork(tmp_path, *command, "--set", "accumulate=2", "--set", "batch_size=25")
    assert verified.wait() == 0, verified.stdout + verified.stderr
    assert "penalty" in verified.stdout
    assert re.search(r"^✓ single and ddp give the same weights: \S+ ≤ 1e-09$", verified.stdout, re.MULTILINE)


def test_verify_detects_batchnorms_that_are_not_synchronised(tmp_path: Path, tiny: str) -> None:
    command = ("verify", tiny, "--strategies", "single,ddp", "--devices", "2", "--steps", "3")
    broken = run_fork(tmp_path, *command, "--control", "unsynced-batchnorm")
    assert broken.wait() == 1, broken.stdout + broken.stderr
    assert "with a deliberate error: unsynced-batchnorm" in " ".join(broken.stdout.split())
    assert re.search(
        r"^✗ ddp differs from single: \S+ > \S+ \(\w+ of classifier, first in ", broken.stdout, re.MULTILINE
    )


@pytest.mark.parametrize(("strategy", "control"), [("ddp", ""), ("lightning", ""), ("ddp", "repeated-part")])
def test_two_ranks_train_like_one_unless_they_see_the_same_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duet: str, strategy: str, control: str
) -> None:
    monkeypatch.chdir(tmp_path)  # as in the ranks: recipes read images in ./data, if there are any
    shared = str(Path(__file__).parents[1] / "shared_modules.py")  # modules with several names
    cases: dict[str, Case] = {"duet": (duet, {"accumulate": 2, "batch_size": "25"}), "shared": (shared, {})}
    trace_all(str(tmp_path), cases, "single", 7)
    ranks = start_function_in_ranks(tmp_path, 2, trace_all, str(tmp_path), cases, strategy, 7, control)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    for name in cases:
        files = {one: tmp_path / f"{name}.{one}" for one in ("single", strategy)}
        found = compare({one: safetensors.torch.load_file(file) for one, file in files.items()}, tolerance=1e-9)
        assert found and all(one.ok for one in found) == (not control), found


def test_only_phases_of_different_networks_that_are_independent_run_concurrently() -> None:
    phases = [Phase("generator", "g"), Phase("first", "d1"), Phase("second", "d2", concurrent=True)]
    penalty = Phase("penalty", "d2", concurrent=True)

    def names(due: list[Phase]) -> list[list[str]]:
        return [[phase.name for phase in phases] for phases in groups(due)]

    assert names(phases) == [["generator"], ["first", "second"]]
    assert names([*phases, penalty]) == [["generator"], ["first", "second"], ["penalty"]]
    assert names(phases[2:]) == [["second"]], "it runs alone if the phases before it are not due"


@pytest.mark.slow
def test_all_strategies_produce_the_same_weights_for_many_networks(tmp_path: Path) -> None:
    command = ("verify", "translation", "--strategies", "single,ddp,lightning", "--devices", "2", "--steps", "3")
    verified = run_fork(tmp_path, *command, "--set", "model=deepliif", "--set", "ngf=1", "--set", "ndf=1")
    assert verified.wait() == 0, verified.stdout + verified.stderr
    rows = [line.split() for line in verified.stdout.splitlines() if " weights " in line]
    assert {(strategy, network) for strategy, network, *_ in rows} == {
        (strategy, group) for strategy in ("ddp", "lightning") for group in ("generators", "discriminators")
    }


def test_replicas_have_equal_weights_and_a_changed_weight_is_reported(tmp_path: Path) -> None:
    small = {
        "generator": "resnet_6",
        "segmentation_generator": "unet_32",
        "ngf": 1,
        "ndf": 1,
        "d_layers": 1,
        "crop": 32,
    }
    settings = {**small, "devices": 2, "batch_size": "2"}
    ranks = start_function_in_ranks(tmp_path, 2, spoil_and_check, "translation", "generators.GS1", settings)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert "the replicas of network 'generators.GS1' differ: ranks [1] do not match rank 0" in ranks[0].stdout
