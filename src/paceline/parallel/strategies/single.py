"""One process, one device."""

from paceline.parallel.strategy import Strategy


class Single(Strategy):
    """The recipe as it is."""

    max_devices = 1
