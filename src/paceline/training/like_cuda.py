"""Makes operations on fake CPU tensors use as much memory as on a GPU."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Autocast on a GPU runs these operations in float32, and on a CPU in the precision of their inputs.
IN_FLOAT32 = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
    F.softplus,
    F.normalize,
    torch.layer_norm,
    torch.softmax,
    Tensor.softmax,
    torch.pow,
    Tensor.pow,
    torch.norm,
    Tensor.norm,
}
_DROPOUT = signature(F.dropout)


class LikeCuda(TorchFunctionMode):
    """Runs operations as on a GPU: with its autocast list, and with dropout masks of one byte per value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            return func(*map(_in_float32, args), **{name: _in_float32(value) for name, value in kwargs.items()})
        if func is F.dropout:
            bound = _DROPOUT.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["training"] and not bound.arguments["inplace"]:
                return torch.native_dropout(bound.arguments["input"], bound.arguments["p"], True)[0]
        return func(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
