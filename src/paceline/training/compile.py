"""`--compile`: compile each of the recipe's networks, if this saves more time than it costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch, Recipe, single_networks
from paceline.core.errors import describe_error
from paceline.core.files import writable_cache
from paceline.core.ordered_map import num_cores
from paceline.core.startup import collecting_rarely
from paceline.data.feed import StepData, TrainingFeed
from paceline.parallel.batchnorm import is_synchronized, leave_batchnorm_eager
from paceline.parallel.torch_internals import (
    allow_recompilations,
    compiled_call,
    start_compile_workers,
    undo_compile,
)
from paceline.parallel.world import World
from paceline.runs.folder import RunFolder
from paceline.runs.mirror import published_record
from paceline.runs.provenance import identity
from paceline.training.step import Step

COMPILER_MODULE = "torch._dynamo"
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # of torch.compile; Triton's cache is inside it
TRITON_VARIABLE = "TRITON_CACHE_DIR"  # moves Triton's cache elsewhere
THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"  # number of processes that compile kernels
MAX_SHAPES = 64  # for which a function is compiled, e.g. a block that all levels of a U-Net use; torch's default is 8
MAX_COMPILE_WORKERS = 32  # as in torch


def compilable_networks(recipe: Recipe) -> list[nn.Module]:
    """Return the networks that can be compiled: all except those that need a double backward."""
    networks = single_networks(recipe).items()
    return [network for name, network in networks if name.partition(".")[0] not in recipe.double_backward]


def prepare_compiler(world: World) -> None:
    """Choose where kernels are kept and how many processes compile them."""
    keep_kernels()
    if world.device.type == "cuda" and world.place.local_size > 1:  # each process would start a worker per core
        share = num_cores() // world.place.local_size
        os.environ.setdefault(THREADS_VARIABLE, str(max(1, min(MAX_COMPILE_WORKERS, share))))


def keep_kernels() -> None:
    """Choose the folder in which kernels are kept. The import of the compiler creates torch's temporary folder, too."""
    if CACHE_VARIABLE not in os.environ and (folder := writable_cache("compile")):
        os.environ[CACHE_VARIABLE] = str(folder)


def describe_kernel_cache() -> str:
    """Return a line with the folder in which compiled kernels are kept, and its size."""
    folder = os.environ.get(CACHE_VARIABLE) or writable_cache("compile")
    if not folder:
        return "compiled kernels: torch's temporary folder, since Paceline's cache folder cannot be written"
    size = sum(map(_size_of, Path(folder).rglob("*"))) / 1e6
    triton = os.environ.get(TRITON_VARIABLE)
    elsewhere = f"; Triton's kernels: {triton} ({TRITON_VARIABLE})" if triton else ""
    return f"compiled kernels: {folder} ({size:,.0f} MB){elsewhere}"


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # torch has removed it
        return 0


def compile_networks(recipe: Recipe, *, known: bool = False) -> list[nn.Module]:
    """Compile lazily all networks that can be compiled, and return them.

    If `known` is true, their kernels are probably in the cache, so no processes that compile kernels are started.
    """
    keep_kernels()
    networks = compilable_networks(recipe)
    if not known and any(parameter.is_cuda for network in networks for parameter in network.parameters()):
        start_compile_workers()
    allow_recompilations(MAX_SHAPES)
    for network in networks:
        leave_batchnorm_eager(network)
        network.compile(dynamic=False)
    return networks


def compile_obstacle(step: Step) -> str:
    """Return why this step's networks cannot be compiled; empty if they can."""
    if obstacle := step.strategy.why_not("compile"):
        return obstacle
    if step.strategy.recomputes:
        return "activations are recomputed (checkpoint_activations)"
    return "" if compilable_networks(step.recipe) else "every network needs a double backward (R1)"


@contextmanager
def loading_cudnn(device: torch.device) -> Iterator[None]:
    """Load cuDNN and cuBLAS in a thread, while this thread imports the compiler; both take seconds."""
    if device.type != "cuda":
        yield
        return
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(_run_a_convolution, device)
        yield
        loaded.exception()  # the first step will report it


def _run_a_convolution(device: torch.device) -> None:
    weight = torch.zeros(64, 64, 3, 3, device=device, dtype=torch.bfloat16, requires_grad=True)
    image = torch.zeros(1, 64, 8, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    layout = torch.channels_last
    out = torch.nn.functional.conv2d(image.contiguous(memory_format=layout), weight.contiguous(memory_format=layout))
    torch.nn.functional.linear(out.flatten(0, 2), torch.zeros(6, 6, device=device, dtype=out.dtype)).sum().backward()


@contextmanager
def keeping_buffers(recipe: Recipe) -> Iterator[None]:
    """Restore the networks' buffers, such as BatchNorm statistics, at the end."""
    buffers = {name: buffer.clone() for name, buffer in recipe.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in recipe.named_buffers():
                buffer.copy_(buffers[name])


def try_compile(step: Step, data: StepData, *, known: bool = False) -> str:
    """Compile the networks and test every phase on one step's data, leaving the weights unchanged; return a note.

    If `known` is true, they were compiled before.
    """
    if obstacle := compile_obstacle(step):
        return f"compile: off, since {obstacle}"
    with loading_cudnn(step.world.device):
        networks = compile_networks(step.recipe, known=known)
    with keeping_buffers(step.recipe):
        try:
            step.dry_run(data.fetched[0][0])
        except Exception as error:  # a compiler may raise any exception; training continues without it
            for network in networks:
                undo_compile(network)
            return f"compile: off, since it failed ({describe_error(error)})"
    count = f"{len(networks)} of {len(single_networks(step.recipe))} networks"
    kept = os.environ.get(CACHE_VARIABLE, "torch's temporary folder")
    return f"compile: on for {count}; compiled kernels are kept in {kept}"


def is_compiled(network: nn.Module) -> bool:
    """Return whether a network is compiled."""
    return compiled_call(network) is not None


def eager() -> AbstractContextManager[object]:
    """Return a context in which compiled networks run eagerly, because evaluation images come in many sizes.

    If torch's compiler, which takes two seconds to import, is not in use, nothing is compiled.
    """
    if COMPILER_MODULE not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


FOLDER = "paceline"  # inside the cache folder


def marker_of(config: Config, networks: list[nn.Module], batch: Batch) -> Path | None:
    """Return the marker file for networks and the shapes of a batch; None if there is no cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        return None
    shapes = sorted(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in batch.items())
    parts = [str(identity()), config.run.precision, config.run.strategy, *map(str, networks), *shapes]
    return Path(folder) / FOLDER / sha256("\n".join(parts).encode()).hexdigest()


def was_compiled(marker: Path | None) -> bool:
    """Return whether the marker file exists."""
    return marker is not None and marker.exists()


def remember(marker: Path | None) -> None:
    """Create the marker file. A folder that cannot be written is ignored, because this must not stop a run."""
    if marker:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


SYNCHRONIZED = "synchronised BatchNorm would split the networks into parts that are too small to benefit"
# Compiling takes 3 to 30 s per network and saves 10 to 30 % of the step time on an H200 (docs/performance.md). Large
# networks take longer to compile, but their steps are longer, too, so the number of steps decides for both.
MIN_STEPS = 20_000
MIN_STEPS_IF_KNOWN = 3_000  # with the kernels of an earlier run


@dataclass(frozen=True)
class Choice:
    """Whether to compile, and a line that explains why."""

    compiles: bool
    note: str


def choose(num_steps: int, *, known: bool) -> Choice:
    """Compile if the run is long enough; `known` is whether the kernels of an earlier run are kept."""
    least = MIN_STEPS_IF_KNOWN if known else MIN_STEPS
    outcome, compared = ("on", "at least") if num_steps >= least else ("off", "fewer than")
    kernels = " with the kernels of an earlier run" if known else ""
    return Choice(
        num_steps >= least,
        f"compile: {outcome} (auto), since the run has {num_steps:,} steps, {compared} {least:,}{kernels} "
        "(--compile on or off overrides this)",
    )


def choose_for(config: Config, step: Step, feed: TrainingFeed, num_steps: int) -> Choice:
    """Choose for a run; each micro-batch counts as a step. Rank 0 chooses for all ranks."""
    if step.world.device.type != "cuda":
        return Choice(False, "")
    if config.run.deterministic:
        return Choice(False, "compile: off (auto), since --deterministic is set; use --compile on to compile anyway")
    if obstacle := compile_obstacle(step):
        return Choice(False, f"compile: off (auto), since {obstacle}")
    networks = compilable_networks(step.recipe)
    if all(map(is_synchronized, networks)):
        return Choice(False, f"compile: off (auto), since {SYNCHRONIZED}; use --compile on to compile anyway")
    data = next(feed.steps(0, feed.images_per_step))
    known = step.world.broadcast(was_compiled(marker_of(config, networks, data.fetched[0][0])))
    return choose(num_steps * config.run.accumulate, known=bool(known))


def compile_and_record(config: Config, step: Step, data: StepData) -> str:
    """Compile the networks, and record that their kernels are kept; return a note."""
    networks = compilable_networks(step.recipe)
    marker = marker_of(config, networks, data.fetched[0][0])  # before compiling changes layers
    with collecting_rarely():
        note = try_compile(step, data, known=was_compiled(marker))
    if any(map(is_compiled, networks)) and step.world.is_first and step.world.device.type == "cuda":
        remember(marker)
    return note


def recorded_choice(folder: RunFolder, world: World, resume_from: str = "") -> str:
    """Return what an earlier part of the run chose, "on" or "off", on every rank; empty for a new run.

    The earlier part may be a copy at `--resume-from` that has not been restored yet.
    """
    record = folder.read_record(f"--out {folder.path}") if folder.checkpoints.all() else None
    if record is None and resume_from and world.is_first:
        record = published_record(resume_from)
    value = record.settings.get("compile", "") if record else ""
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    found = [one for one in world.gather_strings(text) if one in ("on", "off")]
    return found[0] if found else ""
