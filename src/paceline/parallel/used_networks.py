"""Record which networks a computation uses, so that only their weights are gathered for the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class UsedNetworks(TorchFunctionMode):
    """Records, inside the context, the networks whose parameters or buffers are passed to a torch function.

    Calls of a network, calls of its layers, and direct uses of its weights are all recorded.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._networks = networks
        self.names: set[str] = set()

    def __enter__(self) -> UsedNetworks:
        # Sharding replaces parameters, so they are looked up when the context is entered.
        self._owners = {
            id(tensor): name
            for name, network in self._networks.items()
            for tensor in (*network.parameters(), *network.buffers())
        }
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._record(args)
        self._record((kwargs or {}).values())
        return function(*args, **(kwargs or {}))

    def _record(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                name = self._owners.get(id(value))
                if name is not None:
                    self.names.add(name)
            elif isinstance(value, (tuple, list)):
                self._record(value)
