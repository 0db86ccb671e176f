"""Metrics for generated images equal those from torchmetrics and do not depend on the number of processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from no_run import no_run
from running import run_fork, run_ranks
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from paceline.cli.app import run
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.source import ArraySource
from paceline.data.sources.digits import Digits
from paceline.data.stream import NUM_UNIFORMS, to_eight_bits, transform
from paceline.evaluation.contract import Case
from paceline.evaluation.evaluators import generation
from paceline.evaluation.evaluators.generation import Generation
from paceline.evaluation.features import Arithmetic, FeatureNetwork, Features, Pixels, WithClassifier, choose_features
from paceline.evaluation.protocol import differences, require_same
from paceline.evaluation.statistics import cache_folder
from paceline.runs.finished_run import open_run

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = torch.device("cpu")
DATA_SPEC = DataSpec(channels=3, height=12, width=12)
TINY_GAN = str(Path(__file__).parent.parent / "tiny_gan.py")


def images(count: int, seed: int) -> Tensor:
    """Return structured uint8 images: mixtures of a few random patterns."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(20, 3 * 12 * 12, generator=torch.Generator().manual_seed(0))
    mixed = torch.randn(count, 20, generator=generator) @ patterns * 12 + 128 + 5 * seed
    return mixed.clamp(0, 255).to(torch.uint8).unflatten(1, (3, 12, 12))


def scaled(some: Tensor) -> Tensor:
    return some / 127.5 - 1


def source_of(real: Tensor) -> ArraySource:
    return ArraySource({"image": real.permute(0, 2, 3, 1).contiguous().numpy()}, DATA_SPEC)


def evaluator_of(real: Tensor, count: int, **settings: object) -> Generation:
    case = Case(source_of(real), "train", count, no_run)
    return Generation(case, DATA_SPEC, CPU, RunSettings(data="patterns", **settings))


def measured(real: Tensor, made: Tensor, cuts: tuple[int, ...] = (), **settings: object) -> dict[str, float]:
    """Return the metrics for images that are split at `cuts` and measured by one evaluator per part."""
    evaluators = [evaluator_of(real, len(made), **settings) for _ in range(len(cuts) + 1)]
    for pool, add in ((real, "update_samples"), (made, "update")):
        parts = zip(torch.arange(len(pool)).tensor_split(cuts), pool.tensor_split(cuts), evaluators, strict=True)
        for index, part, evaluator in parts:
            for rows, positions in zip(part.split(64), index.split(64), strict=True):
                batch = {"image": scaled(rows), "index": positions}
                evaluator.update_samples(batch) if add == "update_samples" else evaluator.update(batch, batch)
    evaluators[0].end_samples(sum(evaluator.sample_sums() for evaluator in evaluators))
    return evaluators[0].results(sum(evaluator.sums() for evaluator in evaluators))


class PixelModule(nn.Module):
    """A module that computes pixel features, with the interface that torchmetrics expects."""

    num_features = 3 * Pixels.SIDE_PX**2

    def forward(self, some: Tensor) -> Tensor:
        return Pixels(DATA_SPEC).extract(some).vectors


def test_fid_equals_torchmetrics_on_the_same_features_and_images():
    real, made = images(900, 1), images(700, 2)
    theirs = FrechetInceptionDistance(PixelModule()).set_dtype(torch.float64)
    theirs.update(real, real=True)
    theirs.update(made, real=False)
    ours = measured(real, made)
    assert ours["FID[pixels-8x8]"] == pytest.approx(theirs.compute().item(), abs=1e-6)
    assert ours["FID[pixels-8x8]"] > 0.1 and ours["count"] == 700
    assert not any("[" not in name for name in ours if name != "count")


def test_the_metrics_do_not_depend_on_how_images_are_distributed():
    real, made = images(600, 1), images(600, 2)
    assert measured(real, made, cuts=(123, 400)) == pytest.approx(measured(real, made), rel=1e-9)


def test_statistics_of_real_images_are_cached_per_content_and_evaluation_protocol():
    real, made = images(300, 1), images(300, 2)
    assert evaluator_of(real, 300).needs_samples
    results = measured(real, made)
    again = evaluator_of(real, 300)
    assert not again.needs_samples
    again.update({"image": scaled(made)}, {"index": torch.arange(300)})
    assert again.results(again.sums()) == pytest.approx(results, rel=1e-9)
    changed = real.clone()
    changed[150, 0, 3, 3] ^= 1
    assert evaluator_of(changed, 300).needs_samples
    assert evaluator_of(real[:299], 300).needs_samples
    assert evaluator_of(real, 300, feature_precision="tf32").needs_samples
    assert not evaluator_of(real, 300).needs_samples
    case, other_range = Case(source_of(real), "train", 300, no_run), replace(DATA_SPEC, value_range=(0.0, 100.0))
    assert Generation(case, other_range, CPU, RunSettings(data="patterns")).needs_samples
    cropped = replace(DATA_SPEC, height=8, width=8)
    assert Generation(replace(case, crop=8), cropped, CPU, RunSettings(data="patterns")).needs_samples
    assert Generation(replace(case, crop=12), DATA_SPEC, CPU, RunSettings(data="patterns")).needs_samples
    (file,) = cache_folder().glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert evaluator_of(real, 300).needs_samples


def test_statistics_that_cannot_be_stored_are_kept_for_later_evaluations_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    real, made = images(300, 1), images(300, 2)
    results = measured(real, made)
    again = evaluator_of(real, 300)
    assert not again.needs_samples
    again.update({"image": scaled(made)}, {"index": torch.arange(300)})
    assert again.results(again.sums()) == pytest.approx(results, rel=1e-9)
    assert evaluator_of(real[:299], 300).needs_samples


CLASSES = DataSpec(channels=3, height=12, width=12, num_classes=3, class_names=("cat", "dog", "owl"))


def by_class(real: Tensor, made: Tensor, prediction: dict[str, Tensor] | None = None) -> dict[str, float]:
    """Return the metrics with the FID of each class; the images alternate between the classes."""
    arrays = {"image": real.permute(0, 2, 3, 1).contiguous().numpy(), "label": (torch.arange(len(real)) % 3).numpy()}
    case = Case(ArraySource(arrays, CLASSES), "train", len(made), no_run)
    evaluator = Generation(case, CLASSES, CPU, RunSettings(data="patterns", per_class=True, few_images="allow"))
    assert evaluator.needs_samples
    for part in torch.arange(len(real)).split(100):
        evaluator.update_samples({"image": scaled(real[part]), "index": part, "label": part % 3})
    evaluator.end_samples(evaluator.sample_sums())
    for part in torch.arange(len(made)).split(70):
        labels = {"label": part % 3} if prediction is None else prediction
        evaluator.update({"image": scaled(made[part]), **labels}, {"index": part})
    return evaluator.results(evaluator.sums())


def test_the_fid_of_a_class_compares_only_the_images_of_this_class():
    real, made = images(600, 1), images(450, 2)
    found = by_class(real, made)
    expected = [measured(real[k::3], made[k::3], few_images="allow")["FID[pixels-8x8]"] for k in range(3)]
    names = [f"FID:{name}[pixels-8x8]" for name in CLASSES.class_names]
    assert [found[name] for name in names] == pytest.approx(expected, rel=1e-6)
    assert found["FID_by_class[pixels-8x8]"] == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert found["FID[pixels-8x8]"] == pytest.approx(measured(real, made)["FID[pixels-8x8]"], rel=1e-9)


def test_metrics_of_some_images_do_not_depend_on_whether_the_real_images_are_sorted_by_class(monkeypatch):
    monkeypatch.setattr(generation, "NUM_ROWS", 400)
    pool, labels = images(1600, 1), np.arange(1600) % 2
    pool[labels == 1] = 255 - pool[labels == 1] // 2  # the classes differ much
    made = pool[800:]  # classes alternate
    found = []
    for order in (np.arange(800), np.argsort(labels[:800], kind="stable")):
        arrays = {"image": pool[order].permute(0, 2, 3, 1).contiguous().numpy(), "label": labels[order]}
        case = Case(ArraySource(arrays, CLASSES), "train", len(made), no_run)
        evaluator = Generation(case, CLASSES, CPU, RunSettings(data="patterns", few_images="allow"))
        evaluator.update_samples({"image": scaled(pool[order]), "index": torch.arange(800)})
        evaluator.end_samples(evaluator.sample_sums())
        evaluator.update({"image": scaled(made)}, {"index": torch.arange(800)})
        found.append(evaluator.results(evaluator.sums()))
    assert found[1]["FID[pixels-8x8]"] == pytest.approx(found[0]["FID[pixels-8x8]"], rel=1e-6)
    for name in ("precision", "recall", "coverage"):
        assert found[1][f"{name}[pixels-8x8]"] == pytest.approx(found[0][f"{name}[pixels-8x8]"], abs=0.1)


def test_with_many_classes_training_prints_only_the_mean_of_their_fids():
    metrics = {"FID[x]": 1.0, "FID_by_class[x]": 2.0, "FID:cat[x]": 3.0}
    assert list(Generation.texts(metrics, CLASSES)) == list(metrics)
    assert list(Generation.texts(metrics, DataSpec(3, 12, 12, num_classes=300))) == ["FID[x]", "FID_by_class[x]"]


def test_the_fid_of_each_class_needs_classes_and_a_conditional_generator():
    with pytest.raises(UserError, match="per_class=on: the data has no classes"):
        evaluator_of(images(300, 1), 300, per_class=True)
    with pytest.raises(UserError, match="per_class=on: the generator is not conditional"):
        by_class(images(300, 1), images(300, 2), prediction={})


def test_with_many_generated_images_fid_is_also_computed_from_the_first_of_them(monkeypatch):
    monkeypatch.setattr(generation, "NUM_ROWS", 400)
    real, made = images(900, 1), images(700, 2)
    found = measured(real, made)
    assert found["FID_10k[pixels-8x8]"] == pytest.approx(measured(real, made[:400])["FID[pixels-8x8]"], rel=1e-6)
    assert "FID_10k[pixels-8x8]" not in measured(real, made[:400])


class ColorClassifier(FeatureNetwork):
    """A classifier whose class is the brightest channel."""

    label, weights, num_features, num_classes = "colors", "abc", 3, 3

    def extract(self, some: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        means = some.float().mean((2, 3))
        return Features(means, means)


def test_a_classifier_computes_the_inception_score_if_the_feature_network_has_no_logits(monkeypatch):
    real, made = images(300, 1), images(250, 2)
    monkeypatch.setattr(generation, "choose_features", lambda *_: WithClassifier(Pixels(DATA_SPEC), ColorClassifier()))
    found, protocol = measured(real, made), evaluator_of(real, 250).protocol()
    monkeypatch.setattr(generation, "choose_features", lambda *_: ColorClassifier())
    assert found["IS[colors]"] == pytest.approx(measured(real, made)["IS[colors]"])
    monkeypatch.setattr(generation, "choose_features", choose_features)
    assert found["FID[pixels-8x8]"] == pytest.approx(measured(real, made)["FID[pixels-8x8]"])
    assert "FID[colors]" not in found and protocol["classifier"] == "abc"


def test_images_are_evaluated_as_they_would_be_saved():
    real = images(300, 1)
    measured(real, real)  # caches the statistics of the real images
    evaluator = evaluator_of(real, 300)
    made = scaled(real) + 0.3 / 127.5  # less than half a grey level, so rounding removes it
    evaluator.update({"image": made}, {"index": torch.arange(300)})
    results = evaluator.results(evaluator.sums())
    assert results["FID[pixels-8x8]"] == pytest.approx(0, abs=1e-6)
    assert results["precision[pixels-8x8]"] == results["recall[pixels-8x8]"] == 1


def test_fewer_images_than_features_are_rejected_and_few_images_print_a_warning():
    with pytest.raises(
        UserError, match=r"191 images .* too few to estimate the covariance of 192 features; .*few_images=allow"
    ):
        evaluator_of(images(191, 1), 500)
    with pytest.raises(UserError, match="100 images"):
        evaluator_of(images(500, 1), 100)
    assert "unreliable" in evaluator_of(images(100, 1), 500, few_images="allow").notes[0]
    assert "biased" in evaluator_of(images(400, 1), 500).notes[0]
    assert evaluator_of(images(960, 1), 960).notes == ()


def test_evaluation_protocols_count_as_equal_if_only_the_seed_differs():
    real = images(300, 1)
    protocol = evaluator_of(real, 300).protocol()
    assert {"features", "weights", "resize", "real", "made", "seed", "split", "fingerprint"} <= protocol.keys()
    # The same text as in runs from before density and coverage, so that both can be compared and resumed.
    assert protocol["estimators"] == "KID of 1000, 3 neighbours, IS of 10 splits"
    assert not differences(protocol, evaluator_of(real, 300, seed=7).protocol())
    other = evaluator_of(real, 250).protocol()
    assert differences(protocol, other)
    with pytest.raises(UserError, match=r"run a and run b were measured differently .*generated images: 300 ≠ 250"):
        require_same({"run a": protocol, "run b": other})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny classifier, and a tiny generator that was evaluated with the classifier's features."""
    folder = tmp_path_factory.mktemp("runs")
    splits = {split: Digits(split, RunSettings(size=8)).arrays for split in ("train", "test")}
    arrays = {f"{x}_{split}": splits[split][field] for split in splits for x, field in (("x", "image"), ("y", "label"))}
    np.savez(folder / "my digits.npz", **arrays)
    classifier = ["classification", "--preset", "quick", "--data", "npz", "--data-root", "my digits.npz"]
    for words in (
        [*classifier, "--images", "640", "--out", "classifier"],
        [TINY_GAN, "--out", "gan", "--set", "features=classifier"],
    ):
        trained = run_fork(folder, "train", *words, "--accelerator", "cpu")
        assert trained.wait() == 0, trained.stderr
    return folder


def test_a_generator_is_evaluated_during_training_and_its_best_checkpoint_is_recorded(runs):
    rows = [json.loads(line) for line in (runs / "gan" / "metrics.jsonl").read_text().splitlines()]
    name = "train/FID[resnet18-my-digits]"
    values = {row["images"]: row[name] for row in rows if name in row}
    assert list(values) == [640, 1280, 1920] and values[1920] < values[640]
    scores = [row["train/IS[resnet18-my-digits]"] for row in rows if name in row]
    assert all(1 <= score <= 10 for score in scores)
    state = json.loads((runs / "gan" / "checkpoints" / "000000001920" / "state.json").read_text())
    assert state["best"]["name"] == name and state["best"]["value"] == min(values.values())
    protocol = json.loads((runs / "gan" / "protocols.json").read_text())["train"]["resnet18-my-digits"]
    assert protocol["real"] == protocol["made"] == 1438 and len(protocol["weights"]) == 64


def values_in(text: str) -> dict[str, float]:
    words = [line.split() for line in text.splitlines() if line.startswith("  ")]
    return {name: float(value) for name, value in words}


def test_two_processes_compute_the_same_metrics_as_one(runs):
    found = []
    for size in (1, 2):
        # The precisions differ, so the second run cannot reuse the cached statistics of the real images.
        sets = ["--set", "features=classifier", "--set", f"feature_precision={'fp32' if size == 1 else 'tf32'}"]
        command = ["evaluate", "gan", "--trust", "--accelerator", "cpu", "--devices", str(size), *sets]
        before = set(runs.glob("stdout-*"))
        assert run_ranks(runs, size, *command) == [0] * size
        found.append(values_in("".join(file.read_text() for file in set(runs.glob("stdout-*")) - before)))
    assert found[0].keys() == found[1].keys() and "IS[resnet18-my-digits]" in found[0]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_metric_is_named_after_the_data_of_a_classifier_in_a_weights_file(runs, capsys):
    weights = next((runs / "classifier" / "checkpoints").glob("*/weights.safetensors"))
    shutil.copy(weights, runs / "classifier.safetensors")  # stores no paths, but the name of the data
    words = ["evaluate", str(runs / "gan"), "--trust", "--accelerator", "cpu"]
    assert run([*words, "--set", f"features={runs / 'classifier.safetensors'}"]) == 0
    assert {"FID[resnet18-my-digits]", "IS[resnet18-my-digits]"} < values_in(capsys.readouterr().out).keys()


def test_a_run_resumes_only_with_the_same_evaluation_protocol(runs):
    command = ["train", TINY_GAN, "--accelerator", "cpu", "--out", "gan", "--images", "2560"]
    rejected = run_fork(runs, *command, "--set", "features=classifier", "--set", "generated_images=700")
    assert rejected.wait() == 2
    assert (
        "measured under a different protocol (generated images: 1438 ≠ 700)" in rejected.stderr
        and len(rejected.stderr.splitlines()) == 1
    )


def test_features_from_an_unsuitable_run_or_for_different_images_are_rejected(runs, monkeypatch):
    rejected = run_fork(runs, "evaluate", "gan", "--trust", "--accelerator", "cpu", "--set", "features=gan")
    assert rejected.wait() == 2 and "features=gan: not a classification run" in rejected.stderr
    monkeypatch.chdir(runs)
    case = Case(source_of(images(300, 1)), "train", 300, open_run)
    message = "trained on 8×8×1 images, but the images to evaluate are 12×12×3; .*--set size=12 --set channels=3"
    with pytest.raises(UserError, match=message):
        Generation(case, DATA_SPEC, CPU, RunSettings(features="classifier"))


def test_real_images_are_unchanged_after_scaling_and_rounding():
    values = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16)
    for dtype in (torch.float32, torch.float64):
        batch = transform({"image": values, "uniforms": torch.zeros(1, NUM_UNIFORMS)}, None, dtype)
        assert torch.equal(to_eight_bits(batch["image"]), values)
