"""Adversarial losses per sample, computed from logits (BCE, hinge, least squares, D2GAN), and the R1 penalty."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_LOGIT = -30.0  # below this value, log(softplus(x)) equals x in float32


class Objective(NamedTuple):
    """Three functions that map logits to losses, one loss per logit, and the logit of an uncertain discriminator."""

    generator: Callable[[Tensor], Tensor]  # the generator's loss on fake images
    real: Callable[[Tensor], Tensor]  # the discriminator's loss on real images
    fake: Callable[[Tensor], Tensor]  # the discriminator's loss on fake images
    boundary: float = 0.0  # the best logit for an image that is as likely to be real as fake

    def score(self, logits: Tensor) -> Tensor:
        """Return the mean of sigmoid(logit - boundary), without gradients; used for logging.

        A score is between 0 and 1, and 0.5 at the boundary. With BCE, it is the predicted probability of "real".
        """
        return (logits.detach() - self.boundary).sigmoid().mean()

    def scores(self, real: Tensor, fake: Tensor) -> dict[str, Tensor]:
        """Return the scores of the discriminator's logits for real and fake images, by name."""
        return {"real_score": self.score(real), "fake_score": self.score(fake)}


BCE = Objective(  # Goodfellow et al. 2014, with the non-saturating generator loss
    generator=lambda logits: F.softplus(-logits),
    real=lambda logits: F.softplus(-logits),
    fake=lambda logits: F.softplus(logits),
)
HINGE = Objective(  # Lim and Ye 2017
    generator=lambda logits: -logits,
    real=lambda logits: F.relu(1 - logits),
    fake=lambda logits: F.relu(1 + logits),
)
LEAST_SQUARES = Objective(  # Mao et al. 2017, with targets 0 and 1, and with the paper's factor of 1/2
    generator=lambda logits: (logits - 1).square() / 2,
    real=lambda logits: (logits - 1).square() / 2,
    fake=lambda logits: logits.square() / 2,
    boundary=0.5,
)
SQUARES = Objective(  # least squares without the factor of 1/2, as in pix2pix
    generator=lambda logits: (logits - 1).square(),
    real=lambda logits: (logits - 1).square(),
    fake=lambda logits: logits.square(),
    boundary=0.5,
)
OBJECTIVES = {"bce": BCE, "hinge": HINGE, "lsgan": LEAST_SQUARES}


def score_range(*logits: Tensor) -> dict[str, Tensor]:
    """Return the largest minus the smallest logit, by name: 0 only if the discriminator's output is constant."""
    every = torch.cat([part.detach() for part in logits])
    return {"score_range": every.amax() - every.amin()}


def d2gan(alpha: float, beta: float) -> tuple[Objective, Objective]:
    """Return the objectives of D2GAN's two discriminators (Nguyen et al. 2017).

    The first discriminator rewards real images, and the second rewards fake images.
    """
    first = Objective(
        generator=lambda logits: -F.softplus(logits),
        real=lambda logits: -alpha * log_softplus(logits),
        fake=F.softplus,
        boundary=math.log(math.expm1(alpha)),
    )
    second = Objective(
        generator=lambda logits: beta * log_softplus(logits),
        real=F.softplus,
        fake=lambda logits: -beta * log_softplus(logits),
        boundary=math.log(math.expm1(beta)),
    )
    return first, second


def log_softplus(logits: Tensor) -> Tensor:
    """Return log(softplus(x)), which stays finite for very negative x."""
    inner = F.softplus(logits.clamp(min=SMALLEST_LOGIT)).log()
    return torch.where(logits < SMALLEST_LOGIT, logits, inner)


def r1_penalty(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return ½‖∇D(x)‖² for each image x (Mescheder et al. 2018), and the logits D(x), computed without autocast."""
    with torch.autocast(images.device.type, enabled=False):
        return gradient_penalty(discriminator, images)


def without_float16(images: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast to float16, whose range is too small for gradients of single pixels."""
    device = images.device.type
    is_float16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    return torch.autocast(device, enabled=False) if is_float16 else nullcontext()


def half_squared_norms(gradients: Tensor) -> Tensor:
    """Return ½‖∇‖² of each image's gradient."""
    return gradients.square().flatten(1).sum(1) / 2


def gradient_penalty(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return ½‖∇D(x)‖² for each image x, and the logits D(x)."""
    with without_float16(images):
        images = images.detach().requires_grad_(True)
        logits = discriminator(images)
        (gradient,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
        return half_squared_norms(gradient), logits
