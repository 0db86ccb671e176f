"""A worker process started by Paceline's launcher: loads the task and the config, and runs the task.

`python -m paceline.launch.worker MODULE FUNCTION ARGUMENTS RECIPE CONFIG_FILE`
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from paceline.config.files import read_file
from paceline.core.errors import describe_limit
from paceline.core.output import open_streams
from paceline.core.registry import fault_of_plugin
from paceline.core.terminal import end_activity, show_activities_of_worker
from paceline.core.text import print_any_text, print_line
from paceline.launch.mailbox import (
    register_worker,
    report_stop,
    report_user_error,
    unregister_worker,
    user_error_was_reported,
    wait_for_examination,
)
from paceline.launch.tasks import Task
from paceline.runs.recipe import resolve_config
from paceline.training.stop import INTERRUPTED


def main() -> int:
    """Run the task and return the exit code; the launcher prints a user error once for all workers."""
    print_any_text()
    show_activities_of_worker()
    register_worker()
    try:
        return _run_task(*sys.argv[1:])
    except KeyboardInterrupt:  # another worker may wait for this one in C code: after a failure, the launcher ends it
        report_stop(INTERRUPTED)
        _exit(INTERRUPTED)


def _run_task(module: str, function: str, arguments: str, recipe: str, path: str) -> int:
    """Run a task and report its failure; return the exit code."""
    try:
        return Task(module, function, arguments).run(resolve_config(recipe, [("config", read_file(path))]))
    except SystemExit as early:  # the recipe has called sys.exit: the launcher must notice that the task did not end
        traceback.print_exc()
        _exit(early.code if isinstance(early.code, int) else int(early.code is not None))
    except Exception as error:
        # After an OSError, such as a lost connection, a restart may help.
        fault = None if isinstance(error, OSError) else fault_of_plugin(error)
        if line := str(fault or "") or describe_limit(error):
            if not report_user_error(line):
                print_line(line, sys.stderr)
            return 2
        if user_error_was_reported():
            return 2
        traceback.print_exc()
        wait_for_examination()
        return 1


def _exit(code: int) -> NoReturn:
    """End this process without an interpreter shutdown, during which process-group threads can hang."""
    end_activity()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    open_streams()
    _exit(unregister_worker(main()))
