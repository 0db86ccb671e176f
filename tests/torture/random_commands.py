"""Random command lines for every command, option and argument of the Typer app, and a pool of files that they use.

An option's values follow from its type, its metavar, its help text and the setting of the same name, so that a new
command or option is drawn without a change here.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
import typer.main
from PIL import Image
from running import run_fork, start_fork, wait_until
from safetensors.torch import load_file

from paceline.cli.app import app
from paceline.config.flags import SourceFlags
from paceline.config.settings import LearnerSettings, RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core.registry import KINDS, load_class, preset_names

SHORT = {"images": 64, "batch_size": "16", "accelerator": "cpu", "loggers": ""}  # of every run that trains
WEIGHTY = ("train", "train", "compare", "evaluate", "apply", "pack", "import")  # drawn more often than the others
TOO_MANY = {"devices", "workers", "jobs", "nnodes", "nodes"}  # options that may start processes: few or far too many
HUGE = "9" * 30
NUMBERS = ("1", "2", "3", "4", "0", "-1", "99999", HUGE)
MORE_NUMBERS = ("7", "10", "64", "65", "1000", "2147483648", "-9223372036854775809")
NOT_NUMBERS = ("", "nan", "inf", "-inf", "1e400", "1e-400", "0x10", "1_000", "٣", "½", "1.5", "-0.0", "1,2")
NOT_NUMBERS += ("0.1", "off")
TEXTS = ("", " ", ",", ",,", "a,a", "auto", "none", "-", "--", "-x", "=", "a=b", "é", "画像", "💥", "a\nb", "\x1b[2Jx")
TEXTS += ("\u202ex", "%s", "{x}", "%(x)d", "../..", "[", "[[", "(", "*", "\\", "'", '"', "x" * 300)
TEXTS += ("x" * 5000, "\udcff")
SHAPES = ("1 epochs", "2 steps", "32 images", "50%", "never", "8", "0", "2,3", "1:2", "4x4", "8x8", "0,0,8,8", "cat")
SHAPES += ("quick", "all", "best", "last", "64", "test", "train")
URLS = ("http://127.0.0.1:9/x", "http://[", "s3://", "memory://x", "file:///dev/null", "nothing://x", "://", "http://")
ODD_PATHS = ("missing", "missing/below", "text.txt", "text.txt/below", "folder", "empty", "secret.txt")
ODD_PATHS += ("fifo", "broken")
ODD_PATHS += ("loop", "loop/below", "full", "null", "zero", ".", "..", "null/below", "fifo", "text.txt", "folder")
ODD_PATHS += ("new\nline", "-dash", "~nobody-there/x", "*.png", "[", "x" * 300, "y/" * 2500, "\udcff.png", "é 画像")

# The files and folders of each kind in the pool.
REAL: dict[str, list[str]] = {
    "run": ["run-classes", "run-sr", "run-gan", "run-stopped"],
    "weights": ["sr.safetensors", "classes.safetensors", "net.pth", "numbers.pth", "tensor.pth"],
    "onnx": ["sr.onnx"],
    "images": ["classes", "photos", "pairs", "one.png", "deep.tif", "panels.png", "photos/é 0.png", "one.jpg"],
    "packed": ["packed"],
    "shards": ["shards", "shards/train-000000.tar"],
    "array": ["data.npz"],
    "results": ["predictions.csv", "results"],
    "config": ["settings.toml", "settings.ini", "run-sr/config.toml"],
    "code": ["recipe.py", "source.py"],
    "folder": ["several", "folder"],
}

# What an option or argument takes, by a pattern for its name and metavar; the first match counts.
PATHS: dict[str, tuple[str, ...]] = {
    r"^(out|to|json|result|per_image|destination|mirror)\b": ("output",),
    r"^(config)\b": ("config",),
    r"RUN\|WEIGHTS|^(init_from|interpolate_with|next_to|features|run)\b": ("run", "weights"),
    r"^(inception|vgg|files)\b": ("weights", "onnx"),
    r"^(data_root|test_root|low_root|test_low_root|origin)\b": ("images", "packed", "shards", "array"),
    r"^(images|results|targets)\b.*(IMAGES|RESULTS|TARGETS)": ("images", "results"),
    r"^what\b": ("run", "folder", "recipe", "recipe", "recipe"),
    r"^resume_from\b|^runs\b": ("run", "folder"),
    r"sha256": ("text",),
}
NAMES = {"recipe": "recipe", "data": "source", "strateg(y|ies)": "strategy", "loaders?": "loader", "loggers": "logger"}


@dataclass(frozen=True)
class Line:
    """A random command line: the words after `paceline`, and the files in its folder that it may change."""

    number: int
    command: str
    words: tuple[str, ...]
    inputs: tuple[str, ...]  # names in the pool of the files and folders to copy
    outputs: frozenset[str]  # first parts of the paths that the command may write


@dataclass
class Pool:
    """Real files and folders of each kind, and damaged copies of them."""

    folder: Path
    real: dict[str, list[str]] = field(default_factory=dict)
    damaged: dict[str, list[str]] = field(default_factory=dict)


def make_pool(folder: Path, seed: str) -> Pool:
    """Write the pool into a new folder."""
    folder.mkdir()
    _make_devices(folder)
    pool = Pool(folder)
    chance = random.Random(f"pool {seed}")
    _write_images(folder)
    _write_texts(folder)
    _run_commands(folder)
    pool.real = REAL
    missing = [name for names in pool.real.values() for name in names if not (folder / name).exists()]
    assert not missing, f"the pool lacks {missing}"
    for kind, names in pool.real.items():
        pool.damaged[kind] = [_damage(folder, name, number, chance) for name in names for number in range(3)]
    return pool


def _make_devices(folder: Path) -> None:
    """Make device nodes: a command that wrongly replaces one must not harm the machine."""
    for name, minor in (("null", 3), ("zero", 5), ("full", 7)):
        with suppress(PermissionError):  # without root, these names are missing files
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))


def _write_images(folder: Path) -> None:
    numbers = np.random.default_rng(5)

    def image(path: str, height: int = 24, width: int = 24, dtype: str = "uint8") -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        coarse = numbers.integers(0, 255, (height // 4, width // 4, 3)).repeat(4, 0).repeat(4, 1)
        pixels = coarse.astype("uint8") if dtype == "uint8" else (coarse[..., 0] * 257).astype(dtype)
        Image.fromarray(pixels).save(folder / path)

    for number in range(8):
        for label in ("cat", "dög"):
            image(f"classes/{label}/{number}.{'png' if number % 2 else 'jpg'}")
        image(f"photos/{'é ' if number == 0 else 'photo-'}{number}.png", 32 + 4 * number, 48)
        image(f"results/photo-{number}.png", 32 + 4 * number, 48)
        image(f"pairs/input/{number}.png", 32, 32)
        image(f"pairs/target/{number}.png", 32, 32)
    image("one.png")
    image("one.jpg", 40, 28)
    image("deep.tif", 32, 32, "uint16")
    image("panels.png", 32, 96)
    np.savez(folder / "data.npz", images=numbers.integers(0, 255, (40, 12, 12, 3), "uint8"), labels=np.arange(40) % 4)


def _write_texts(folder: Path) -> None:
    (folder / "settings.toml").write_text('lr = 0.01\nimages = 64\nbatch_size = "16"\n')
    (folder / "settings.ini").write_text("[train]\nlr = 0.01\n")
    (folder / "predictions.csv").write_text("file,class,probability\none.png,cat,0.9\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "text.txt").write_text("text\n")


def _run_commands(folder: Path) -> None:
    def paceline(*words: str) -> None:
        done = run_fork(folder, *words)
        assert done.wait() == 0, f"paceline {' '.join(words)}:\n{done.stdout}{done.stderr}"

    paceline("new", "recipe", "recipe")
    paceline("new", "source", "source")
    paceline("pack", "classes", "packed", "--data", "folder")
    paceline("pack", "classes", "shards", "--data", "folder", "--to-shards", "--shard-mb", "1")
    for name, recipe in (("classes", "classification"), ("sr", "super_resolution"), ("gan", "dcgan")):
        paceline("train", recipe, *_words_of(small(recipe)), "--out", f"run-{name}")
    endless = _words_of({**small("classification"), "images": 10**9, "save_every": "64 images"})
    stopped = start_fork(folder, "train", "classification", *endless, "--out", "run-stopped")
    wait_until(lambda: list(folder.glob("run-stopped/checkpoints/*/manifest.json")), stopped)
    stopped.kill(15)
    assert stopped.wait() == 75, stopped.stderr
    for name in ("classes", "sr"):
        weights = max(folder.glob(f"run-{name}/checkpoints/*/weights.safetensors"))
        shutil.copy(weights, folder / f"{name}.safetensors")
    paceline("export", "run-sr", "--out", "sr.onnx")
    torch.save({"params": load_file(folder / "sr.safetensors")}, folder / "net.pth")
    torch.save({"epoch": 3, "name": "x", "loss": [0.1]}, folder / "numbers.pth")
    torch.save(torch.zeros(3), folder / "tensor.pth")
    (folder / "several").mkdir()
    for name in ("run-sr", "run-gan"):
        shutil.copytree(folder / name, folder / "several" / name)
    for output in [*folder.glob("stdout-*"), *folder.glob("stderr-*")]:
        output.unlink()


def _damage(folder: Path, name: str, number: int, chance: random.Random) -> str:
    """Damage a copy of a file, or one file in a copy of a folder; return the name of the copy."""
    source = folder / name
    copy = folder / f"bad-{number}-{name.replace('/', '-')}"
    if source.is_dir():
        shutil.copytree(source, copy, symlinks=True)
        files = sorted(file for file in copy.rglob("*") if file.is_file())
        spoiled = chance.choice(files)
    else:
        shutil.copy(source, copy)
        spoiled = copy
    content = spoiled.read_bytes() or b"\0"
    start, length = chance.randrange(len(content)), chance.randrange(1, 2000)
    flipped = bytearray(content)
    for _ in range(8):
        flipped[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    kinds: list[Callable[[], object]] = [
        lambda: spoiled.write_bytes(content[:start]),
        lambda: spoiled.write_bytes(flipped),
        lambda: spoiled.write_bytes(content[:start] + bytes(length) + content[start + length :]),
        lambda: spoiled.write_bytes(content[start:] + content[:start]),
        lambda: spoiled.write_bytes((folder / chance.choice(["one.png", "net.pth", "settings.toml"])).read_bytes()),
        lambda: spoiled.write_bytes(b""),
        lambda: (spoiled.unlink(), spoiled.mkdir()),
        lambda: (spoiled.unlink(), os.mkfifo(spoiled)),
        lambda: (spoiled.unlink(), spoiled.symlink_to(spoiled.name)),
        lambda: (spoiled.unlink(), spoiled.symlink_to(folder / "zero")),
        lambda: spoiled.rename(spoiled.with_name("moved" + spoiled.suffix)) if source.is_dir() else None,
        lambda: spoiled.write_text("[" * 100_000),
    ]
    chance.choice(kinds)()
    return copy.name


def small(recipe: str) -> dict[str, Any]:
    """Return the settings for a short training run of a recipe."""
    declared = load_class("recipe", recipe, Recipe).small if recipe in KINDS["recipe"].built_in() else {}
    return {**declared, **SHORT}


def _words_of(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


@cache
def commands() -> dict[str, Any]:
    """Return every command of the app by its name, such as `launch slurm`."""

    def listed(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            yield from (
                listed(command, f"{prefix}{name} ") if hasattr(command, "commands") else [(prefix + name, command)]
            )

    return dict(listed(typer.main.get_command(app), ""))


def _examples(epilog: str) -> dict[str, list[str]]:
    """Return the values of options in the examples of a command's help."""
    found: dict[str, list[str]] = {}
    for flag, value in re.findall(r"(--[a-z-]+) ([^\s-]\S*)", epilog):
        found.setdefault(flag, []).append(value)
    return found


@cache
def _setting_types(recipe: str) -> dict[str, tuple[Any, str]]:
    """Return the type and the meaning of every setting of a run of a recipe; without a recipe, those of all."""
    groups = [RunSettings, SourceFlags, LearnerSettings]
    recipes = [recipe] if recipe else sorted(KINDS["recipe"].built_in())
    groups += [load_class("recipe", name, Recipe).Settings for name in recipes]
    found = {}
    for group in groups:
        hints = get_type_hints(group)
        found |= {f.name: (hints[f.name], str(f.metadata.get("meaning", ""))) for f in fields(group)}
    return found


def _type_of(parameter: Any) -> Any:
    """Return the type of an option or argument; versions of typer represent it in different ways."""
    descriptor = getattr(parameter, "type_descriptor", None)
    return descriptor.annotation if descriptor else parameter.type


def draw_line(pool: Pool, seed: str, number: int) -> Line:
    """Return the command line of a number; it depends on nothing else but the seed and the app."""
    return _Draw(pool, random.Random(f"{seed} {number}")).line(number)


class _Draw:
    def __init__(self, pool: Pool, chance: random.Random) -> None:
        self.pool, self.chance = pool, chance
        self.inputs: list[str] = []
        self.examples: dict[str, list[str]] = {}
        self.recipe = ""
        self.outputs: set[str] = set()
        self.careful = chance.choice((1, 0.98, 0.98, 0.9, 0.5))  # probability that a value is plausible

    def line(self, number: int) -> Line:
        """Draw a command, its arguments and its options."""
        name = self.chance.choice([*sorted(commands()), *WEIGHTY])
        parameters = commands()[name].params
        self.examples = _examples(commands()[name].epilog or "")
        arguments = [one for one in parameters if one.param_type_name == "argument"]
        options = [one for one in parameters if one.param_type_name == "option" and one.name != "help"]
        words: list[str] = []
        recipe = ""
        for argument in arguments:
            for _ in range(self.chance.choice((1, 1, 1, 2, 3)) if argument.nargs == -1 else 1):
                if argument.required or self.chance.random() < 0.8:
                    words.append(self.value(argument, at_least=0.8))
                    recipe = recipe or words[-1].split(",")[0]
        positional, words = words, []
        takes_settings = any(one.name == "set_" for one in options)
        trains = takes_settings and (recipe in KINDS["recipe"].built_in() or recipe.endswith(".py"))
        self.recipe = recipe if trains and recipe in KINDS["recipe"].built_in() else ""
        if trains:  # otherwise, almost every run would take minutes
            words += _words_of(small(recipe))
        chosen = [one for one in options if one.required and self.chance.random() < 0.95]
        others = [one for one in options if one not in chosen]
        number_of_options = self.chance.choice((0, 1, 1, 2, 2, 3) if self.careful > 0.9 else (1, 2, 3, 4, 6))
        chosen += self.chance.sample(others, min(len(others), number_of_options))
        if self.chance.random() > max(self.careful, 0.9) and chosen:
            chosen.append(self.chance.choice(chosen))  # the same option twice
        if takes_settings:
            chosen += [one for one in options if one.name == "set_"] * self.chance.choice((0, 0, 1, 2))
        if trains and not any(one.name in ("out", "name") for one in chosen):
            words += ["--out", "out"] if any(one.name == "out" for one in options) else []
            self.outputs.add("out")
        for option in chosen:
            words += self._spelled(option)
        if self.chance.random() > max(self.careful, 0.9):
            words.insert(
                self.chance.randrange(len(words) + 1), self.chance.choice(("--", "--nonsense", "extra", "-h", "--help"))
            )
        words = [*words, "--", *positional] if self.chance.random() < 0.03 else [*positional, *words]
        return Line(number, name, (*name.split(), *words), tuple(self.inputs), frozenset(self.outputs))

    def _spelled(self, option: Any) -> list[str]:
        flags = [*option.opts, *option.secondary_opts]
        flag = self.chance.choice([one for one in flags if one.startswith("--")])
        if option.is_flag:
            return [flag]
        value = self.value(option)
        return [f"{flag}={value}"] if value.startswith("-") or self.chance.random() < 0.3 else [flag, value]

    def value(self, parameter: Any, at_least: float = 0) -> str:
        """Return a value of an option or argument, which is plausible with at least this probability."""
        name = str(parameter.name)
        metavar = str(parameter.metavar or "")
        plausible = self.chance.random() < max(self.careful, at_least)
        for pattern, kinds in PATHS.items():
            if re.search(pattern, f"{name} {metavar}"):
                return self._path(kinds, self._meaning(parameter), plausible)
        if name == "set_":
            return self._assignment(plausible)
        default = getattr(parameter, "default", None)
        likely = self.examples.get(parameter.opts[0], []) + ([str(default)] if default not in (None, "", []) else [])
        if plausible and likely and self.chance.random() < 0.5:
            return self.chance.choice(likely)
        hint, _ = _setting_types("").get(name, (None, ""))
        return self._typed(name, hint or _type_of(parameter), self._meaning(parameter), plausible, metavar)

    def _meaning(self, parameter: Any) -> str:
        """Return the text from which plausible words are taken."""
        examples = " ".join(self.examples.get(parameter.opts[0], []) * 3)
        return f"{getattr(parameter, 'help', '') or ''} {examples}"

    def _typed(self, name: str, hint: Any, meaning: str, plausible: bool, metavar: str = "") -> str:
        choices = get_args(hint) if get_origin(hint) is Literal else tuple(getattr(hint, "choices", ()))
        choices = choices or (tuple(metavar.split("|")) if re.fullmatch(r"[a-z]+(\|[a-z]+)+", metavar) else ())
        kind = next((kind for pattern, kind in NAMES.items() if re.fullmatch(pattern, name)), "")
        if not plausible:
            return self.chance.choice(
                NOT_NUMBERS + NUMBERS if name in TOO_MANY else NOT_NUMBERS + NUMBERS + MORE_NUMBERS + TEXTS
            )
        if choices:
            return str(self.chance.choice(choices))
        if kind:
            known = sorted(KINDS[kind].built_in())  # type: ignore[index]
            several = self.chance.sample(known, 2) if name.endswith("s") else []
            return ",".join(several) or (self.chance.choice(known) if self.chance.random() < 0.9 else self._use("code"))
        if name == "preset":
            return self.chance.choice([*preset_names(self.recipe), "quick"] if self.recipe else ["quick"])
        if hint is bool:
            return self.chance.choice(("on", "off", "true", "1"))
        if re.search("(?i)int", str(hint)):
            return self.chance.choice(NUMBERS[:5] if name in TOO_MANY else NUMBERS[:5] + MORE_NUMBERS[:3])
        if "float" in str(hint).lower():
            return self.chance.choice(("0", "0.5", "1", "2", "1e-3", "0.9", "100"))
        words = re.findall(r"[\w./:%-]*\w", re.sub(r"[A-Z]{3,}\S*", "", meaning))
        return self.chance.choice([*words, *SHAPES])

    def _assignment(self, plausible: bool) -> str:
        if not plausible and self.chance.random() < 0.3:
            return self.chance.choice(TEXTS)
        types = _setting_types(self.recipe if plausible else "")
        name = self.chance.choice(sorted(types))
        hint, meaning = types[name]
        for pattern, kinds in PATHS.items():
            if re.search(pattern, name):
                return f"{name}={self._path(kinds, meaning, plausible)}"
        prefix = "" if plausible else self.chance.choice(("", "", "classifier.", "generator.", "x."))
        return f"{prefix}{name}={self._typed(name, hint, meaning, plausible)}"

    def _path(self, kinds: tuple[str, ...], meaning: str, plausible: bool) -> str:
        dice = self.chance.random()
        if kinds == ("output",):
            suffixes = re.findall(r"\.[a-z]\w{1,11}\b", meaning)
            suffix = self.chance.choice(suffixes) if suffixes and self.chance.random() < 0.95 else ""
            value = f"new{suffix}" if plausible else self._odd_path()
            if not plausible and dice < 0.4:
                value = self._use(self.chance.choice(sorted(self.pool.real)), outputs=True)
            self.outputs.add(value.removeprefix("./").split("/")[0])
            return value
        if kinds == ("text",):
            return self.chance.choice(("0" * 64, "f" * 64, "x" * 64, *TEXTS))
        if plausible:
            return self._use(self.chance.choice(kinds), damaged=dice < 0.3)
        if dice < 0.4:
            return self._use(self.chance.choice(sorted(self.pool.real)), damaged=dice < 0.2)
        return self.chance.choice(TEXTS + URLS) if dice < 0.6 else self._odd_path()

    def _odd_path(self) -> str:
        name = "".join(self.chance.choices(string.ascii_lowercase, k=5))
        return self.chance.choice((*ODD_PATHS, *URLS[:2], f"deep/{name}/{name}"))

    def _use(self, kind: str, *, damaged: bool = False, outputs: bool = False) -> str:
        if kind == "recipe":
            return self.chance.choice(sorted(KINDS["recipe"].built_in()))
        name = self.chance.choice((self.pool.damaged if damaged else self.pool.real)[kind])
        first = name.split("/")[0]
        self.inputs.append(first)
        if outputs or kind in ("run", "folder"):  # a run may get samples and metrics
            self.outputs.add(first)
        return self.chance.choice((name, name, name, f"./{name}"))


def lay_out(pool: Pool, line: Line, work: Path) -> None:
    """Copy what a command line uses into its folder, beside files and folders of unusual kinds."""
    work.mkdir(parents=True)
    for name in line.inputs:
        source = pool.folder / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, work / name, symlinks=True, dirs_exist_ok=True, copy_function=_copy)
        elif not os.path.lexists(work / name):
            _copy(str(source), str(work / name))
    if not (work / "folder").exists():
        (work / "folder").mkdir()
        (work / "folder" / "text.txt").write_text("text\n")
    (work / "empty").mkdir()
    (work / "text.txt").write_text("text\n")
    (work / "secret.txt").write_text("text\n")
    (work / "secret.txt").chmod(0)
    _make_devices(work)
    os.mkfifo(work / "fifo")
    (work / "broken").symlink_to("nowhere")
    (work / "loop").symlink_to("loop")


def _copy(source: str, target: str, **_: Any) -> str:
    path = Path(source)
    if path.is_symlink():
        os.symlink(os.readlink(source), target)
    elif path.is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy(source, target)
    return target
