"""Parse batch sizes, training lengths and intervals, such as `32/device`, `5 epochs` and `never`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from paceline.core.errors import UserError

Unit: TypeAlias = Literal["images", "epochs", "steps", "%"]
NEVER = "never"
INTERVALS = ("log_every", "evaluate_every", "sample_every", "save_every")
CAN_BE_NEVER = ("evaluate_every", "sample_every")
AUTO = "auto"
CAN_BE_AUTO = ("evaluate_every", "sample_every", "save_every")
MAX_BATCH = 10_000_000  # a larger batch is a mistake, which would fill the memory
MAX_AMOUNT = 1e18  # far longer than any run; the number of images in such a span is still finite


@dataclass(frozen=True)
class Span:
    """A length of training: `5 epochs`, `200k images`, `50 steps`, `50%` of the run, or `0`."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, name: str, *, or_words: Sequence[str] = ()) -> Span:
        """Parse a span; the error message refers to the setting `name`, and lists the words that it can be instead."""
        if re.fullmatch(r"\s*0+\s*", str(text)):
            return cls(0.0, "images")  # zero is the same in every unit
        match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*(k|m)?\s*(images?|epochs?|steps?|%)\s*", str(text).lower())
        try:
            if not match:
                raise ValueError
            amount = float(match[1]) * {"k": 1e3, "m": 1e6}.get(match[2] or "", 1)
        except ValueError:
            expected = ["a span like '5 epochs', '200k images', '50 steps' or '50%'", *map(repr, or_words)]
            raise UserError(f"{name}={text!r}: expected {', or '.join(expected)}") from None
        if amount > MAX_AMOUNT:
            raise UserError(f"{name}={text!r}: must be at most {MAX_AMOUNT:g} {match[3]}")
        unit = match[3] if match[3] == "%" else match[3].rstrip("s") + "s"
        return cls(amount, cast(Unit, unit))

    def to_images(self, *, epoch: int, step: int, total: int) -> int:
        """Return the span in images, given the number of images per epoch, per step and in the entire run."""
        return round(self.amount * {"images": 1, "epochs": epoch, "steps": step, "%": total / 100}[self.unit])


def parse_interval(text: str, name: str) -> Span | None:
    """Parse the interval in the setting `name`, one of `INTERVALS`; return None for `never`, length 0 for `auto`."""
    can_be_never, can_be_auto = name in CAN_BE_NEVER, name in CAN_BE_AUTO
    if can_be_auto and text.strip().lower() == AUTO:
        return Span(0.0, "images")
    if is_never(text):
        if can_be_never:
            return None
        raise UserError(f"{name}={text!r}: not supported; use '100%' for an interval as long as the run")
    span = Span.parse(text, name, or_words=[NEVER] * can_be_never + [AUTO] * can_be_auto)
    if not span.amount:
        alternative = "'never' to switch it off" if can_be_never else "'100%' for an interval as long as the run"
        raise UserError(f"{name}={text!r}: must be greater than 0; use {alternative}")
    return span


def is_never(interval: str) -> bool:
    """Return whether an interval setting has the value `never`."""
    return interval.strip().lower() == NEVER


def split_batch(text: str, devices: int, accumulate: int) -> int:
    """Return the global batch size from `128` or `32/device`; raise UserError if a micro-batch would be empty."""
    match = re.fullmatch(r"\s*(\d+)\s*(/\s*device)?\s*", str(text))
    if not match or int(match[1]) == 0:
        raise UserError(f"--batch-size {text!r}: expected a number like 128, or a number per device like 32/device")
    batch = int(match[1]) * (devices if match[2] else 1)
    if batch > MAX_BATCH:
        raise UserError(f"--batch-size {text}: must be at most {MAX_BATCH:,} images; use a smaller batch")
    if batch < devices * accumulate:
        raise UserError(
            f"--batch-size {batch}: needs at least {devices * accumulate} images "
            f"({devices} devices × {accumulate} micro-batches); use a larger batch"
        )
    return batch
