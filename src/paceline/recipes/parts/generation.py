"""Settings, defaults and networks of recipes that generate images from noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, Clock, DataSpec, Draw, Evaluation, Loss, Recipe, Weights
from paceline.core.errors import UserError, unknown
from paceline.core.types import SettingValues
from paceline.models.dcgan import SIZES_PX, Discriminator, Generator
from paceline.models.gan_augmentation import (
    ADA_KINDS,
    ADA_UNIFORMS,
    DIFF_KINDS,
    DIFF_UNIFORMS,
    MAX_STRENGTH,
    adaptive_augment,
    diff_augment,
)
from paceline.models.losses import r1_penalty


class GenerativeRecipe(Recipe):
    """Generates images from noise; evaluated by FID against the training images."""

    generator: nn.Module  # created by the subclass

    evaluation = Evaluation("generation", best="train/FID", mode="min", split="train")
    generates = True
    ema = ("generator",)


def check_size(spec: DataSpec, sizes_px: tuple[int, ...]) -> None:
    """Raise UserError unless the images are square, with a side that the networks support."""
    if spec.height == spec.width and spec.height in sizes_px:
        return
    sizes = f"{', '.join(map(str, sizes_px[:-1]))} or {sizes_px[-1]}"
    raise UserError(
        f"the images are {spec.width}×{spec.height} pixels, but the networks need square images with a side of "
        f"{sizes}: use --set size=32, or another of these sizes"
    )


STRENGTH, CERTAINTY, STEP = "augment_strength", "augment_certainty", "augment_step"
RAMP = 0.1  # distance from the target at which the strength changes at full speed


@dataclass(frozen=True)
class AugmentationSettings:
    """How the images that the discriminator sees are augmented."""

    diffaugment: str = setting(
        "", "differentiable augmentation of real and fake images: color, translation and/or cutout, separated by commas"
    )
    ada: str = setting(
        "", "augmentation with adaptive strength (ADA): blit, geometry, color and/or cutout, separated by commas"
    )
    ada_target: float = setting(
        0.6,
        "target for the discriminator's certainty, which is the mean sign of its output for real images, relative to "
        "that of an uncertain discriminator (r3gan: of the difference between its outputs for real and fake images); "
        "ADA raises its strength if the certainty is higher",
        at_least=0,
        below=1,
    )
    ada_images: int = setting(
        500_000, "number of images in which the strength of ADA can change by 1 (it is at most 0.8)", at_least=1
    )
    ada_strength: float = setting(
        0.0,
        "strength of `ada`, which rises from 0 to this value during the burn-in; 0: adaptive strength",
        at_least=0,
        at_most=MAX_STRENGTH,
    )


class Augmentation:
    """Prepares images for a discriminator: randomly augmented, or unchanged if no augmentation is set."""

    def __init__(self, settings: AugmentationSettings) -> None:
        self.fixed = _parse("diffaugment", settings.diffaugment, DIFF_KINDS)
        self.variable = _parse("ada", settings.ada, ADA_KINDS)
        if self.fixed and self.variable:
            raise UserError(
                f"diffaugment={settings.diffaugment} and ada={settings.ada}: cannot be combined; choose one"
            )
        for name in ("ada_target", "ada_images", "ada_strength"):
            value, default = getattr(settings, name), getattr(type(settings), name)
            if value != default and not self.variable:
                raise UserError(
                    f"{name}={value:g}: there is nothing to apply; choose transforms, "
                    f"for example with ada=blit,geometry,color, or set {name}={default:g}"
                )
            if value != default and settings.ada_strength and name != "ada_strength":
                raise UserError(
                    f"{name}={value:g}: not used with ada_strength={settings.ada_strength:g}, with which the strength "
                    "does not adapt; remove one of them"
                )
        self.final_strength = settings.ada_strength
        self.is_adaptive = bool(self.variable) and not self.final_strength
        self.target, self.num_images = settings.ada_target, settings.ada_images

    @property
    def draws(self) -> dict[str, Draw]:
        """The random inputs of the augmentation, one for each set of images that a discriminator sees."""
        if not self.fixed and not self.variable:
            return {}
        numbers = Draw((DIFF_UNIFORMS if self.fixed else ADA_UNIFORMS,), "uniform")
        return {f"view_of_{what}": numbers for what in ("own", "fake", "real")}

    @property
    def signals(self) -> Mapping[str, float | Callable[[Clock], float]]:
        """The strength; if it is adaptive, also the measure that controls it and its largest change in a step."""
        if self.is_adaptive:
            return {STRENGTH: 0.0, CERTAINTY: 0.0, STEP: lambda clock: clock.images_per_step / self.num_images}
        return {STRENGTH: lambda clock: clock.anneal(0.0, self.final_strength)} if self.variable else {}

    def __call__(self, images: Tensor, batch: Batch, what: Literal["own", "fake", "real"]) -> Tensor:
        if self.variable:
            return adaptive_augment(images, batch[f"view_of_{what}"], batch[STRENGTH], self.variable)
        return diff_augment(images, batch[f"view_of_{what}"], self.fixed) if self.fixed else images

    def next_strength(self, batch: Batch) -> dict[str, Tensor]:
        """Return the signal with the strength for the next phases; call it in one phase of each step."""
        if not self.is_adaptive:
            return {}
        excess = (batch[CERTAINTY][0] - self.target) / RAMP
        strength = batch[STRENGTH][0] + excess.clamp(-1, 1) * batch[STEP][0]
        return {STRENGTH: strength.clamp(0, MAX_STRENGTH)}

    def certainty(self, logits: Tensor, boundary: float = 0.0) -> dict[str, Tensor]:
        """Return the signal that controls the strength, from logits above `boundary` for images classified as real."""
        return {CERTAINTY: (logits.detach() - boundary).sign().mean()} if self.is_adaptive else {}


def _parse(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    for kind in kinds:
        if kind not in known:
            raise UserError(f"{name}={text}: {unknown('augmentation', kind, known)}")
    return kinds


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

    # Names in the config.ini of the dual-discriminator project, which never reads `checkpoint`.
    other_names = {"type": "data", "nc": "channels", "checkpoint": ""}
    weights = Weights(must_match=("activation",))
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

    def __init__(self, settings: GenerativeSettings, spec: DataSpec) -> None:
        """Create the generator and the augmentation; the subclass creates the discriminators."""
        super().__init__(settings, spec)
        check_size(spec, SIZES_PX)
        smallest = int(settings.smallest)
        self.generator = Generator(spec.height, spec.channels, settings.nz, settings.ngf, smallest, settings.activation)
        self.augment = Augmentation(settings)
        self.draws = {"noise": Draw((settings.nz,), "normal"), **self.augment.draws}
        self.signals = self.augment.signals

    def penalty(self, discriminator: nn.Module, batch: Batch) -> Loss:
        """R1 = r1 · ½‖∇D(x)‖² at real images x. R1 runs every R1_EVERY steps, so its weight is scaled by R1_EVERY."""
        penalties, logits = r1_penalty(
            lambda images: discriminator(self.augment(images, batch, "real")), batch["image"]
        )
        # R1 does not depend on the last bias, but every parameter needs a gradient: hence 0 * logits.
        return Loss({"r1": self.settings.r1 * R1_EVERY * penalties.mean() + 0 * logits.sum()})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one image for each row of noise, with values in [-1, 1]."""
        return {"image": self.generator(batch["noise"])}


def make_discriminator(settings: GenerativeSettings, spec: DataSpec) -> Discriminator:
    """Return a discriminator for images with the data's size and channels."""
    sizes = (spec.height, spec.channels, settings.ndf, int(settings.smallest))
    return Discriminator(*sizes, settings.d_norm, spectral=settings.spectral_norm)
