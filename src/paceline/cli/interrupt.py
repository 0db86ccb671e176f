"""Handle Ctrl-C, which the parser would otherwise turn into an exit code without a message."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Interrupted(Exception):
    """Raised when the user presses Ctrl-C during a command; the parser does not intercept this exception."""


class Commands(TyperGroup):
    """A group of commands that raises Interrupted on Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop)) from None
