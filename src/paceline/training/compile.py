"""`--compile`: compile each of the recipe's networks, if this saves more time than it costs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import nn

from paceline.config.resolve import Config
from paceline.contracts.recipe import Recipe, single_networks
from paceline.core.errors import describe_error
from paceline.core.files import writable_cache
from paceline.core.ordered_map import num_cores
from paceline.data.loader import StepData
from paceline.parallel.batchnorm import is_synchronized, leave_batchnorm_eager
from paceline.parallel.torch_internals import (
    allow_recompilations,
    start_compile_workers,
    undo_compile,
)
from paceline.parallel.world import World
from paceline.runs.folder import RunFolder
from paceline.runs.mirror import published_record
from paceline.training.step import Step

COMPILER_MODULE = "torch._dynamo"
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # of torch.compile; Triton's cache is inside it
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
    size = 0
    for file in Path(folder).rglob("*"):
        with suppress(OSError):  # torch has removed it
            size += file.stat().st_size if file.is_file() else 0
    return f"compiled kernels: {folder} ({size / 1e6:,.0f} MB)"


def compile_networks(recipe: Recipe) -> list[nn.Module]:
    """Compile lazily all networks that can be compiled, and return them."""
    keep_kernels()
    networks = compilable_networks(recipe)
    if any(parameter.is_cuda for network in networks for parameter in network.parameters()):
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


def try_compile(step: Step, data: StepData) -> str:
    """Compile the networks and test every phase on one step's data, leaving the weights unchanged; return a note."""
    if obstacle := compile_obstacle(step):
        return f"compile: off, since {obstacle}"
    with loading_cudnn(step.world.device):
        networks = compile_networks(step.recipe)
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


def eager() -> AbstractContextManager[object]:
    """Return a context in which compiled networks run eagerly, because evaluation images come in many sizes.

    If torch's compiler, which takes two seconds to import, is not in use, nothing is compiled.
    """
    if COMPILER_MODULE not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


SYNCHRONIZED = "synchronised BatchNorm would split the networks into parts that are too small to benefit"
# Compiling takes 3 to 30 s per network and saves 10 to 30 % of the step time on an H200 (docs/performance.md). Large
# networks take longer to compile, but their steps are longer, too, so the number of steps decides for both.
MIN_STEPS = 20_000


def choose(config: Config, step: Step, num_steps: int) -> tuple[bool, str]:
    """Return whether `--compile auto` compiles a run, and a line that explains why; each micro-batch is a step."""
    if step.world.device.type != "cuda":
        return False, ""
    num_steps *= config.run.accumulate
    obstacle = "--deterministic is set" if config.run.deterministic else compile_obstacle(step)
    if not obstacle and all(map(is_synchronized, compilable_networks(step.recipe))):
        obstacle = SYNCHRONIZED
    compiles = not obstacle and num_steps >= MIN_STEPS
    compared = "at least" if compiles else "fewer than"
    why = obstacle or f"the run has {num_steps:,} steps, {compared} {MIN_STEPS:,}"
    note = f"compile: {'on' if compiles else 'off'} (auto), since {why} (--compile on or off overrides this)"
    return compiles, note


def recorded_choice(folder: RunFolder, world: World, resume_from: str = "") -> str:
    """Return what an earlier part of the run chose, "on" or "off", on every rank; empty for a new run.

    The earlier part may be a copy at `--resume-from` that has not been restored yet.
    """
    record = folder.read_record(f"--out {folder.path}") if folder.checkpoints.all() else None
    if record is None and resume_from and world.is_first:
        record = published_record(resume_from)
    value = record.settings.get("compile", "") if record else ""
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return next((choice for choice in world.gather_strings(text) if choice in ("on", "off")), "")
