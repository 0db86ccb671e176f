"""The contract of a network by whose features generated pictures are judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import UserError

PICTURES_AT_ONCE = 100
MANY_AT_ONCE = 500  # keep a large GPU busier, where it has the memory free
MEMORY_FOR_MANY = 16 * 2**30  # bytes, more than 500 pictures of 299 pixels take in float32; beside the pictures

# In fp16, layers are float16: 10 bits of mantissa as in TF32, where bfloat16 has 7. Weights have about twice as many.
Arithmetic = Literal["fp32", "tf32", "fp16"]
NAMES: dict[Arithmetic, str] = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16, weights in two"}  # in protocols


class Seen(NamedTuple):
    """What a network makes of pictures, a row for each."""

    features: Tensor
    logits: Tensor | None = None


class FeatureNetwork:
    """Features of pictures; a subclass says how they are made."""

    label: str = ""  # stands in brackets behind a number's name; the standard network has none
    num_features: int
    num_classes: int = 0  # of its logits; 0 where it has none
    resize: str = "none"
    weights: str = "none"  # their SHA-256
    warn_below: ClassVar[int] = 10_000  # pictures; never more than five times the features
    arithmetics: ClassVar[tuple[Arithmetic, ...]] = ("fp32", "tf32")

    def require(self, arithmetic: Arithmetic, device: torch.device) -> None:
        """Refuses an arithmetic that this network does not have, or that makes no sense on a device."""
        if arithmetic == "fp16" and device.type == "cpu":
            raise UserError(
                "feature_precision=fp16 is for GPUs, since most CPUs are slow in it; take feature_precision=fp32"
            )
        if arithmetic not in self.arithmetics:
            offered = " or ".join(self.arithmetics)
            raise UserError(
                f"feature_precision={arithmetic}: only the Inception of a known file has it; "
                f"for {self.label or 'this network'} take {offered}"
            )

    def see(self, pictures: Tensor, arithmetic: Arithmetic = "fp32") -> Seen:
        """The features of uint8 pictures [n, c, h, w], on their device; how float32 is rounded is set outside."""
        raise NotImplementedError

    def __call__(self, pictures: Tensor, arithmetic: Arithmetic) -> Seen:
        with computing_in(arithmetic):
            seen = [self.see(some, arithmetic) for some in pictures.split(_pictures_at_once(pictures))]
        features, logits = zip(*seen, strict=True)
        return Seen(torch.cat(features), torch.cat(logits) if self.num_classes else None)

    def protocol(self) -> dict[str, Any]:
        """What says by which features a number was made."""
        return {"features": self.label or "inception-2015", "weights": self.weights, "resize": self.resize}


def hash_of(module: nn.Module) -> str:
    """The SHA-256 of a module's weights, by name."""
    digest = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _pictures_at_once(pictures: Tensor) -> int:
    if not pictures.is_cuda:
        return PICTURES_AT_ONCE
    device = pictures.device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    as_floats = 4 * MANY_AT_ONCE * pictures.shape[1:].numel()
    return MANY_AT_ONCE if free > MEMORY_FOR_MANY + 3 * as_floats else PICTURES_AT_ONCE


@contextmanager
def computing_in(arithmetic: Arithmetic) -> Iterator[None]:
    """Inside, float32 is rounded like this on GPUs, whatever the run trains in."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = arithmetic == "tf32"
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
