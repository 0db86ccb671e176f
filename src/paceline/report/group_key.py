"""The properties that define a group of runs."""

from __future__ import annotations

from typing import NamedTuple

from paceline.report.known_strategy import known_strategy

MULTI_DEVICE_SETTINGS = {"nnodes", "compress", "sync_batchnorm"}  # settings that have no effect on one device
Extras = tuple[tuple[str, str], ...]  # (name, value) pairs of settings and hardware that distinguish groups


class GroupKey(NamedTuple):
    """The properties that all runs of a group share."""

    recipe: str
    strategy: str
    devices: int
    shares_a_gpu: bool
    batch: int
    extras: Extras

    def reference(self, batch: float) -> tuple[str, float, Extras]:
        """Return the key of the baseline: the runs on one device with this batch size."""
        return self.recipe, batch, tuple(one for one in self.extras if one[0] not in MULTI_DEVICE_SETTINGS)

    @property
    def is_reference(self) -> bool:
        """Whether this group is a baseline for others, because its strategy supports only one device."""
        strategy = known_strategy(self.strategy)
        return self.devices == 1 and strategy is not None and strategy.max_devices == 1
