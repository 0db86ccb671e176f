"""Settings, defaults and networks shared by recipes that generate images from noise with DCGAN networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.types import SettingValues
from paceline.models.dcgan import SIZES_PX, Discriminator, Generator
from paceline.recipes.parts.augmentation import AugmentationSettings
from paceline.recipes.parts.generative import GenerativeRecipe, check_size
from paceline.recipes.parts.other_names import GENERATIVE

# The networks and settings from the dual-discriminator project. In that project, one model uses the Mish activation and
# the other a learning rate schedule. Here, neither is used, so that DCGAN and the dual GAN can be compared.
REFERENCE: SettingValues = {
    "data": "cifar10",
    "size": 32,
    "channels": 3,
    "flip": "off",
    "batch_size": "64",
    "reference_batch": 64,
    "epochs": 50,
    "smallest": "2",
    "save_every": "10 epochs",
    "evaluate_every": "10 epochs",
}
R1_EVERY = 16  # steps between two R1 penalties; the weight of R1 is multiplied by this


@dataclass(frozen=True)
class GenerativeSettings(AugmentationSettings):
    """The networks, and how the discriminator is regularised."""

    nz: int = setting(100, "dimension of the noise vector from which an image is generated", at_least=1)
    ngf: int = setting(
        64, "channels in the generator's last feature map; earlier maps have 2, 4, 8, … times as many", at_least=1
    )
    ndf: int = setting(
        64, "channels in the discriminator's first feature map; later maps have 2, 4, 8, … times as many", at_least=1
    )
    smallest: Literal["4", "2"] = setting(
        "4", "side of the smallest feature map in pixels: 4, as in DCGAN, or 2, which adds a layer"
    )
    activation: Literal["relu", "mish"] = setting("relu", "activation function in the generator")
    d_norm: Literal["batch", "none"] = setting("batch", "normalisation layers in the discriminator")
    spectral_norm: bool = setting(False, "spectral normalisation of the discriminator's layers")
    r1: float = setting(
        0.0, f"weight of the R1 penalty on real images, computed every {R1_EVERY} steps; 0: no penalty", at_least=0
    )


class DcganRecipe(GenerativeRecipe):
    """Generates images with DCGAN networks."""

    other_names = GENERATIVE
    must_match_weights = ("activation",)
    defaults: ClassVar[SettingValues] = {
        "data": "digits",
        "size": 32,
        "batch_size": "128",
        "epochs": 50,
        "optimizer": "adam",
        "lr": 2e-4,
        "beta1": 0.5,
        "beta2": 0.999,
        "validation": 0.0,
    }
    presets: ClassVar[Mapping[str, SettingValues]] = {
        # The EMA of the generator's weights costs almost no time. Its half-life is a percentage of the run (for 50
        # epochs, 50,000 images), so that short runs benefit, too.
        "cifar10": {**REFERENCE, "ema_half_life": "2%"},
        "cifar10_reference": REFERENCE,
        # For a first run on a CPU: narrow networks, small batches and a higher learning rate learn the bundled digits
        # in a minute or two.
        "quick": {
            "data": "digits",
            "ngf": 16,
            "ndf": 16,
            "batch_size": "32",
            "reference_batch": 32,
            "lr": 5e-4,
            "ema_half_life": "2000 images",
            "epochs": 50,
            "save_every": "10 epochs",
            "evaluate_every": "10 epochs",
        },
    }
    small: ClassVar[SettingValues] = {"nz": 16, "ngf": 4, "ndf": 4, "size": 32, "batch_size": "16"}
    # Names used in the config.ini of the dual-discriminator project. The project itself never reads `checkpoint`.
    aliases: ClassVar[Mapping[str, str]] = {"type": "data", "nc": "channels", "checkpoint": ""}

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one image for each row of noise, with values in [-1, 1]."""
        return {"image": self.generator(batch["noise"])}


def make_generator(settings: GenerativeSettings, spec: DataSpec) -> Generator:
    """Return a generator for images with the data's size and channels."""
    check_size(spec, SIZES_PX)
    smallest = int(settings.smallest)
    return Generator(spec.height, spec.channels, settings.nz, settings.ngf, smallest, settings.activation)


def make_discriminator(settings: GenerativeSettings, spec: DataSpec) -> Discriminator:
    """Return a discriminator for images with the data's size and channels."""
    check_size(spec, SIZES_PX)
    smallest = int(settings.smallest)
    return Discriminator(
        spec.height, spec.channels, settings.ndf, smallest, settings.d_norm, spectral=settings.spectral_norm
    )
