"""Losses per sample: adversarial losses from logits, and losses that compare images by frequencies or structure."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import UserError

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
        images = images.detach().requires_grad_(True)
        logits = discriminator(images)
        (gradient,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
        return half_squared_norms(gradient), logits


def without_float16(images: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast to float16, whose range is too small for gradients of single pixels."""
    device = images.device.type
    is_float16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    return torch.autocast(device, enabled=False) if is_float16 else nullcontext()


def half_squared_norms(gradients: Tensor) -> Tensor:
    """Return ½‖∇‖² of each image's gradient."""
    return gradients.square().flatten(1).sum(1) / 2


SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_C1, SSIM_C2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2  # values have a range of 2


def fft_loss(made: Tensor, target: Tensor) -> Tensor:
    """Return the mean absolute difference of the orthonormal 2-D Fourier coefficients, real and imaginary parts."""
    with torch.autocast(made.device.type, enabled=False):
        wide = torch.promote_types(made.dtype, torch.float32)
        coefficients = torch.fft.rfft2((made - target).to(wide), norm="ortho")
        return torch.view_as_real(coefficients).abs().mean()


def ssim_loss(made: Tensor, target: Tensor) -> Tensor:
    """Return 1 - SSIM, averaged over windows, channels and images; see `evaluation.image_metrics` for the metric."""
    height, width = made.shape[-2:]
    if min(height, width) < SSIM_WINDOW:
        raise UserError(
            f"ssim: needs images of at least {SSIM_WINDOW}×{SSIM_WINDOW} pixels, not {width}×{height}; "
            "use a larger --crop, or set ssim=0"
        )
    with torch.autocast(made.device.type, enabled=False):
        wide = torch.promote_types(made.dtype, torch.float32)
        one, other = made.to(wide), target.to(wide)
        parts = torch.cat([one, other, one * one, other * other, one * other])
        mean1, mean2, square1, square2, product = _window_means(parts).chunk(5)
        variances = square1 - mean1.square() + square2 - mean2.square()
        covariance = product - mean1 * mean2
        likeness = (2 * mean1 * mean2 + SSIM_C1) * (2 * covariance + SSIM_C2)
        return 1 - (likeness / ((mean1.square() + mean2.square() + SSIM_C1) * (variances + SSIM_C2))).mean()


def _window_means(images: Tensor) -> Tensor:
    """Return Gaussian-weighted means of all windows inside the image."""
    channels, weights = images.shape[1], _window(images.device, images.dtype)
    for shape in ((1, 1, SSIM_WINDOW, 1), (1, 1, 1, SSIM_WINDOW)):
        images = F.conv2d(images, weights.view(shape).repeat(channels, 1, 1, 1), groups=channels)
    return images


# Cached for the life of the process, because a CUDA graph cannot copy values from the CPU.
@cache
def _window(device: torch.device, dtype: torch.dtype) -> Tensor:
    weights = [math.exp(-((n - SSIM_WINDOW // 2) ** 2) / (2 * SSIM_SIGMA**2)) for n in range(SSIM_WINDOW)]
    return torch.tensor([weight / sum(weights) for weight in weights], dtype=dtype, device=device)
