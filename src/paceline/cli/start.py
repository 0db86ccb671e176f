"""The entry point of the `paceline` command. It handles Ctrl-C and SIGTERM before it imports the rest."""

from __future__ import annotations

import os

from paceline.cli.interrupt import exit_code, handle_interrupts, print_interrupted
from paceline.core.output import open_streams


def main() -> None:
    """Run the `paceline` command and exit."""
    try:
        open_streams()
        handle_interrupts()
        from paceline.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while modules are searched for, or between the command and its end
        print_interrupted()
        os._exit(exit_code())
