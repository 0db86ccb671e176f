"""Arguments of DistributedDataParallel whose names depend on the version of torch, and its warnings."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn

# torch warns about convolutions with one channel or 1×1 pixels: two sets of strides describe the same layout.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")

# Buffers are broadcast once, when a wrapper is built. A broadcast in every forward pass would break recipes
# that call a network twice before a backward pass.
_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
NO_BUFFER_BROADCAST: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"): False
}
