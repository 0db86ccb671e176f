"""The contract of a network whose features generated images are evaluated by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.evaluation.protocol import Protocol

IMAGES_AT_ONCE = 100
MANY_AT_ONCE = 500  # keep a large GPU busier, where it has the memory free
MEMORY_FOR_MANY = 16 * 2**30  # bytes, more than 500 images of 299 pixels take in float32, without the images

# In fp16, layers are float16: 10 bits of mantissa as in TF32, where bfloat16 has 7. Weights have about twice as many.
Arithmetic = Literal["fp32", "tf32", "fp16"]
NAMES: dict[Arithmetic, str] = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16, weights in two"}  # in protocols


class Features(NamedTuple):
    """The output of a feature network, one row per image."""

    vectors: Tensor
    logits: Tensor | None = None


class FeatureNetwork:
    """Computes features of images; a subclass defines how."""

    label: str = ""  # in brackets after a metric's name; the standard network has none
    num_features: int
    num_classes: int = 0  # of its logits; 0 where it has none
    resize: str = "none"
    weights: str = "none"  # their SHA-256
    warn_below: ClassVar[int] = 10_000  # images; never more than five times the features
    arithmetics: ClassVar[tuple[Arithmetic, ...]] = ("fp32", "tf32")

    def require(self, arithmetic: Arithmetic, device: torch.device) -> None:
        """Raise UserError for an arithmetic that this network or the device does not support."""
        if arithmetic == "fp16" and device.type == "cpu":
            raise UserError(
                "feature_precision=fp16 is for GPUs, since most CPUs are slow in it; use feature_precision=fp32"
            )
        if arithmetic not in self.arithmetics:
            offered = " or ".join(self.arithmetics)
            raise UserError(
                f"feature_precision={arithmetic}: only the Inception of a known file supports it; "
                f"for {self.label or 'this network'} use {offered}"
            )

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        """Return the features of uint8 images [n, c, h, w], on their device; the caller sets how float32 is rounded."""
        raise NotImplementedError

    def __call__(self, images: Tensor, arithmetic: Arithmetic) -> Features:
        with computing_in(arithmetic):
            parts = [self.extract(some, arithmetic) for some in torch.split(images, _images_at_once(images))]
        vectors, logits = zip(*parts, strict=True)
        return Features(torch.cat(vectors), torch.cat(logits) if self.num_classes else None)

    def protocol(self) -> Protocol:
        """Return what identifies the features that a metric is computed from."""
        return {"features": self.label or "inception-2015", "weights": self.weights, "resize": self.resize}


def hash_of(module: nn.Module) -> str:
    """Return the SHA-256 of a module's weights, by name."""
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


@contextmanager
def computing_in(arithmetic: Arithmetic) -> Iterator[None]:
    """Round float32 like this on GPUs inside the block, whatever precision the run trains in."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = arithmetic == "tf32"
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
