"""Lightning's Trainer: its loop, device placement and DistributedDataParallel around the same recipe and learners.

Lightning wraps all networks in one DistributedDataParallel, which adversarial recipes can only use with
`find_unused_parameters`. Learners, scaler, clipping, autocast, tickets and checkpoints stay ours, so that
the same recipe gives the same weights.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from paceline.parallel.strategies.ddp import STILL_BUFFERS
from paceline.parallel.strategy import StepData, Strategy


class Lightning(Strategy):
    """The loop turned inside out: the Trainer calls `advance` as its training step."""

    distributed = True

    def drive(self, steps: Iterable[StepData], advance: Callable[[StepData], None]) -> None:
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        for parameter in self.trainable:
            parameter.requires_grad_(True)  # its DDP wrapper keeps the parameters that require grad now
        self.module = _Module(self.recipe, advance)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            try:
                self._trainer().fit(self.module, train_dataloaders=_Steps(steps))
            except SystemExit:  # what the Trainer makes of Ctrl-C
                raise KeyboardInterrupt from None
        self.recipe.to(self.world.device)  # the Trainer leaves its module on the CPU

    def _trainer(self) -> lightning.Trainer:
        strategy: Any = SingleDeviceStrategy(self.world.device)
        if self.world.size > 1:
            strategy = DDPStrategy(
                parallel_devices=[self.world.device] * self.world.place.local_size,
                cluster_environment=TorchElasticEnvironment(),
                process_group_backend=self.world.backend,
                # With several networks it must be; with one it keeps buckets in their first order, so that over three
                # ranks or more a resumed run adds in the order of one that was not stopped.
                find_unused_parameters=len(self.recipe.networks) > 1 or self.world.size > 2,
                **STILL_BUFFERS,
            )
        return lightning.Trainer(
            accelerator=self.world.device.type,
            strategy=strategy,
            devices=self.world.place.local_size if self.world.device.type == "cpu" else "auto",
            num_nodes=self.world.place.num_nodes,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )

    def backward(self, loss: Tensor, last: bool) -> None:
        # Lightning readies its reducer in manual_backward; before the last micro-batch gradients stay local.
        if last:
            self.module.manual_backward(loss)
        else:
            loss.backward()


class _Steps:
    """An iterable without a length, which is all that the Trainer may know of the data."""

    def __init__(self, steps: Iterable) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator:
        return iter(self.steps)


class _Module(lightning.LightningModule):
    """The recipe as Lightning sees it: no optimizers of Lightning's, one step of ours per batch."""

    def __init__(self, recipe: Any, advance: Callable) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recipe, self.advance = recipe, advance
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self) -> None:
        # The Trainer's own handler starts a collective from inside the signal, between those of the step.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.on_sigterm)

    def training_step(self, batch: Any, batch_index: int) -> None:
        self.advance(batch)

    def configure_optimizers(self) -> None:
        return None

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch  # the loader put it there
