"""What the recipes with DCGAN networks have in common: settings, networks, views of pictures, the terms of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss
from paceline.core.errors import UserError, unknown
from paceline.models import diffaugment
from paceline.models.dcgan import SIZES_PX, Discriminator, Generator
from paceline.models.losses import Objective, r1_penalty

PENALTY_EVERY = 16  # steps between two R1 penalties; the weight makes up for it


@dataclass(frozen=True)
class AdversarialSettings:
    """The networks, and what keeps the discriminator in check."""

    nz: int = setting(100, "random numbers from which the generator makes a picture", at_least=1)
    ngf: int = setting(
        64, "channels of the generator's last features; earlier ones have 2, 4, 8 times as many", at_least=1
    )
    ndf: int = setting(
        64, "channels of the discriminator's first features; later ones have 2, 4, 8 times as many", at_least=1
    )
    smallest: Literal["4", "2"] = setting("4", "side of the smallest features: 4 as in DCGAN; 2 adds a layer")
    activation: Literal["relu", "mish"] = setting("relu", "of the generator")
    d_norm: Literal["batch", "none"] = setting("batch", "normalisation layers of the discriminator")
    spectral_norm: bool = setting(False, "hold the largest singular value of the discriminator's layers at 1")
    r1: float = setting(
        0.0, f"weight of the R1 penalty on real pictures, every {PENALTY_EVERY} steps; 0 has none", at_least=0
    )
    diffaugment: str = setting("", "random changes of real and fake pictures: color, translation, cutout, with commas")


DEFAULTS: dict[str, Any] = {
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
SMALL: dict[str, Any] = {"nz": 16, "ngf": 4, "ndf": 4, "size": 32, "batch_size": "16"}

# The names in the config.ini of the dual-discriminator project. That project never reads `checkpoint`.
ALIASES = {"type": "data", "nc": "channels", "checkpoint": ""}

# The dual-discriminator project's networks and settings. It gave only one of its two recipes mish and only the other
# a schedule; here both have neither, so that they differ in nothing but the second discriminator.
CIFAR10: dict[str, Any] = {
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

# A first look on a CPU: narrow networks, small batches and a higher rate draw the embedded digits in a minute or two.
QUICK: dict[str, Any] = {
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
}


def check_pictures(spec: DataSpec) -> None:
    """Refuses pictures that the networks cannot take."""
    if spec.height != spec.width or spec.height not in SIZES_PX:
        raise UserError(
            f"the pictures have {spec.width}×{spec.height} pixels and the networks are for squares of 32 or 64: "
            "use --set size=32 or --set size=64"
        )


def make_generator(settings: AdversarialSettings, spec: DataSpec) -> Generator:
    """A generator of pictures like the data's."""
    smallest = int(settings.smallest)
    return Generator(spec.height, spec.channels, settings.nz, settings.ngf, smallest, settings.activation)


def make_discriminator(settings: AdversarialSettings, spec: DataSpec) -> Discriminator:
    """A discriminator of pictures like the data's."""
    smallest = int(settings.smallest)
    return Discriminator(
        spec.height, spec.channels, settings.ndf, smallest, settings.d_norm, spectral=settings.spectral_norm
    )


class Views:
    """What a discriminator sees of pictures: themselves, or random changes of them."""

    def __init__(self, kinds: str) -> None:
        self.kinds = tuple(kind.strip() for kind in kinds.split(",") if kind.strip())
        for kind in self.kinds:
            if kind not in diffaugment.KINDS:
                raise UserError(f"diffaugment={kinds}: {unknown('change', kind, diffaugment.KINDS)}")

    @property
    def draws(self) -> dict[str, Draw]:
        """The random numbers for a step: for the generator's fakes, for the discriminator's, for real pictures."""
        numbers = Draw((diffaugment.NUM_UNIFORMS,), "uniform")
        return {f"view_of_{what}": numbers for what in ("own", "fake", "real")} if self.kinds else {}

    def __call__(self, pictures: Tensor, batch: Batch, what: str) -> Tensor:
        return diffaugment.augment(pictures, batch[f"view_of_{what}"], self.kinds) if self.kinds else pictures


def score(logits: Tensor) -> Tensor:
    """How real a discriminator finds pictures, from 0 to 1."""
    return logits.detach().sigmoid().mean()


def discriminator_loss(discriminator: Discriminator, objective: Objective, views: Views, batch: Batch) -> Loss:
    """Tells real pictures from fakes; they pass separately, each with BatchNorm statistics of its own."""
    real = discriminator(views(batch["image"], batch, "real"))
    fake = discriminator(views(batch["fake"], batch, "fake"))
    terms = {"real": objective.real(real).mean(), "fake": objective.fake(fake).mean()}
    return Loss(terms, signals={"real_score": score(real), "fake_score": score(fake)})


def penalty_loss(discriminator: Discriminator, weight: float, views: Views, batch: Batch) -> Loss:
    """R1 on real pictures, as often too heavy as it is seldom taken."""
    norms, logits = r1_penalty(lambda pictures: discriminator(views(pictures, batch, "real")), batch["image"])
    # The penalty does not depend on the last bias, and every parameter needs a gradient.
    return Loss({"r1": weight * PENALTY_EVERY * norms.mean() + 0 * logits.sum()})
