"""The entry point of the `paceline` command. It handles Ctrl-C before it imports the rest of the command line."""

from __future__ import annotations

import os

from paceline.cli.interrupt import EXIT_CODE, handle_interrupts, print_interrupted


def main() -> None:
    """Run the `paceline` command and exit."""
    try:
        handle_interrupts()
        from paceline.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while modules are searched for, or between the command and its end
        print_interrupted()
        os._exit(EXIT_CODE)
