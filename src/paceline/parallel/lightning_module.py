"""The recipe as a LightningModule; imported only by the lightning strategy, since Lightning is an extra."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel.strategy import NO_BUFFER_BROADCAST
from paceline.parallel.world import World


def make_trainer(world: World, *, find_unused_parameters: bool) -> lightning.Trainer:
    """Return a Trainer that only runs the loop: one pass over the steps, no logger, no checkpoints."""
    strategy: Any = SingleDeviceStrategy(world.device)
    if world.size > 1:
        strategy = DDPStrategy(
            parallel_devices=[world.device] * world.place.local_size,
            cluster_environment=TorchElasticEnvironment(),
            process_group_backend=world.backend,
            find_unused_parameters=find_unused_parameters,
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


class Steps:
    """An iterable without a length, so that the Trainer does not manage the data."""

    def __init__(self, steps: Iterable[Any]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)


class Module(lightning.LightningModule):
    """The recipe as a LightningModule without Lightning optimizers; each batch runs one Paceline step."""

    def __init__(
        self, recipe: Any, advance: Callable[[Any], None], check: Callable[[DistributedDataParallel], None]
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recipe, self.advance, self.check = recipe, advance, check
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self) -> None:
        # The Trainer's own handler would start a collective inside the signal handler, in the middle of a step.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        wrapper = self.trainer.strategy.model
        if isinstance(wrapper, DistributedDataParallel):
            self.check(wrapper)

    def training_step(self, batch: Any, batch_index: int) -> None:
        self.advance(batch)

    def configure_optimizers(self) -> None:
        return None

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # the batch is already on the device
