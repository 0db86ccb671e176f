"""The strategy for one process and one device."""

from paceline.parallel.strategy import Strategy


class Single(Strategy):
    """The recipe on one device, without a wrapper."""

    max_devices = 1
    eager_steps = 3
