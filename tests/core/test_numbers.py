"""Numbers in progress lines have four significant digits and a constant width."""

from __future__ import annotations

import math

import pytest

from paceline.core.text import epoch, four_digits, rate


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (1.0, "1.000"),
        (0.31416, "0.3142"),
        (93.124, "93.12"),
        (99.999, "100.0"),
        (100.0, "100.0"),
        (-2.5, "-2.500"),
        (12_345.6, "12,350"),
        (0.00012341, "0.0001234"),
        (1.2341e-7, "1.234e-07"),
        (1.2341e12, "1.234e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_number_has_four_significant_digits(value: float, text: str) -> None:
    assert four_digits(value) == text


@pytest.mark.parametrize(
    ("speed", "text"), [(51_234.4, "51,234 images/s"), (50.0, "50.0 images/s"), (0.25, "0.25 images/s")]
)
def test_a_slow_speed_has_decimals(speed: float, text: str) -> None:
    assert rate(speed) == text


@pytest.mark.parametrize(
    ("images", "total", "text"), [(460, 1200, "epoch 4.6/12"), (100, 203, "epoch 1.0/2"), (5, 16, "epoch 0.05/0.16")]
)
def test_a_position_in_epochs_has_at_most_one_decimal_from_one_epoch_on(images: int, total: int, text: str) -> None:
    assert epoch(images, total, 100) == text
