"""Lightning's Trainer: its loop, device placement and DistributedDataParallel, with Paceline's recipe and learners.

Lightning wraps all networks in one DistributedDataParallel, which adversarial recipes can only use with
`find_unused_parameters`. The learners, gradient scaling, clipping, autocast, sample order and checkpoints are the
same as under other strategies, so a run ends with the same weights.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError, missing
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import (
    NO_BUFFER_BROADCAST,
    Feature,
    MemoryShares,
    StepData,
    Strategy,
    bytes_of,
    check_gradients,
)
from paceline.parallel.world import World


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
        self._module: Any = None  # set when the Trainer starts

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        # Lightning's wrapper has buckets for all networks, which are separate from the gradients.
        buckets = bytes_of(p for network in recipe.networks.values() for p in network.parameters() if p.requires_grad)
        return MemoryShares(buffer_bytes=buckets if num_devices > 1 else 0)

    def drive(self, steps: Iterable[StepData], advance: Callable[[StepData], None]) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self.trainable.release()  # Lightning's DDP wrapper ignores parameters that do not yet require grad
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            try:
                self._module = _make_module(self.recipe, advance, self._check_gradients)
            except ImportError as error:
                raise UserError(f"--strategy lightning: {missing(error.name or 'lightning', 'lightning')}") from None
            trainer = _make_trainer(self.world, len(self.recipe.networks))
            try:
                trainer.fit(self._module, train_dataloaders=Steps(steps))
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


class Steps:
    """An iterable without a length, so that the Trainer does not manage the data."""

    def __init__(self, steps: Iterable[Any]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)


def _make_trainer(world: World, num_networks: int) -> Any:
    """Return a Trainer that only runs the loop: one pass over the steps, no logger, no checkpoints."""
    import lightning
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    strategy: Any = SingleDeviceStrategy(world.device)
    if world.size > 1:
        strategy = DDPStrategy(
            parallel_devices=[world.device] * world.place.local_size,
            cluster_environment=TorchElasticEnvironment(),
            process_group_backend=world.backend,
            # With several networks, each phase leaves parameters unused. With one network on three or more ranks, this
            # keeps the order of the buckets, so that a resumed run sums gradients in the same order.
            find_unused_parameters=num_networks > 1 or world.size > 2,
            **NO_BUFFER_BROADCAST,
        )
    trainer = lightning.Trainer(
        accelerator=world.device.type,
        strategy=strategy,
        devices=world.place.local_size if world.device.type == "cpu" else "auto",
        num_nodes=world.place.num_nodes,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # If SIGTERM arrived before the first step, the Trainer's own handler would end the run as if it were interrupted.
    # There is no public way to keep the Trainer from handling signals. Without this one, `on_train_start` still does.
    if connector := getattr(trainer, "_signal_connector", None):
        connector.register_signal_handlers = lambda: None
    return trainer


def _make_module(recipe: Recipe, advance: Callable[[Any], None], check: Callable[[Any], None]) -> Any:
    """Return the recipe as a LightningModule without Lightning optimizers; each batch runs one Paceline step."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.recipe = recipe
            self.on_sigterm = signal.getsignal(signal.SIGTERM)

        def on_train_start(self) -> None:
            # The Trainer's own handler would start a collective inside the signal handler, in the middle of a step.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self.on_sigterm)

        def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
            if isinstance(wrapper := self.trainer.strategy.model, nn.parallel.DistributedDataParallel):
                check(wrapper)

        def training_step(self, batch: Any, batch_index: int) -> None:
            advance(batch)

        def configure_optimizers(self) -> None:
            return None

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch  # the batch is already on the device

    return Module()
