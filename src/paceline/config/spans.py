"""Parse batch sizes and training lengths, such as `32/device` and `5 epochs`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from paceline.core.errors import UserError

Unit: TypeAlias = Literal["images", "epochs", "steps", "%"]


@dataclass(frozen=True)
class Span:
    """A length of training: `5 epochs`, `200k images`, `50 steps` or `50%` of the run."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, name: str) -> Span:
        """Parse a span; `name` is the setting that the error message refers to."""
        match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*(k|m)?\s*(images?|epochs?|steps?|%)\s*", str(text).lower())
        try:
            if not match:
                raise ValueError
            amount = float(match[1]) * {"k": 1e3, "m": 1e6}.get(match[2] or "", 1)
        except ValueError:
            raise UserError(
                f"{name}={text!r}: expected a span like '5 epochs', '200k images', '50 steps' or '50%'"
            ) from None
        unit = match[3] if match[3] == "%" else match[3].rstrip("s") + "s"
        return cls(amount, cast(Unit, unit))

    def to_images(self, *, epoch: int, step: int, total: int) -> int:
        """Return the span in images, given the number of images per epoch, per step and in the entire run."""
        return round(self.amount * {"images": 1, "epochs": epoch, "steps": step, "%": total / 100}[self.unit])


def split_batch(text: str, devices: int, accumulate: int) -> int:
    """Return the global batch size from `128` or `32/device`; raise UserError if a micro-batch would be empty."""
    match = re.fullmatch(r"\s*(\d+)\s*(/\s*device)?\s*", str(text))
    if not match or int(match[1]) == 0:
        raise UserError(f"--batch-size {text!r}: expected a number like 128, or a number per device like 32/device")
    batch = int(match[1]) * (devices if match[2] else 1)
    if batch < devices * accumulate:
        raise UserError(
            f"--batch-size {batch}: needs at least {devices * accumulate} images "
            f"({devices} devices × {accumulate} micro-batches); use a larger batch"
        )
    return batch
