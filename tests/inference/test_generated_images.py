"""Weights between those of two models, chosen classes, and the training images nearest to generated ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import make_config

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.inference.generate import with_nearest
from paceline.inference.model import class_index
from paceline.inference.trained import interpolated
from paceline.recipes.r3gan import R3gan, R3ganSettings


def test_floating_point_tensors_of_common_networks_are_interpolated():
    ours = {"generator.weight": torch.tensor([1.0, 2.0]), "generator.count": torch.tensor(7)}
    ours |= {"discriminator.weight": torch.tensor([5.0])}
    theirs = {"generator.weight": torch.tensor([3.0, 6.0]), "generator.count": torch.tensor(1)}
    mixed = interpolated(ours, theirs, 0.75, "other")
    assert mixed["generator.weight"].tolist() == [1.5, 3.0]
    assert mixed["generator.count"] == 7 and mixed["discriminator.weight"] == 5


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"generator.weight": torch.zeros(3)}, "'generator.weight' does not match"),
        ({"generator.weight": torch.zeros(2), "generator.bias": torch.zeros(2)}, "'generator.bias' does not match"),
        ({"restorer.weight": torch.zeros(2)}, "no network in common"),
        ({"generator.weight": torch.zeros(2, dtype=torch.int32)}, "'generator.weight' does not match"),
        ({"generator.weight": torch.zeros(2, dtype=torch.complex64)}, "'generator.weight' does not match"),
        ({"generator.weight": torch.tensor([0, torch.nan])}, "'generator.weight' contains NaN"),
    ],
)
def test_different_networks_are_rejected(theirs, message):
    with pytest.raises(UserError, match=message):
        interpolated({"generator.weight": torch.zeros(2)}, theirs, 0.5, "other")


SETTINGS = R3ganSettings(nz=8, width=8, num_blocks=1, group_size=4)


def index_of(label: str | int, *names: str, empty: tuple[int, ...] = ()) -> int:
    spec = DataSpec(1, 16, 16, num_classes=len(names), class_names=names, empty_classes=empty)
    return class_index(R3gan(SETTINGS, spec), spec, label, "--class ")


def test_a_class_is_chosen_by_name_in_either_spelling_or_by_index() -> None:
    assert index_of("dog", "cat", "dog") == index_of("1", "cat", "dog") == index_of(1, "cat", "dog") == 1
    composed, decomposed = "\u00c4pfel", "A\u0308pfel"
    assert index_of(composed, "Birnen", decomposed) == index_of(decomposed, "Birnen", composed) == 1
    assert [index_of(name, decomposed, composed) for name in (decomposed, composed)] == [0, 1]
    for names in (("1", "2", "10"), ("1", "2", "cat")):
        assert [index_of(name, *names) for name in names] == [0, 1, 2]


@pytest.mark.parametrize(
    ("label", "names", "empty", "message"),
    [
        ("2", ("cat", "dog"), (), "unknown class '2'; choose from: cat, dog"),
        ("0", ("1", "2", "12"), (), "unknown class '0'; choose from: 1, 12, 2"),  # an index could be taken for a name
        ("0", ("1", "2", "cat"), (), "unknown class '0'; choose from: 1, 2, cat"),
        ("dog", ("cat", "dog", "owl"), (1,), "the class has no training images"),
        ("1", ("cat", "dog", "owl"), (1,), "the class has no training images"),
    ],
)
def test_a_class_that_cannot_be_generated_is_rejected(
    label: str, names: tuple[str, ...], empty: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=f"--class {label}: .*{message}"):
        index_of(label, *names, empty=empty)


SIDE = 16
EIGHT_BITS = np.random.default_rng(0).integers(256, size=(20, SIDE, SIDE, 3), dtype=np.uint8)


def show_nearest(
    images: np.ndarray, count: int, folder: Path, pixels: np.ndarray = EIGHT_BITS, **settings: str
) -> np.ndarray:
    np.savez(folder / "data.npz", x_train=pixels)
    config = make_config("r3gan", data="npz", data_root=str(folder / "data.npz"), size=SIDE, **settings)
    return with_nearest(images, open_sources(config)["train"], count, config.run, torch.device("cpu"))


def test_the_nearest_images_do_not_depend_on_the_type_of_pixels(tmp_path: Path) -> None:
    for pixels, settings in (
        (EIGHT_BITS, {}),
        (EIGHT_BITS.astype(np.uint16) * 257, {}),
        (EIGHT_BITS.astype(np.float32) / 255, {"value_range": "0,1"}),
    ):
        shown = show_nearest(EIGHT_BITS[4:6], 2, tmp_path, pixels, **settings)
        assert shown.dtype == np.uint8 and shown.shape == (6, SIDE, SIDE, 3)
        assert np.array_equal(shown[[0, 3]], EIGHT_BITS[4:6]) and np.array_equal(shown[[1, 4]], EIGHT_BITS[4:6])


def test_a_copy_of_a_mirrored_training_image_is_found_if_training_flips_images(tmp_path: Path) -> None:
    mirrored = EIGHT_BITS[7:8, :, ::-1]
    for flip, is_found in (("on", True), ("off", False)):
        shown = show_nearest(mirrored, 20, tmp_path, flip=flip)
        assert np.array_equal(shown[1:2], mirrored) == is_found
        as_stored = [min(image.tobytes(), image[:, ::-1].tobytes()) for image in shown[1:]]
        assert len(set(as_stored)) == 20  # every training image once, in one of its two forms
