"""Ctrl-C on the command line: the parser would turn it into an exit code without a word."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Interrupted(Exception):
    """Ctrl-C inside a command, in a form that the command line's own parser lets through."""


class Commands(TyperGroup):
    """Commands that tell Ctrl-C from an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop)) from None
