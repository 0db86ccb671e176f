"""A comparison of strategies or runs. This file declares its options, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import typer

from paceline.config.flags import STRATEGIES


@dataclass(frozen=True)
class Options:
    """The options of the command; None for those that the user did not give."""

    strategies: Annotated[str | None, typer.Option(help=f"strategies (default: {STRATEGIES})")] = None
    seeds: Annotated[
        str | None, typer.Option(help="comma-separated random seeds; tables show the mean and the spread (default: 0)")
    ] = None
    scaling: Annotated[
        Literal["strong", "weak"] | None,
        typer.Option(help="strong: --batch-size is global (default); weak: --batch-size is per device"),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="train up to N runs at a time, on separate GPUs or CPU cores, without measuring their speed "
            "(default: 1)",
        ),
    ] = None
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="also check that all strategies produce the same weights"),
    ] = None
    step_ladder: Annotated[
        bool | None,
        typer.Option("--step-ladder/--no-step-ladder", help="also measure what limits speed on several devices"),
    ] = None
    config_file: str = ""
    assignments: tuple[str, ...] = ()

    def given(self) -> list[str]:
        """Return the flags given by the user that apply only to new runs or measurements."""
        others = {"config_file": "--config", "assignments": "--set"}
        return [others.get(f.name, f"--{f.name.replace('_', '-')}") for f in fields(self) if getattr(self, f.name)]
