"""`paceline verify`: run the same training steps under every strategy, and compare the weights."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from rich.console import Console
from torch import Tensor

from paceline.commands.plan import print_table
from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.contracts.recipe import Phase
from paceline.core.errors import UserError, unknown
from paceline.core.files import SAFETENSORS, check_creatable, new_file, user_path, write_json
from paceline.core.registry import load_class
from paceline.core.terminal import activity, counted, open_screen
from paceline.data.loader import StepData
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.shards import gather_rows
from paceline.parallel.strategy import Strategy, strategy_class, uses_one_device, why_unavailable
from paceline.parallel.torch_internals import AnyDropout
from paceline.parallel.world import uses_cuda
from paceline.training.build import Parts, assemble
from paceline.training.initial_weights import initialise
from paceline.training.learner import Learner
from paceline.training.stop import repeat_signal


@dataclass(frozen=True)
class Difference:
    """How much one network differs between a strategy and the reference strategy.

    Attributes:
        strategy: The strategy that is compared with the first strategy.
        kind: "gradients" or "gradients of PHASE" at the first step, or "weights" after the last step.
        network: The name of the network.
        value: max |a − b| ÷ max |b| over all tensors in the network, where b is from the first strategy.
        tolerance: The largest allowed value.
        worst: The name of the first tensor above the tolerance, or "".

    Examples:
        >>> paceline.Difference("ddp", "weights", "classifier", value=2.2e-16, tolerance=1e-9, worst="")
        Difference(ddp, weights of classifier, 2.2e-16, ok)
    """

    strategy: str
    kind: str
    network: str
    value: float
    tolerance: float
    worst: str

    @property
    def ok(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.value <= self.tolerance

    @property
    def what(self) -> str:
        """What was compared, for example "weights of classifier"."""
        return f"{self.kind} {'in' if ' of ' in self.kind else 'of'} {self.network}"

    def __repr__(self) -> str:
        verdict = "ok" if self.ok else f"above {self.tolerance:.0e} in {self.worst}"
        return f"Difference({self.strategy}, {self.what}, {self.value:.1e}, {verdict})"


@dataclass(frozen=True)
class VerifyResult:
    """Whether all strategies produce the same weights; returned by `paceline.verify`.

    `bool(result)` is the same as `result.ok`.

    Attributes:
        differences: One difference for each strategy (except the first), network and kind.

    Examples:
        >>> same = paceline.Difference("ddp", "weights", "classifier", value=2.2e-16, tolerance=1e-9, worst="")
        >>> result = paceline.VerifyResult((same,))
        >>> result
        VerifyResult(ok, 1 difference, largest 2.2e-16)
        >>> assert result
    """

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether every difference is within its tolerance."""
        return all(one.ok for one in self.differences)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        failed = [one for one in self.differences if not one.ok]
        count = len(self.differences)
        if failed:
            return f"VerifyResult({len(failed)} of {count} differences above tolerance, first {failed[0]})"
        largest = max((one.value for one in self.differences), default=0.0)
        return f"VerifyResult(ok, {count} difference{'s' if count > 1 else ''}, largest {largest:.1e})"


CONTROLS = ("unsynced-batchnorm", "repeated-part")
GRADIENT_TOLERANCE = 1e-12
# The keys are gradients/PHASE/NETWORK/TENSOR at the first step and weights//NETWORK/TENSOR after the last step.
Trace = dict[str, Tensor]


def verify(config: Config, strategies: list[str], steps: int, tolerance: float, control: str, result: str = "") -> int:
    """Print how much each strategy differs from the first; return 1 if a difference is above its tolerance.

    If `result` is a path, the differences are also written there as JSON.
    """
    if result:
        check_creatable(user_path(result), "--json")
    outcome = VerifyResult(tuple(differences(config, strategies, steps, tolerance, control)))
    title = _title(config, steps, control)
    console = open_screen()
    _print_table(console, outcome.differences, title)
    console.print(_verdict(strategies, outcome.differences), soft_wrap=True)
    if result:
        with new_file(user_path(result), "--json") as file:
            write_json(
                file, {"description": title, "differences": [asdict(one) for one in outcome.differences]}, indent=1
            )
    return int(not outcome.ok)


def differences(
    config: Config, strategies: list[str], steps: int, tolerance: float, control: str = ""
) -> list[Difference]:
    """Run the same training steps under each strategy and compare the networks with those from the first strategy."""
    if control and control not in CONTROLS:
        raise unknown("control", control, CONTROLS)
    if len(strategies) < 2 or len(set(strategies)) < len(strategies):
        raise UserError(f"--strategies {','.join(strategies)}: expected two or more different names, e.g. single,ddp")
    if steps < 1:
        raise UserError(f"--steps {steps}: must be at least 1")
    classes = {name: load_class("strategy", name, Strategy) for name in strategies}
    for name, strategy in classes.items():
        if obstacle := why_unavailable(strategy, on_gpus=uses_cuda(config.run)):
            raise UserError(f"--strategies {','.join(strategies)}: {obstacle}; leave {name} out")
    batch = split_batch(config.run.batch_size, config.run.devices, config.run.accumulate)
    compiles = "on" if config.run.compile == "on" else "off"  # a test of a few steps never gains from compiling
    config = config.with_run(precision="fp64", batch_size=str(batch), images=steps * batch, compile=compiles)
    traces: dict[str, Trace] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        for number, name in enumerate(strategies):
            broken = control if traces else ""  # `control` breaks every strategy but the reference, which is first
            activity(f"training under {name} ({number + 1} of {len(strategies)})")
            chosen = config.with_run(strategy=name)
            if broken == "unsynced-batchnorm":
                chosen = chosen.with_run(sync_batchnorm="off")
            traces[name] = _trace(chosen, Path(folder) / f"{number}{SAFETENSORS}", broken, steps)
    return compare(traces, tolerance)


def _trace(config: Config, path: Path, control: str, steps: int) -> Trace:
    if strategy_class(config).needs_processes and config.run.devices > 1:
        code = run_in_processes(Task.of(trace_strategy, str(path), control, steps), config)
        repeat_signal(code)
        if code:
            raise UserError(f"strategy {config.run.strategy}: failed with exit code {code}; see the output above")
    else:
        alone = config.with_run(devices=1) if uses_one_device(strategy_class(config)) else config
        trace_strategy(alone, str(path), control, steps)
    return safetensors.torch.load(path.read_bytes())


def trace_strategy(config: Config, path: str, control: str, num_steps: int) -> None:
    """Run the training steps under one strategy in this process; rank 0 writes the resulting tensors to `path`."""
    if os.environ.get("RANK", "0") != "0":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    parts = assemble(config)
    try:
        trace = _train(parts, control, num_steps)
        if parts.world.is_first:
            copies = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in trace.items()}
            safetensors.torch.save_file(copies, path)  # copies share no memory, unlike tied weights
        parts.world.wait_for_all()
        parts.world.leave()
    finally:
        parts.world.abandon()


def _train(parts: Parts, control: str, num_steps: int) -> Trace:
    """Run the training steps; return the gradients of the first step and the final weights by name."""
    initialise(parts)
    if control == "repeated-part":
        parts.feed.cut = parts.feed.cut._replace(rank=0)
    for module in parts.recipe.modules():
        if isinstance(module, AnyDropout):
            module.p = 0.0
    trace: Trace = {}
    parts.recipe.train()

    def keep_gradients(phase: Phase, learner: Learner) -> None:
        for name, parameter in learner.named.items():  # excludes parameters that are not trained
            assert parameter.grad is not None
            trace[f"gradients/{phase.name}/{phase.network}/{name}"] = gather_rows(parameter.grad).clone()

    def advance(data: StepData) -> None:
        parts.step(data, watch=keep_gradients if data.images == 0 else None)

    steps = parts.feed.steps(0, num_steps * parts.feed.images_per_step)
    shown = counted(steps, f"training under {parts.config.run.strategy}", num_steps)
    parts.strategy.drive(shown, advance)
    for network, module in parts.recipe.networks.items():
        tensors = {name: gather_rows(value) for name, value in module.state_dict().items()}
        trace |= {f"weights//{network}/{name}": value for name, value in tensors.items() if value.is_floating_point()}
    return trace


def compare(traces: dict[str, Trace], tolerance: float) -> list[Difference]:
    """Return the differences between each strategy's networks and the first strategy's."""
    (_, reference), *others = traces.items()
    differences = []
    for strategy, trace in others:
        assert trace.keys() == reference.keys(), "the strategies trained different sets of tensors"
        for group in sorted({name.rsplit("/", 1)[0] for name in reference}):
            kind, phase, network = group.split("/")
            limit = tolerance if kind == "weights" else GRADIENT_TOLERANCE
            tensors = [name for name in sorted(reference) if name.startswith(group + "/") and reference[name].numel()]
            largest = max(reference[name].abs().max().item() for name in tensors)
            by_tensor = {name: _distance(trace[name], reference[name]) / (largest or 1.0) for name in tensors}
            worst = next((name.rsplit("/", 1)[1] for name, value in by_tensor.items() if value > limit), "")
            label = f"{kind} of {phase}" if phase not in ("", network) else kind
            differences.append(Difference(strategy, label, network, max(by_tensor.values()), limit, worst))
    return differences


def _distance(a: Tensor, b: Tensor) -> float:
    distance = (a - b).abs().max().item()
    return distance if distance == distance else torch.inf  # NaN counts as different


def _title(config: Config, steps: int, control: str) -> str:
    devices = config.run.devices
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    on = "1 device" if devices == 1 else f"up to {devices} devices"  # "up to", because a strategy may use fewer devices
    title = f"{config.recipe_name} on {config.run.data}: {steps} steps in float64, batch {batch}, {on}"
    return title + (f", with a deliberate error: {control}" if control else "")


def _verdict(strategies: list[str], differences: Sequence[Difference]) -> str:
    """Return one line that states whether the strategies agree, with the largest difference and its tolerance."""
    names = [*strategies[:-2], " and ".join(strategies[-2:])]
    failed = [one for one in differences if not one.ok]
    if failed:
        worst = max(failed, key=lambda one: one.value / one.tolerance if one.tolerance else math.inf)
        others = list(dict.fromkeys(one.strategy for one in failed))
        only_weights = all(one.kind == "weights" for one in failed)
        hint = "; Adam amplifies rounding errors in small gradients, so try --set optimizer=sgd" if only_weights else ""
        return (
            f"✗ {' and '.join(others)} {'differs' if len(others) == 1 else 'differ'} from {strategies[0]}: "
            f"{worst.value:.1e} > {worst.tolerance:.0e} ({worst.what}, first in {worst.worst}){hint}"
        )
    weights = [one for one in differences if one.kind == "weights"]
    largest = max(weights, key=lambda one: one.value)
    return f"✓ {', '.join(names)} give the same weights: {largest.value:.1e} ≤ {largest.tolerance:.0e}"


def _print_table(console: Console, differences: Sequence[Difference], title: str) -> None:
    headings = ["strategy", "network", "tensors", "difference", "tolerance", "first tensor above tolerance"]
    rows = [
        [one.strategy, one.network, one.kind, f"{one.value:.1e}", f"{one.tolerance:.0e}", one.worst or "–"]
        for one in differences
    ]
    print_table(console, title, headings, rows, num_texts=3)
    console.print(
        "difference = max |a − b| ÷ max |b| within a network, where a is this strategy's value and "
        "b the first strategy's; dropout is disabled",
        soft_wrap=True,
    )
