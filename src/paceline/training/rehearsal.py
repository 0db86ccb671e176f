"""Try the evaluation on a few samples before training, so that a mistake in it ends the run at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.contracts.recipe import Batch, single_networks
from paceline.core.errors import UserError, place_outside
from paceline.data.source import has_one_size, sizes_of
from paceline.data.stream import channels_first, transform
from paceline.evaluation.contract import Evaluator
from paceline.images.grids import ShownChannels
from paceline.training.build import Parts
from paceline.training.compile import eager
from paceline.training.evaluate import SplitEvaluator
from paceline.training.previews import has_strips, make_strips, strip_samples


class UsedNetworks(TorchFunctionMode):
    """Records, inside the context, the networks whose parameters or buffers are passed to a torch function.

    Calls of a network, calls of its layers, and direct uses of its weights are all recorded.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._networks = networks
        self.names: set[str] = set()

    def __enter__(self) -> UsedNetworks:
        # Sharding replaces parameters, so they are looked up when the context is entered.
        self._owners = {
            id(tensor): name
            for name, network in self._networks.items()
            for tensor in (*network.parameters(), *network.buffers())
        }
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._record(args)
        self._record((kwargs or {}).values())
        return function(*args, **(kwargs or {}))

    def _record(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                name = self._owners.get(id(value))
                if name is not None:
                    self.names.add(name)
            elif isinstance(value, (tuple, list)):
                self._record(value)


NUM_SAMPLES = 2
PIXELS_AT_ONCE = 2**18  # maximum for a batch; if the images are larger, only one is used
# Exceptions that indicate a mistake. Others, such as a division by zero, can also mean that a correct evaluator needs
# more samples.
MISTAKES = (TypeError, AttributeError, NameError, LookupError, NotImplementedError)
TORCH = str(Path(torch.__file__).parent)


def rehearse_all(parts: Parts, evaluators: Sequence[SplitEvaluator]) -> None:
    """Rehearse all evaluations. If weights are sharded, find out which networks they and the sample images use."""
    used, shards_weights = UsedNetworks(single_networks(parts.recipe)), parts.strategy.shards_weights
    with parts.strategy.whole_weights(), used if shards_weights else nullcontext():
        for evaluator in evaluators:
            rehearse(evaluator)
        if shards_weights and has_strips(parts.recipe):
            _rehearse_preview(parts)
    if shards_weights and evaluators:
        parts.strategy.evaluated = frozenset(used.names)


def _rehearse_preview(parts: Parts) -> None:
    """Compute the sample images for one sample, in every process, although only one process writes them."""
    shown = parts.loaders.get(parts.recipe.evaluation.split, parts.loaders["train"]).source
    with _unchanged_generators(parts.world.device), explained(f"{type(parts.recipe).__name__}.preview"):
        samples = strip_samples(shown, parts.feed.drawer, parts.precision, parts.trained_spec())
        make_strips(parts.recipe, samples[:1], parts.precision, ShownChannels())


@torch.no_grad()
def rehearse(split_evaluator: SplitEvaluator) -> None:
    """Predict a few samples and evaluate the predictions; raise UserError if this fails."""
    recipe, evaluator = split_evaluator.recipe, split_evaluator.take_prepared()
    named = f"evaluator {recipe.evaluation.evaluator!r}"
    with _unchanged_generators(split_evaluator.world.device):
        batch = _batch(split_evaluator)
        was_training = recipe.training
        recipe.eval()
        with explained(f"{type(recipe).__name__}.predict"):
            with eager(), split_evaluator.precision.autocast():
                prediction = recipe.predict(batch)
            _check_prediction(prediction)
        with explained(f"{named}: update"):
            evaluator.update(prediction, batch)
        recipe.train(was_training)
        with explained(f"{named}: sums"):
            sums = evaluator.sums()
            if not isinstance(sums, torch.Tensor) or sums.ndim != 1:
                raise TypeError("expected a 1-D tensor")
        if type(evaluator).update_samples is Evaluator.update_samples:  # other evaluators must see all samples first
            with explained(f"{named}: results", only=MISTAKES):
                _check_results(evaluator.results(sums))


@contextmanager
def explained(what: str, only: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Replace exceptions with a one-line UserError that gives the file and line; suppress those not in `only`."""
    try:
        yield
    except (UserError, OSError):
        raise
    except only as error:
        where = place_outside(error, (TORCH, __file__))
        problem = " ".join(str(error).split())
        raise UserError(f"{what} fails{where}: {type(error).__name__}{': ' if problem else ''}{problem}") from error
    except Exception:
        pass


def _batch(split_evaluator: SplitEvaluator) -> Batch:
    """Return the first samples, or only the smallest if images are large; for generators, return only random draws."""
    recipe, drawer, device = split_evaluator.recipe, split_evaluator.drawer, split_evaluator.world.device
    source, count = split_evaluator.loader.source, min(NUM_SAMPLES, split_evaluator.count)
    if recipe.generates:
        return drawer.rows("evaluation", 0, count) | {"index": torch.arange(count, device=device)}
    pixels = sizes_of(source).prod(axis=1)
    small = has_one_size(source) and count * pixels[0] <= PIXELS_AT_ONCE
    index = np.arange(count) if small else np.array([pixels.argmin()])
    arrays = source.read_many(index) | {"index": index}
    fields = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    raw = channels_first(fields) | {"uniforms": torch.empty(len(index), 0, device=device)}
    batch = transform(raw, None, split_evaluator.precision.weights, source.spec.pixel_format)
    return batch | drawer.rows("evaluation", int(index[0]), int(index[-1]) + 1)


def _check_prediction(prediction: object) -> None:
    if not isinstance(prediction, dict) or not all(isinstance(value, torch.Tensor) for value in prediction.values()):
        kind = type(prediction).__name__
        found = f"a {kind}" if kind != "dict" else "a dict with values that are not tensors"
        raise TypeError(f"returned {found}: return a dict {{name: tensor}}")


def _check_results(results: object) -> None:
    if not isinstance(results, dict) or not all(isinstance(value, (int, float)) for value in results.values()):
        raise TypeError("expected a dict {name: number}")


@contextmanager
def _unchanged_generators(device: torch.device) -> Iterator[None]:
    """On exit, restore the states of the random number generators in torch, NumPy and Python."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
