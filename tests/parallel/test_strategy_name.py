"""Which strategy and device count `--strategy` resolves to."""

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
def test_auto_and_strategies_that_are_pointless_on_a_cpu_are_resolved(
    requested: tuple[str, int], accelerator: str, found: tuple[str, int]
) -> None:
    assert strategy_name(*requested, accelerator) == found
