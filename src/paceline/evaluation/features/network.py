"""The base class for feature networks, which are used to evaluate generated images."""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import sha256
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.core.gpu import float32_products
from paceline.evaluation.protocol import Protocol

IMAGES_AT_ONCE = 100
MANY_AT_ONCE = 500  # batch size that makes better use of a large GPU, if it has enough free memory
MEMORY_FOR_MANY = 16 * 2**30  # bytes needed for 500 images of 299×299 pixels in float32, apart from the images

# In fp16, activations have 10 bits of mantissa, like TF32 (bfloat16 has 7), and weights about twice as many.
Arithmetic = Literal["fp32", "tf32", "fp16"]
# The name of each precision in the protocol, which describes how a metric was measured.
NAMES: dict[Arithmetic, str] = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16, weights in two"}


class Features(NamedTuple):
    """The output of a feature network, one row per image."""

    vectors: Tensor
    logits: Tensor | None = None


class FeatureNetwork:
    """Computes features of images. Subclasses implement `extract`."""

    label: str = ""  # shown in brackets after a metric's name; empty for the standard network
    score_label: str = ""  # shown after the Inception Score, if a different network computes the logits
    num_features: int
    num_classes: int = 0  # number of logits; 0 if there are none
    resize: str = "none"
    weights: str = "none"  # SHA-256 of the weights
    # Evaluators warn if there are fewer images than this (or than five times the number of features, if less).
    warn_below: ClassVar[int] = 10_000
    arithmetics: ClassVar[tuple[Arithmetic, ...]] = ("fp32", "tf32")

    def require(self, arithmetic: Arithmetic, device: torch.device) -> None:
        """Raise UserError for a precision that this network or the device does not support."""
        if arithmetic == "fp16" and device.type == "cpu":
            raise UserError(
                "feature_precision=fp16: needs a GPU, since fp16 is slow on most CPUs; use feature_precision=fp32"
            )
        if arithmetic not in self.arithmetics:
            offered = " or ".join(self.arithmetics)
            raise UserError(
                f"feature_precision={arithmetic}: supported only if Inception is loaded from a file; "
                f"for {self.label or 'this network'}, use {offered}"
            )

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        """Return the features of a uint8 [n, c, h, w] tensor, on its device; the caller sets the float32 precision."""
        raise NotImplementedError

    def __call__(self, images: Tensor, arithmetic: Arithmetic) -> Features:
        with computing_in(arithmetic):
            parts = [self.extract(some, arithmetic) for some in torch.split(images, _images_at_once(images))]
        vectors, logits = zip(*parts, strict=True)
        return Features(torch.cat(vectors), torch.cat(logits) if self.num_classes else None)

    def few_images_note(self, fewest: int, which: str) -> str:
        """Return a warning if there are too few images for a reliable FID, else ""; `which` describes the images."""
        if fewest < self.num_features:
            return f"warning: {which}: fewer images than features ({self.num_features:,}), so FID is unreliable"
        if fewest < min(self.warn_below, 5 * self.num_features):
            return (
                f"warning: {which}: FID is biased upwards for so few images; "
                "compare FID values only if they use the same number of images"
            )
        return ""

    def protocol(self) -> Protocol:
        """Return the properties that identify the features from which a metric is computed."""
        return {"features": self.label or "inception-2015", "weights": self.weights, "resize": self.resize}


def hash_of(module: nn.Module) -> str:
    """Return the SHA-256 of a module's weights and their names."""
    digest = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _images_at_once(images: Tensor) -> int:
    if not images.is_cuda:
        return IMAGES_AT_ONCE
    device = images.device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    as_floats = 4 * MANY_AT_ONCE * images.shape[1:].numel()
    return MANY_AT_ONCE if free > MEMORY_FOR_MANY + 3 * as_floats else IMAGES_AT_ONCE


def computing_in(arithmetic: Arithmetic) -> AbstractContextManager[None]:
    """Return a context that sets the float32 precision on GPUs, regardless of the run's precision."""
    return float32_products(tf32=arithmetic == "tf32")
