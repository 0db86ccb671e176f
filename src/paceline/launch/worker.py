"""A process that our launcher started: finds its task and its config, and does its part.

`python -m paceline.launch.worker MODULE FUNCTION ARGUMENTS RECIPE CONFIG_FILE`
"""

from __future__ import annotations

import os
import sys
import traceback

from paceline.config.files import read_file
from paceline.core.errors import UserError
from paceline.launch.mailbox import leave_work, mistake_was_reported, report_for_work, report_mistake
from paceline.launch.tasks import Task
from paceline.runs.config import resolve_config
from paceline.training.stop import INTERRUPTED


def main() -> int:
    report_for_work()
    *reference, recipe, path = sys.argv[1:]
    task = Task(*reference)
    try:
        return task.run(resolve_config(recipe, [("config", read_file(path))]))
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
