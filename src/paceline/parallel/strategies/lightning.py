"""Lightning's Trainer: its loop, device placement and DistributedDataParallel, with Paceline's recipe and learners.

Lightning wraps all networks in one DistributedDataParallel, which adversarial recipes can only use with
`find_unused_parameters`. The learners, gradient scaling, clipping, autocast, sample order and checkpoints are the
same as under other strategies, so a run ends with the same weights.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError, missing
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import Feature, MemoryShares, StepData, Strategy, bytes_of, check_gradients
from paceline.parallel.world import World

if TYPE_CHECKING:
    from paceline.parallel.lightning_module import Module


class Lightning(Strategy):
    """Leaves the loop to the Trainer, which calls `advance` as its training step."""

    needs_processes = True
    complexity = 2
    package = "lightning"
    extra = "lightning"

    @classmethod
    def why_not(cls, feature: Feature) -> str:
        return "Lightning's Trainer controls the steps; ddp has similar step times" if feature == "breakdown" else ""

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        super().__init__(settings, world, precision, recipe)
        self._module: Module | None = None  # set when the Trainer starts

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        # Lightning's wrapper has buckets for all networks, which are separate from the gradients.
        buckets = bytes_of(p for network in recipe.networks.values() for p in network.parameters() if p.requires_grad)
        return MemoryShares(buffer_bytes=buckets if num_devices > 1 else 0)

    def drive(self, steps: Iterable[StepData], advance: Callable[[StepData], None]) -> None:
        try:
            from paceline.parallel.lightning_module import Module, Steps, make_trainer
        except ImportError as error:
            raise UserError(f"--strategy lightning: {missing(error.name or 'lightning', 'lightning')}") from None
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.trainable.release()  # Lightning's DDP wrapper ignores parameters that do not yet require grad
        self._module = Module(self.recipe, advance, self._check_gradients)
        # With several networks, each phase leaves parameters unused. With one network on three or more ranks,
        # find_unused_parameters keeps the order of the buckets, so that a resumed run sums gradients in the same order.
        unused = len(self.recipe.networks) > 1 or self.world.size > 2
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            try:
                make_trainer(self.world, find_unused_parameters=unused).fit(
                    self._module, train_dataloaders=Steps(steps)
                )
            except SystemExit:  # the Trainer turns Ctrl-C into SystemExit
                raise KeyboardInterrupt from None
        self.recipe.to(self.world.device)  # the Trainer leaves its module on the CPU

    def _check_gradients(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        check_gradients(wrapper, self.recipe.phases[-1], self.settings, self.world.rank)

    def backward(self, loss: Tensor, last: bool) -> None:
        # manual_backward prepares Lightning's reducer. Until the last micro-batch, gradients stay local.
        if last and self._module is not None:
            self._module.manual_backward(loss)
        else:
            loss.backward()
