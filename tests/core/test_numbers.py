"""Numbers in progress lines have four significant digits and a constant width."""

from __future__ import annotations

import math

from paceline.core.text import epoch, four_digits, rate

NUMBERS = {
    0.0: "0.000",
    1.0: "1.000",
    0.31416: "0.3142",
    93.124: "93.12",
    99.999: "100.0",
    -2.5: "-2.500",
    12_345.6: "12,350",
    0.00012341: "0.0001234",
    1.2341e-7: "1.234e-07",
    1.2341e12: "1.234e+12",
    math.nan: "nan",
    -math.inf: "-inf",
}


def test_a_number_has_four_significant_digits() -> None:
    assert {value: four_digits(value) for value in NUMBERS} == NUMBERS


def test_a_slow_speed_has_decimals_and_a_position_in_epochs_at_most_one_from_one_epoch_on() -> None:
    assert [rate(speed) for speed in (51_234.4, 50.0, 0.25)] == ["51,234 images/s", "50.0 images/s", "0.25 images/s"]
    positions = [epoch(images, total, 100) for images, total in ((460, 1200), (100, 203), (5, 16))]
    assert positions == ["epoch 4.6/12", "epoch 1.0/2", "epoch 0.05/0.16"]
