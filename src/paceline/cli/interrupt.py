"""Ctrl-C on the command line: the parser would turn it into an exit code without a message."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Interrupted(Exception):
    """Ctrl-C inside a command, as an exception that the parser lets through."""


class Commands(TyperGroup):
    """A group of commands that raises Interrupted on Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop)) from None
