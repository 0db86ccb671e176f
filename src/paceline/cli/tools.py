"""Command-line arguments for doctor, board, settings, new and pack."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.flags import Assignments, Flags, check_names, with_settings
from paceline.config.flags import SETTINGS_OF_DOCTOR, SETTINGS_OF_PACK
from paceline.core.errors import UserError


@with_settings(SETTINGS_OF_DOCTOR)
def doctor(
    flags: Flags,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="run a short `paceline verify` and time an all-reduce; on several GPUs, test a CUDA graph",
        ),
    ] = False,
    loaders: Annotated[bool, typer.Option("--loaders", help="measure the throughput of each loader on --data")] = False,
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Show this machine's hardware and software, and which strategies and loaders can run on it."""
    from paceline.commands.doctor import doctor as job
    from paceline.commands.doctor import measure_loaders_here

    if loaders and self_test:
        raise UserError("--self-test: cannot be combined with --loaders; run them separately")
    if loaders:
        raise typer.Exit(measure_loaders_here(flags, set_))
    if flags or set_:
        first = next((f"--{name.replace('_', '-')}" for name in flags), "--set")
        raise UserError(f"{first}: only used with --loaders; add --loaders")
    raise typer.Exit(job(self_test))


def board(
    runs: Annotated[
        str, typer.Argument(metavar="RUNS", help="a folder that contains runs, or a URL like s3://…")
    ] = "runs",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="port to listen on; 0 picks a free port (default: 6116)")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    edit: Annotated[
        bool | None,
        typer.Option(
            "--edit/--read-only",
            help="whether the page can edit tags and notes (default: only if --host is a loopback address)",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a live web page that shows local or remote runs."""
    from paceline.commands.board import board as job

    raise typer.Exit(job(runs, host, port, edit))


def settings(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="name of a recipe, or path to your own .py file")
    ] = "",
    data: Annotated[
        str, typer.Option(help="name of a source, or path to your own .py file (default: the recipe's source)")
    ] = "",
    preset: Annotated[str, typer.Option(help="named set of settings defined by the recipe")] = "",
) -> None:
    """List the settings of a recipe and a source, with the values that a run would use."""
    check_names(recipe or None, data or None)
    from paceline.commands.settings import settings as job

    raise typer.Exit(job(recipe, data, preset))


def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="recipe|gan|source", help="what to write: a recipe, a source, or a gan (a recipe with two networks)"
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="name of the recipe or source, also used as the file name")
    ],
) -> None:
    """Write a small working recipe or source to start from."""
    from pathlib import Path

    from paceline.commands.new import new as job

    path = job(kind, name, Path.cwd())
    print(
        f"wrote {path.name}; try: paceline train {'classification --data ./' if kind == 'source' else './'}{path.name}"
    )


@with_settings(SETTINGS_OF_PACK, defaults={"data": "photos"})
def pack(
    origin: Annotated[
        str, typer.Argument(metavar="SRC", help="a folder of images, an .npz file, or the name of a data source")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="the folder to create for the packed files")],
    flags: Flags,
    to_shards: Annotated[
        bool, typer.Option("--to-shards", help="write tar files in the WebDataset layout instead, without decoding")
    ] = False,
    shard_mb: Annotated[int, typer.Option(min=1, help="approximate size of a tar file in MB, for --to-shards")] = 256,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="hold out no images for testing: write a training split only")
    ] = False,
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Decode all images in a source once, into memory-mapped files; run the same command again to resume."""
    from paceline.config.files import parse_assignments

    chosen = parse_assignments(set_)
    if to_shards:
        from paceline.commands.pack import pack_to_shards

        raise typer.Exit(pack_to_shards(origin, destination, flags, chosen, shard_mb, train_only=train_only))
    from paceline.commands.pack import pack as job

    raise typer.Exit(job(origin, destination, flags, chosen, train_only=train_only))
