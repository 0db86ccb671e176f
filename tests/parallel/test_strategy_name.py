"""The strategy and device count that are used for each value of `--strategy`."""

import pytest

from paceline.parallel.strategy import strategy_name


@pytest.mark.parametrize(
    ("requested", "accelerator", "found"),
    [
        (("auto", 1), "cpu", ("single", 1)),
        (("auto", 2), "cpu", ("ddp", 2)),
        (("dp", 2), "cpu", ("single", 1)),
        (("dp", 2), "cuda", ("dp", 2)),
        (("lightning", 2), "cpu", ("lightning", 2)),
    ],
)
def test_auto_chooses_a_strategy_and_dp_on_a_cpu_is_replaced_by_single(
    requested: tuple[str, int], accelerator: str, found: tuple[str, int]
) -> None:
    assert strategy_name(*requested, accelerator) == found
