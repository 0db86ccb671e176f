"""A process that a launcher of ours started: reads its config and does its part of a job."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path

from paceline.config import Config, resolve
from paceline.config_file import read_file, to_toml
from paceline.engine.assemble import strategy_class
from paceline.engine.signals import INTERRUPTED
from paceline.errors import UserError
from paceline.launch.meeting import Meeting
from paceline.launch.notes import leave_work, mistake_was_reported, report_for_work, report_mistake
from paceline.launch.torchrun import run_processes
from paceline.recipe import Recipe
from paceline.registry import load_class


def run_in_processes(job: str, config: Config, *arguments: str, meeting: Meeting | None = None) -> int:
    """Runs a job's `JOB_here(config, *arguments)` in one process per device of this host; gives the exit code."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config.values(), {}))
        words = [job, config.recipe_name, str(path), *arguments]
        processes = config.run.devices if strategy_class(config).distributed else 1
        return run_processes("paceline.jobs.worker", words, processes, meeting)


def main() -> int:
    report_for_work()
    job, recipe_name, path, *arguments = sys.argv[1:]
    module = importlib.import_module(f"paceline.jobs.{job}")
    try:
        recipe_class: type[Recipe] = load_class("recipe", recipe_name, Recipe)
        config = resolve(recipe_name, recipe_class.Settings, [("config", read_file(path))])
        result = getattr(module, f"{job.lstrip('_')}_here")(config, *arguments)
        return getattr(result, "exit_code", 0)
    except UserError as mistake:
        if not report_mistake(str(mistake)):
            print(mistake, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        if mistake_was_reported():
            return 2
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    code = leave_work(main())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's tear-down, in which threads of a process group can hang
