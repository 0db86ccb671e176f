"""Communication between the processes from a background thread, separate from training's collectives."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from paceline.parallel.world import World


class BackgroundGroup:
    """A separate gloo group, so that a thread can communicate while the main thread trains."""

    def __init__(self, world: World, timeout_seconds: float) -> None:
        """Create the group; all processes must do so at the same time, in their main thread."""
        self.rank, self._size = world.rank, world.size
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all processes, in rank order; wait until every process has called this."""
        texts = [""] * self._size
        dist.all_gather_object(texts, text, group=self._group)
        return texts
