"""A script for one rank that joins the process group, leaves and joins again; rank 0 leaves late."""

import os
import time

import torch

from paceline.config.settings import RunSettings
from paceline.parallel.world import join

settings = RunSettings(accelerator="cpu", strategy="ddp", devices=2, timeout=100.0)
for rendezvous in (1, 2):
    world = join(settings, distributed=True)
    total = world.sum(torch.tensor([float(rendezvous * (world.rank + 1))])).item()
    assert total == 3 * rendezvous, total
    if world.is_first and rendezvous == 1:
        time.sleep(1.0)
    world.leave()
print("met twice")
os._exit(0)
