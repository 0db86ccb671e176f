"""Several processes on this machine through torchrun's agent."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.errors import UserError

ERROR_FILE = "PACELINE_ERROR_FILE"  # where the first process that meets a person's mistake writes its line
INTERRUPTED = 130


def run_processes(module: str, arguments: list[str], processes: int) -> int:
    """Runs `python -m module arguments` in several processes that meet on loopback; gives their exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        error_file = Path(folder) / "error"
        os.environ[ERROR_FILE] = str(error_file)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"is_host": True},
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
            return 0
        except SignalException as stop:
            return INTERRUPTED if stop.sigval == 2 else 128 + int(stop.sigval)
        except ChildFailedError as failure:
            if error_file.exists():
                raise UserError(error_file.read_text()) from None
            rank, first = min(failure.failures.items(), key=lambda item: item[1].timestamp)
            print(f"rank {rank} ended with exit code {first.exitcode}; logs/rank-{rank}.txt says more", file=sys.stderr)
            return first.exitcode if first.exitcode > 0 else 1
        finally:
            os.environ.pop(ERROR_FILE, None)


def report_mistake(line: str) -> bool:
    """Hands a person's mistake to the launcher, which shows it once; false where there is no launcher of ours."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    try:
        with open(path, "x") as file:
            file.write(line)
    except FileExistsError:
        pass
    return True
