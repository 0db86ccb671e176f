"""Functions that run in one process per device, identified by module and name, with arguments as JSON.

A task is created from the function itself, so type checkers see its arguments and nothing has to be registered.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, cast

from paceline.config.files import to_toml
from paceline.config.resolve import Config
from paceline.launch.rendezvous import Rendezvous
from paceline.launch.torchrun import run_processes
from paceline.parallel.strategy import strategy_class

Arguments = ParamSpec("Arguments")
WORKER = "paceline.launch.worker"


class Task(NamedTuple):
    """A module-level function and its arguments, as strings for a command line."""

    module: str
    function: str
    arguments: str  # JSON with the positional and keyword arguments that follow the config

    @classmethod
    def of(
        cls,
        function: Callable[Concatenate[Config, Arguments], int | None],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Task:
        """Return the task that calls `function(config, *arguments, **named)`; arguments must be JSON values."""
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or getattr(sys.modules[module], name, None) is not function:
            raise ValueError(f"{module}.{name}: a task must be a function that other processes can import")
        return cls(module, name, json.dumps([arguments, named]))

    def run(self, config: Config) -> int:
        """Call the function and return its exit code; None counts as 0."""
        found = getattr(importlib.import_module(self.module), self.function, None)
        if found is None:
            raise LookupError(f"{self.module}.{self.function}: no such function")
        arguments, named = json.loads(self.arguments)
        return cast(Callable[..., int | None], found)(config, *arguments, **named) or 0


def run_in_processes(
    task: Task,
    config: Config,
    rendezvous: Rendezvous | None = None,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> int:
    """Run a task in one process per device on this host; return the exit code. See `run_processes`."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config.values(), {}))
        rendezvous = rendezvous or Rendezvous(timeout=config.run.timeout)
        processes = config.run.devices if strategy_class(config).needs_processes else 1
        return run_processes(WORKER, [*task, config.recipe_name, str(path)], processes, rendezvous, on_failure)
