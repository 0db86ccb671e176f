"""The data that ships with Paceline is unchanged, listed with its licence, and computed as its README.md describes."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
from skimage.color import hed2rgb, rgb2hed
from skimage.filters import gaussian, threshold_otsu

from paceline.data.bundled import FOLDER
from paceline.data.sources.panels import stained_tissue
from paceline.data.sources.photos import EMBEDDED
from paceline.images.decode import decode

# SHA-256 of the dtype, shape and values of each decoded array. Runs made with other versions depend on these arrays.
HASHES = {
    "astronaut.webp": "089ac17d8a2cc4d015818f80eb8a33f3c6570418d812a1b147faf2b3f64316a8",
    "brick.png": "1340f4e291b06ddcb10c1fdc454228794a199f06b87c356857fd8db0fe63689a",
    "camera.png": "4ad41349d6b6adda58db33975ac76a020d7b0ff8a4effe8f9fc6c05c5f3bfc7f",
    "chelsea.webp": "d738f15e9582688ff847272af6772e09a226008081657e09ff00ed4029f9d331",
    "clock_motion.png": "c5e64f0247b26d990bb3588747e590a24eda54fe6012f573893a0518ccc63e62",
    "coffee.webp": "d174e10959179ac810eb5b0156ae33e5a84e87f7fdeb1e5f8ee8b4c9ac4a1c3a",
    "coins.png": "cd076241f885cca09b309e437dcccc0f526004f8d9c6600954d7e5e6c1d1e188",
    "digits.npz images": "be72c1eb90e2b673ddeb0dfb3189c09061e8c6fbf9e25da405c4dbe1e58d4f45",
    "digits.npz labels": "3ce85b7a99a649b641550796cadfcbe5619bd8b52070a5f2fa100408cd6a5b48",
    "grass.png": "7ee910ffd14835372df071cad9ff1a6079242a49bc4858405eb3838692545475",
    "gravel.png": "5c65a12757ebf9a84d3d04b544801db7bf43ad9177d445f9b50b192f7bc0dce2",
    "hubble_deep_field.jpg": "2aa940453187a54bf5b1e15649061c3b04d55052ed13a9e604f9d18c17fc6852",
    "ihc.webp": "4aede0b5c13746eab9442e4add8c39c75fe133bc2674df1ad374baee9f67230d",
    "ihc_dab.webp": "d5d108eb7f9b6554135fa4f7e1e14dfe94100c8ae5cd2d1228b198fce45d2105",
    "ihc_hematoxylin.webp": "ba135bb14b7d07263551bb263c6debcf59d4afde6b61df012c04a592e66bfbff",
    "ihc_mask.png": "cb2c1f5ec91e345552d57007829d57f2bef0ab5744fe93396732713ad8fa6f79",
    "moon.png": "8e4387f4a1db6614c644749df19d8224c321c45faf6c1e350af750b26f7886c1",
    "motorcycle_left.webp": "833951dc358d167bcb5b84729042d1873d81e95c3aae0349922bc6d2a3f929d4",
    "motorcycle_right.webp": "1b775b8261c519a319b007f1c8f0a06b25791b99e081af3d537e8d3703e66816",
    "retina.jpg": "31e1edf7072b06de2aeb45442b31cc8bab852d9ba85336c1c69aa0e5b21c033e",
    "rocket.jpg": "412fcade12ff505afc9cd969b3e706099fbee8f045405ef1db2b0d40bd439ca4",
}


def data_files() -> list[str]:
    return sorted(file.name for file in FOLDER.iterdir() if file.is_file() and file.suffix not in (".py", ".md"))


def arrays() -> dict[str, NDArray[np.uint8]]:
    found = {}
    for name in data_files():
        if name.endswith(".npz"):
            with np.load(FOLDER / name) as stored:
                found |= {f"{name} {key}": stored[key] for key in stored.files}
        else:
            found[name] = np.array(decode(FOLDER / name))
    return found


def test_no_bundled_array_has_changed() -> None:
    found = {
        name: sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()).hexdigest()
        for name, array in arrays().items()
    }
    assert found == HASHES


def test_every_bundled_file_is_used_and_listed_with_its_licence() -> None:
    photographs = {name for split in EMBEDDED.values() for name in split}
    others = {"digits.npz", "ihc_hematoxylin.webp", "ihc_dab.webp", "ihc_mask.png"}
    assert set(data_files()) == photographs | others
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert not [name for name in data_files() if f"`{name}`" not in listed]


def test_the_bundled_stains_and_mask_equal_those_computed_with_scikit_image() -> None:
    tissue = stained_tissue()
    stains = rgb2hed(tissue["image"])
    for stain, stored in ((0, tissue["hematoxylin"]), (2, tissue["dab"])):
        alone = np.zeros_like(stains)
        alone[..., stain] = stains[..., stain]
        computed = np.round(hed2rgb(alone) * 255)
        assert np.abs(computed - stored).max() <= 1  # logarithms may round differently on other processors
    density = gaussian(-np.log10((tissue["image"] + 1.0) / 256).sum(axis=-1), 3.0)
    mask = np.where(density > threshold_otsu(density), 255, 0)
    assert (mask[..., np.newaxis] != tissue["segmentation"]).mean() < 1e-4
