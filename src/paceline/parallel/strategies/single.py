"""The strategy for one process and one device."""

from paceline.parallel.strategy import Strategy


class Single(Strategy):
    """The recipe on one device, without a wrapper."""
