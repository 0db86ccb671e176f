"""The contract of a network by whose features generated pictures are judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

PICTURES_AT_ONCE = 100
Arithmetic = Literal["fp32", "tf32"]


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

    def see(self, pictures: Tensor) -> Seen:
        """The features of uint8 pictures [n, c, h, w], on their device."""
        raise NotImplementedError

    def __call__(self, pictures: Tensor, arithmetic: Arithmetic) -> Seen:
        with _computing_in(arithmetic):
            seen = [self.see(some) for some in pictures.split(PICTURES_AT_ONCE)]
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


@contextmanager
def _computing_in(arithmetic: Arithmetic) -> Iterator[None]:
    """Inside, float32 is rounded like this on GPUs, whatever the run trains in."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = arithmetic == "tf32"
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
