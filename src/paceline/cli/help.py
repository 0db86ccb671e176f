"""How `--help` looks: options in groups, and examples that can be pasted."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import Any

from typer.core import TyperCommand, TyperGroup

from paceline.cli.start import Interrupted
from paceline.config.flags import GROUPS
from paceline.core.registry import about, names, preset_names

WIDEST, NARROWEST = 100, 30  # columns; limits on the width of the help, whatever the width of the terminal
NARROW = 70  # columns; on a narrower terminal, the description of an option starts on a line of its own
INDENT = 2
OPTIONS = "Options"  # title for options that are in no group
OTHERS = "Other options"  # the same title in a command that has groups
CONTEXT = {"help_option_names": ["-h", "--help"]}

Row = tuple[str, str]


class _WithGroups:
    """Wraps the help to the width of the terminal, and lists the options in groups."""

    def get_help(self, ctx: Any) -> str:
        ctx.terminal_width = max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))
        return str(super().get_help(ctx))  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, rows in _grouped(ctx.command.get_params(ctx), ctx).items():
            _write_rows(formatter, title, rows)


class Command(_WithGroups, TyperCommand):
    """A command with grouped options; its epilog is a list of example commands, one per line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        if any(parameter.name == "recipe" and not parameter.opts[0].startswith("-") for parameter in self.params):
            _write_rows(formatter, "Recipes", _recipes())

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(textwrap.indent(_fitted(line, formatter.width - 2 * INDENT), " " * INDENT) + "\n")


class Commands(_WithGroups, TyperGroup):
    """A command group that raises Interrupted on Ctrl-C and describes each command in a full sentence."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in found if command]
        _write_rows(formatter, "Commands", rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(str(stop)) from None


def _grouped(parameters: Iterable[Any], ctx: Any) -> dict[str, list[Row]]:
    """Return the help for all parameters by group title, arguments first."""
    found: dict[str, list[Row]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            group = parameter.rich_help_panel if hasattr(parameter, "rich_help_panel") else ""
            title = "Arguments" if parameter.param_type_name == "argument" else group or OPTIONS
            found.setdefault(title, []).append(record)
    if any(title in GROUPS for title in found) and OPTIONS in found:
        found[OTHERS] = found.pop(OPTIONS)
    order = ("Arguments", OPTIONS, *GROUPS, OTHERS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def _recipes() -> list[Row]:
    rows = []
    for name in names("recipe"):
        presets = preset_names(name)
        hint = f" Presets: {', '.join(presets)}." if presets else ""
        rows.append((name, f"{about('recipe', name)}{hint}"))
    return rows


def _write_rows(formatter: Any, title: str, rows: list[Row]) -> None:
    """Write two columns or, on a narrow terminal, each description below its name; break lines between words only."""
    if not rows:
        return
    longest = max(len(name) for name, _ in rows)
    column = min(longest, 28) + 2 if formatter.width >= NARROW else 2 * INDENT
    fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    with formatter.section(title):
        for name, text in rows:
            indent = " " * (INDENT + column)
            start = f"{' ' * INDENT}{name}"
            same_line = len(start) + 2 <= len(indent)
            body = fill(
                " ".join(text.split()),
                formatter.width,
                initial_indent=start.ljust(len(indent)) if same_line else indent,
                subsequent_indent=indent,
            )
            if not same_line:
                words = fill(start, formatter.width, subsequent_indent=" " * (INDENT + column))
                body = f"{words}\n{body}" if text else words
            formatter.write(f"{body.rstrip() or start}\n")


def _fitted(command: str, width: int) -> str:
    """Return a command on several lines that can be pasted, broken between words; comments get a line of their own."""
    command, _, comment = command.partition("  # ")
    lines = textwrap.wrap(f"# {comment}", width, subsequent_indent="# ") if comment else []
    current = ""
    for word in re.findall(r"--\S+(?: (?!--)\S+)?|\S+", command):  # a flag stays with its value
        if current and len(current) + 1 + len(word) > width - 2:
            lines.append(f"{current} \\")
            current = "    " + word
        else:
            current = f"{current} {word}" if current else word
    return "\n".join([*lines, current])


EXAMPLES = {
    "train": """\
paceline train classification --preset quick  # a first run: takes seconds on a CPU
paceline train classification --data folder --data-root photos --epochs 30  # your own images, one folder per class
paceline train dcgan --preset quick --devices 2 --accelerator cpu  # two processes
paceline train classification --preset quick --lr 0.05 --name lower-lr  # another run, in runs/lower-lr
paceline train ./my_recipe.py --set width=32  # your own recipe""",
    "evaluate": """\
paceline evaluate runs/first
paceline evaluate runs/first --split validation --checkpoint last
paceline evaluate runs/first --data folder --data-root photos  # other images""",
    "verify": """\
paceline verify classification
paceline verify dcgan --strategies single,fsdp --steps 50
paceline verify classification --control unsynced-batchnorm  # an error that the check must detect""",
    "compare": """\
paceline compare classification --preset quick --strategies single,ddp --devices 2
paceline compare runs/first runs/second  # a report on finished runs""",
    "plan": """\
paceline plan classification --preset quick --devices 2 --accelerator cpu
paceline plan classification --devices 16 --nodes 2 --bandwidth 25GB/s
paceline plan classification --preset quick --memory --device-memory 24GiB""",
    "pack": """\
paceline pack photos packed  # then train with --data packed --data-root packed
paceline pack cifar10 packed
paceline pack photos shards --to-shards  # tar files, for --data shards""",
    "doctor": """\
paceline doctor
paceline doctor --self-test
paceline doctor --loaders --data folder --data-root photos""",
    "board": """\
paceline board
paceline board s3://bucket/runs --port 8000""",
    "settings": """\
paceline settings  # all recipes and sources
paceline settings classification --preset quick""",
    "new": """\
paceline new recipe my_recipe
paceline new gan my_gan
paceline new source my_source""",
    "sample": """\
paceline sample runs/gan --grid 4x8
paceline sample runs/gan --interpolate --out interpolation.png
paceline sample runs/gan --animate""",
    "apply": """\
paceline apply runs/sr photos --out results
paceline apply weights.safetensors image.png --out results --tile 512""",
    "predict": """\
paceline predict runs/first image.png
paceline predict runs/first photos --top 1 --out predictions.csv""",
    "measure": """\
paceline measure results targets
paceline measure results targets --protocol y --border 4 --json metrics.json""",
    "import": """\
paceline import generator.pth --recipe super_resolution --out generator.safetensors""",
    "export": """\
paceline export runs/first --out model.onnx""",
    "launch slurm": """\
paceline launch slurm classification --data cifar10 --nodes 2 --gpus-per-node 4 --time 2:00:00
paceline launch slurm classification --data cifar10 --gpus-per-node 4 --submit""",
    "launch kubernetes": """\
paceline launch kubernetes classification --image example/paceline --gpus-per-node 4 --runs-claim runs""",
    "launch torchrun": """\
paceline launch torchrun classification --data cifar10 --hosts node1,node2 --devices 4""",
}
