"""LPIPS, a perceptual distance between images (Zhang et al. 2018), if its package is installed.

The network is not part of any recipe's module tree. There is one copy per device and dtype, created on first use.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from functools import cache, lru_cache
from threading import Lock
from typing import cast

import torch
from torch import Tensor, nn

from paceline.core.errors import UserError, install_extra

_lock = Lock()  # needed because DataParallel uses several threads


def has_lpips() -> bool:
    """Return whether the package `lpips` is installed."""
    return importlib.util.find_spec("lpips") is not None


@lru_cache(maxsize=1)
def load_lpips() -> nn.Module:
    """Return the frozen LPIPS network on the CPU; raises whatever the package raises if its weights are missing."""
    import lpips

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package calls torchvision with arguments that are deprecated
        network: nn.Module = lpips.LPIPS(net="alex", verbose=False)
    return network.eval().requires_grad_(False)


def check_lpips() -> None:
    """Raise UserError if LPIPS cannot be used as a loss."""
    if not has_lpips():
        raise UserError(f"lpips: the package is not installed; install with: {install_extra('lpips')}, or set lpips=0")
    try:
        load_lpips()
    except Exception as error:
        raise UserError(f"lpips: the network cannot be loaded ({str(error).splitlines()[0]}); set lpips=0") from None


def lpips_loss(made: Tensor, target: Tensor) -> Tensor:
    """Return the mean LPIPS distance between images in [-1, 1], in float32 or wider."""
    dtype = torch.promote_types(made.dtype, torch.float32)
    with _lock:
        network = _copy_on(made.device, dtype)
    with torch.autocast(made.device.type, enabled=False):
        one, other = (images.to(dtype).expand(-1, 3, -1, -1) for images in (made, target))
        return cast(Tensor, network(one, other)).mean()


@cache
def _copy_on(device: torch.device, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(load_lpips()).to(device, dtype)
