"""What a run records: settings, provenance, segments and data spec; and what was measured on this machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline.config.files import FORMAT, PROVENANCE, RUN_FORMAT, Table, check_format, to_toml
from paceline.config.resolve import flatten
from paceline.contracts.data_spec import parse_spec, written_values
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import (
    MAX_TOML_BYTES,
    json_text,
    parse_json,
    parse_toml,
    read_bounded,
    read_json,
    user_cache,
    why,
    write_file,
)
from paceline.core.ordered_map import num_cores
from paceline.core.types import Scalar, SettingValue, SettingValues

HARDWARE = ("cpu", "cores", "gpus", "torch")  # properties that affect a run's speed, apart from its settings
UNTIL = "until_images"


@dataclass(frozen=True)
class Choices:
    """The values that `auto` settings resolved to when a run was started."""

    strategy: str
    devices: int
    accelerator: str
    loader: str
    workers: int = 0  # number of loader processes or threads


@dataclass(frozen=True)
class Segment:
    """A part of a run with the same devices, strategy and machine. A field is None if it does not apply."""

    strategy: str
    devices: int
    accelerator: str
    loader: str
    gpu_ids: str
    workers: int
    graph: str | None = None
    deterministic: bool | None = None
    cpu: str | None = None
    cores: str | None = None
    gpus: str | None = None
    torch: str | None = None
    until_images: int = 0  # images seen when the segment ended; 0 for the last segment

    def to_table(self) -> dict[str, SettingValue]:
        """Return the segment as a TOML table, omitting fields that are None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Segment:
        """Parse a segment from a table; raise TypeError or ValueError if it is invalid."""
        known = {f.name for f in fields(cls)}
        segment = cls(**{name: value for name, value in table.items() if name in known})  # type: ignore[arg-type]
        if type(segment.until_images) is not int:
            raise TypeError(f"{UNTIL} is not an integer")
        return segment


def segment_of(settings: SettingValues, choices: Choices, hardware: Mapping[str, str]) -> Segment:
    """Return the current segment of a run, given its settings, the resolved choices and the machine."""
    on_gpus = choices.accelerator == "cuda"
    return Segment(
        strategy=choices.strategy,
        devices=choices.devices,
        accelerator=choices.accelerator,
        loader=choices.loader,
        gpu_ids=str(settings.get("gpus", "")),
        workers=choices.workers,
        graph=str(settings.get("graph", "")) if on_gpus else None,
        deterministic=bool(settings.get("deterministic", False)) if on_gpus else None,
        cpu=hardware.get("cpu"),
        cores=hardware.get("cores"),
        gpus=hardware.get("gpus"),
        torch=hardware.get("torch"),
    )


def earlier_segments(before: Iterable[Segment], images: int, now: Segment) -> tuple[Segment, ...]:
    """Return the segments before `now` that led to the checkpoint at `images`, from which the run resumes.

    `before` lists all earlier segments in order. The last segment ends at `images`, even if it ran further.
    """
    found: list[Segment] = []
    for one in before:
        until = min(one.until_images or images, images)
        if until <= (found[-1].until_images if found else 0):
            continue  # the segment stopped before its first checkpoint
        if found and not changes(found[-1], one):
            found.pop()
        found.append(dataclasses.replace(one, until_images=until))
    return tuple(found[:-1] if found and not changes(found[-1], now) else found)


def changes(before: Segment, after: Segment) -> list[str]:
    """Return the differences between two segments as `name old → new`, for fields that apply to both."""
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(Segment) if f.name != UNTIL]
    return [f"{name} {was} → {now}" for name, was, now in pairs if None not in (was, now) and was != now]


CONFIG = "config.toml"
DATA = "data"
EARLIER = "earlier"  # key of an array of tables with all segments except the last


@dataclass(frozen=True)
class Provenance:
    """How and where a run was trained."""

    data: str  # number of samples, and a fingerprint of the data
    choices: Choices
    versions_and_hardware: Mapping[str, str] = field(default_factory=dict)
    earlier: tuple[Segment, ...] = ()

    def to_table(self) -> dict[str, Scalar | list[Table]]:
        """Return the content of the [provenance] table."""
        table: dict[str, Scalar | list[Table]] = {FORMAT: RUN_FORMAT, DATA: self.data, **asdict(self.choices)}
        table |= self.versions_and_hardware
        return table | ({EARLIER: [segment.to_table() for segment in self.earlier]} if self.earlier else {})

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Provenance:
        """Parse the [provenance] table; raise KeyError, TypeError or ValueError if it is invalid."""
        names = [f.name for f in fields(Choices)]
        texts = {name: str(table[name]) for name in (DATA, *names)}
        choices = Choices(
            texts["strategy"], int(texts["devices"]), texts["accelerator"], texts["loader"], int(texts["workers"])
        )
        others = {name: value for name, value in table.items() if name not in (FORMAT, DATA, EARLIER, *names)}
        earlier = table.get(EARLIER, [])
        if not isinstance(earlier, list):
            raise TypeError(f"{EARLIER} is not a list")
        segments = tuple(Segment.from_table(one) for one in earlier)
        return cls(texts[DATA], choices, {name: str(value) for name, value in others.items()}, segments)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's config.toml."""

    recipe: str
    settings: SettingValues  # per-network settings are nested tables
    provenance: Provenance

    @property
    def segment(self) -> Segment:
        """The last segment of the run."""
        return segment_of(self.settings, self.provenance.choices, self.provenance.versions_and_hardware)

    @property
    def segments(self) -> list[Segment]:
        """All segments of the run, in order."""
        return [*self.provenance.earlier, self.segment]

    def write(self, run: Path) -> None:
        """Write config.toml to a run folder, replacing the old one."""
        settings: dict[str, SettingValue] = {"recipe": self.recipe, **flatten(self.settings)}
        write_file(run / CONFIG, to_toml(settings, self.provenance.to_table()))


def read_record(run: Path, where: str = "") -> RunRecord | None:
    """Return the record in a run folder, or None if it has no config.toml.

    Raise UserError if the file cannot be read or its run format is not supported. A message about the format begins
    with `where`, by default the folder.
    """
    file = run / CONFIG
    try:
        kept = parse_toml(read_bounded(file, MAX_TOML_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({why(error)}): restore the file") from None
    recipe, provenance = kept.pop("recipe", None), kept.pop(PROVENANCE, {})
    if not isinstance(recipe, str):
        raise UserError(f"{file}: does not name a recipe, so {run} is not a run folder")
    check_format(provenance.get(FORMAT) if isinstance(provenance, dict) else None, where or str(run))
    try:
        return RunRecord(recipe, kept, Provenance.from_table(provenance))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{file}: [{PROVENANCE}] cannot be read ({error}): restore the file") from None


def versions_and_hardware() -> dict[str, str]:
    """Return versions and hardware by name, omitting what this machine does not have."""
    found = {package: _version(package) for package in ("paceline", "torch", "torchvision", "lightning")}
    found |= {
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": str(num_cores()),
        "threads": str(torch.get_num_threads()),  # per process
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        **describe_gpus(),
        "git_commit": _git_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in found.items() if value}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def describe_gpus() -> dict[str, str]:
    """Describe the machine's GPUs with NVML, since torch would allocate memory on each of them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = Counter(_text(pynvml.nvmlDeviceGetName(gpu)) for gpu in gpus)
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # pynvml, the driver or a GPU is missing
        return {}
    described = ", ".join(f"{count} × {name}" for name, count in names.items())
    return {"gpus": described, "driver": driver, "cuda": torch.version.cuda or ""}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _git_commit() -> str:
    """Return the Git commit of the current folder, and whether tracked files have changed."""
    commit = _git("rev-parse", "HEAD")
    return f"{commit} with changes" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


SELF_TEST, LOADERS = "self-test.json", "loaders.json"
HOW_TO_TEST = "run `paceline doctor --self-test`"


def cache_file(name: str) -> Path:
    """Return the path of a file in Paceline's cache folder."""
    return user_cache() / name


def read_cached(name: str) -> Mapping[str, Any]:
    """Return a saved result; empty if it is missing or damaged."""
    return read_json(cache_file(name))


def identity() -> dict[str, str]:
    """Return the host, GPUs, driver and torch version for which a saved result is valid."""
    gpus = describe_gpus()
    return {
        "host": platform.node(),
        "gpus": gpus.get("gpus", ""),
        "driver": gpus.get("driver", ""),
        "torch": str(torch.__version__),
    }


@dataclass(frozen=True)
class _GraphTest:
    """The self-test's result for a training step that was captured as a CUDA graph."""

    passed: bool
    result: str  # description of the failure, or of the values that were compared
    processes: int


@dataclass(frozen=True)
class _SelfTest:
    """The part of a self-test's results that concerns CUDA graphs."""

    machine: Mapping[str, str]
    verified: bool
    graph: _GraphTest | None

    @classmethod
    def read(cls) -> _SelfTest | None:
        """Return the saved self-test, or None if it is missing or cannot be read."""
        cached = read_cached(SELF_TEST)
        try:
            graph = cached["graph"]
            tested = _GraphTest(graph["passed"], graph["result"], graph["processes"]) if graph else None
            return cls(cached["machine"], bool(cached["verified"]), tested)
        except (KeyError, TypeError):
            return None


def graph_obstacle(processes: int, hosts: int) -> str:
    """Return why this machine cannot capture a step on several GPUs as a CUDA graph; empty if the self-test passed."""
    if hosts > 1:
        return "CUDA graphs are untested across several hosts"
    test = _SelfTest.read()
    if test is None:
        return f"CUDA graphs are untested on this machine's GPUs; {HOW_TO_TEST}"
    for name, here in identity().items():
        then = test.machine.get(name, "")
        if then != here:
            return f"the self-test is outdated ({name}: {then or 'unknown'}, now {here}); {HOW_TO_TEST}"
    if not test.verified:
        return "this machine's self-test failed"
    if not test.graph:
        return f"this machine's self-test used fewer than two GPUs; {HOW_TO_TEST}"
    if not test.graph.passed:
        return f"in this machine's self-test, {test.graph.result}"
    if processes > test.graph.processes:
        return f"this machine's self-test used fewer GPUs ({test.graph.processes}, not {processes}); {HOW_TO_TEST}"
    return ""


DATA_SPEC = "data_spec.json"


def to_json(spec: DataSpec) -> str:
    """Return a data spec as JSON."""
    return json_text(written_values(spec))


def from_json(text: str) -> DataSpec:
    """Parse a data spec from JSON; raise ValueError, KeyError or TypeError if it is invalid."""
    return parse_spec(parse_json(text))


def write_data_spec(run: Path, spec: DataSpec) -> None:
    """Write a data spec to a run folder."""
    write_file(run / DATA_SPEC, to_json(spec), durable=False)


def read_data_spec(run: Path) -> DataSpec:
    """Return the data spec of a run; raise UserError if it cannot be read."""
    file = run / DATA_SPEC
    try:
        return from_json(read_bounded(file).decode())
    except FileNotFoundError:
        raise UserError(f"{file}: the file is missing: restore it, or train the run again") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({why(error)}): restore the file, or train the run again") from None
