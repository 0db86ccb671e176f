"""The precision of a run: the dtypes of its weights and of autocast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.gpu import allow_tf32, keeping_tf32

DETERMINISM: Any = torch.utils.deterministic  # flags that its type annotations lack


@dataclass(frozen=True)
class Precision:
    """One of fp64, fp32, tf32, bf16 or fp16, on one type of device."""

    name: str
    device_type: str
    caches_casts: bool = True  # whether autocast keeps the cast weights until the end of the forward pass

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the weights and of the batch."""
        return torch.float64 if self.name == "fp64" else torch.float32

    @property
    def scaled(self) -> bool:
        """Whether a GradScaler is needed to keep gradients from underflowing."""
        return self.name == "fp16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a recipe's forward pass."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        return torch.autocast(self.device_type, dtype, cache_enabled=self.caches_casts) if dtype else nullcontext()

    def apply(self, *, deterministic: bool, autotune: bool = True) -> None:
        """Set PyTorch's global precision flags for this process.

        With `autotune`, cuDNN tries all kernels for each new shape, unless the results must be deterministic. For large
        images, this takes many seconds.
        """
        allow_tf32(self.name not in ("fp32", "fp64"))
        torch.backends.cudnn.benchmark = autotune and not deterministic
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this when it starts
        # Deterministic algorithms would fill new tensors, which only helps to find errors.
        DETERMINISM.fill_uninitialized_memory = False
        if deterministic != torch.are_deterministic_algorithms_enabled():  # avoids a slow import of the compiler
            torch.use_deterministic_algorithms(deterministic)

    @contextmanager
    def applied(self, *, deterministic: bool, autotune: bool = True) -> Iterator[None]:
        """Set PyTorch's precision flags inside the context, and restore them afterwards for the calling program."""
        cudnn = torch.backends.cudnn
        benchmark, was = cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
        only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
        fills = DETERMINISM.fill_uninitialized_memory
        try:
            with keeping_tf32():
                self.apply(deterministic=deterministic, autotune=autotune)
                yield
        finally:
            cudnn.benchmark = benchmark
            DETERMINISM.fill_uninitialized_memory = fills
            if deterministic != was:
                torch.use_deterministic_algorithms(was, warn_only=only_warned)


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the precision that a setting selects on a device."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return Precision(name, device.type)
