"""Adversarial losses per sample, from logits: BCE, hinge, least squares, D2GAN; and the R1 penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_LOGIT = -30.0  # below it log(softplus(x)) equals x, to the last digit of float32


class Objective(NamedTuple):
    """Three functions from logits to losses, one loss per logit."""

    generator: Callable[[Tensor], Tensor]  # of fake images, for the network that generated them
    real: Callable[[Tensor], Tensor]  # of real images, for the discriminator
    fake: Callable[[Tensor], Tensor]  # of fake images, for the discriminator


BCE = Objective(  # Goodfellow et al. 2014, with the non-saturating loss of the generator
    generator=lambda logits: F.softplus(-logits),
    real=lambda logits: F.softplus(-logits),
    fake=lambda logits: F.softplus(logits),
)
HINGE = Objective(  # Lim and Ye 2017
    generator=lambda logits: -logits,
    real=lambda logits: F.relu(1 - logits),
    fake=lambda logits: F.relu(1 + logits),
)
LEAST_SQUARES = Objective(  # Mao et al. 2017, with targets 0 and 1 and their factor of one half
    generator=lambda logits: (logits - 1).square() / 2,
    real=lambda logits: (logits - 1).square() / 2,
    fake=lambda logits: logits.square() / 2,
)
SQUARES = Objective(  # the same without the half, as pix2pix weighs it against its other terms
    generator=lambda logits: (logits - 1).square(),
    real=lambda logits: (logits - 1).square(),
    fake=lambda logits: logits.square(),
)
OBJECTIVES = {"bce": BCE, "hinge": HINGE, "lsgan": LEAST_SQUARES}


def d2gan(alpha: float, beta: float) -> tuple[Objective, Objective]:
    """Return the two sides of D2GAN (Nguyen et al. 2017): one rewards real images, one rewards fakes."""
    first = Objective(
        generator=lambda logits: -F.softplus(logits),
        real=lambda logits: -alpha * log_softplus(logits),
        fake=F.softplus,
    )
    second = Objective(
        generator=lambda logits: beta * log_softplus(logits),
        real=F.softplus,
        fake=lambda logits: -beta * log_softplus(logits),
    )
    return first, second


def log_softplus(logits: Tensor) -> Tensor:
    """Return log(softplus(x)), finite however small x is."""
    inner = F.softplus(logits.clamp(min=SMALLEST_LOGIT)).log()
    return torch.where(logits < SMALLEST_LOGIT, logits, inner)


def score(logits: Tensor) -> Tensor:
    """Return the mean probability, from 0 to 1, that a discriminator gives to "real"; for logs, without gradients."""
    return logits.detach().sigmoid().mean()


def r1_penalty(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return ½‖∇D(x)‖² for each image x (Mescheder et al. 2018), and the logits D(x).

    It is computed without autocast: the gradients of single pixels are too small for half precision.
    """
    with torch.autocast(images.device.type, enabled=False):
        images = images.detach().requires_grad_(True)
        logits = discriminator(images)
        (gradient,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
        return gradient.square().flatten(1).sum(1) / 2, logits
