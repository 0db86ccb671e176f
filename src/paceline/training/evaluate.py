"""Evaluate a recipe on a split: every sample exactly once, with the weights that are saved for use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config.settings import RunSettings, is_never
from paceline.contracts.recipe import CLASS_DRAW, Batch, DataSpec, Recipe
from paceline.core.errors import UserError, place_outside
from paceline.core.registry import load_class
from paceline.core.text import print_line
from paceline.core.watch import beat
from paceline.data.loader import BatchPipeline, Loader, TrainingFeed, drawn_batches, evaluation_batches
from paceline.data.source import LABEL, count_classes, has_one_size, in_proportion, selecting, sizes_of
from paceline.data.stream import Drawer, channels_first, cropped, transform
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.protocol import Protocol
from paceline.models.layers import NormByImage
from paceline.parallel.graphed_function import LARGEST_PX, GraphedFunction
from paceline.parallel.precision import Precision
from paceline.parallel.torch_internals import AnyBatchNorm
from paceline.parallel.world import World
from paceline.runs.checkpoint import Best
from paceline.runs.finished_run import open_run
from paceline.runs.folder import RunFolder
from paceline.runs.weights import EMA
from paceline.training.build import Parts
from paceline.training.compile import eager, keeping_buffers
from paceline.training.step import Step

MIN_FREE = 0.25  # fraction of the GPU's memory; a graph keeps the memory of its activations


class Predictor:
    """Calls `Recipe.predict`. Use it inside `evaluating`."""

    def __init__(self, recipe: Recipe, precision: Precision, device: torch.device, *, captures: bool) -> None:
        self._recipe, self._precision = recipe, precision
        self._graphed = GraphedFunction(self._run, device, MIN_FREE) if captures and device.type == "cuda" else None
        self._addresses: tuple[int, ...] = ()  # of the weights that the graphs use
        self._num_pixels: dict[tuple[torch.Size, ...], int] = {}  # of the largest input or prediction, by input shapes
        self._noted = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the recipe in evaluation mode; inside the context, its weights must not change."""
        if self._graphed:
            tensors = chain(self._recipe.parameters(), self._recipe.buffers())
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            if addresses != self._addresses:
                self._graphed.clear()
                self._addresses = addresses
        self._recipe.eval()
        yield
        self._recipe.train()

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """Return the recipe's predictions for a batch."""
        if not self._graphed:
            return self._run(batch)
        shapes = tuple(field.shape for field in batch.values())
        made = self._graphed(batch, capture=self._num_pixels.get(shapes, LARGEST_PX + 1) <= LARGEST_PX)
        if shapes not in self._num_pixels:
            images = [field for field in (*batch.values(), *made.values()) if field.ndim == 4]
            self._num_pixels[shapes] = max((len(one) * one.shape[-2] * one.shape[-1] for one in images), default=0)
        if self._graphed.note and not self._noted:
            self._noted = True
            print_line(f"evaluation: eager. {self._graphed.note}")
        return made

    def _run(self, batch: Batch) -> Batch:
        with eager(), self._precision.autocast():
            return self._recipe.predict(batch)


class EvaluationStopped(Exception):
    """Raised on every rank if an evaluation ended early because of a stop request."""


class SplitEvaluator:
    """Evaluates a recipe on one split, as many times as needed."""

    def __init__(
        self,
        recipe: Recipe,
        loader: Loader,
        split: str,
        world: World,
        precision: Precision,
        settings: RunSettings,
        *,
        captures: bool = False,
    ) -> None:
        """Create an evaluator up front, so that invalid settings raise UserError before training starts.

        With `captures`, predictions on a GPU are captured as CUDA graphs.
        """
        self.recipe, self.loader, self.split = recipe, loader, split
        self.world, self.precision, self.settings = world, precision, settings
        self.pipeline = BatchPipeline(loader, None, precision.weights)
        self.drawer = Drawer(recipe.draws, settings.seed, world.device, precision.weights)
        self.count = (recipe.generates and settings.generated_images) or len(loader.source)
        self.class_counts = count_classes(loader.source).to(world.device) if CLASS_DRAW in recipe.draws else None
        prepared = self._new_evaluator()
        self.notes, self.label = prepared.notes, prepared.label
        self.protocol = {**prepared.protocol(), **recipe.evaluation.conditions, **self._class_protocol()}
        self._prepared: Evaluator | None = prepared
        self._predict = Predictor(recipe, precision, world.device, captures=captures)

    def texts(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return the metrics to print, by split and name, with their units: `{"validation/top1": "93.12%"}`."""
        evaluator_class = load_class("evaluator", self.recipe.evaluation.evaluator, Evaluator)
        texts = evaluator_class.texts(metrics, self.loader.source.spec)
        return {f"{self.split}/{name}": text for name, text in texts.items()}

    def size_in(self, trained: DataSpec) -> float:
        """Return the number of evaluated images, counting a larger image as several of the trained size."""
        if self.recipe.generates:
            return self.count
        return float(sizes_of(self.loader.source).prod(axis=1).sum()) / (trained.height * trained.width)

    def take_prepared(self) -> Evaluator:
        """Return an evaluator that has seen no samples, and keep no reference to it."""
        prepared, self._prepared = self._prepared or self._new_evaluator(), None
        return prepared

    def record_protocol(self, folder: RunFolder, *, overwrite: bool) -> None:
        """Store how this split is evaluated (its protocol); raise UserError if the run has a different protocol."""
        if self.protocol:
            folder.record_protocol(self.split, self.label, self.protocol, overwrite=overwrite)

    def _new_evaluator(self) -> Evaluator:
        source, crop = self.loader.source, self.loader.crop
        case = Case(source, self.split, self.count, open_run, self.recipe.output_scale, crop)
        evaluator_class = load_class("evaluator", self.recipe.evaluation.evaluator, Evaluator)
        return evaluator_class(case, cropped(source.spec, crop), self.world.device, self.settings)

    @torch.no_grad()
    def measure(
        self, on_samples: Callable[[int], None] = lambda seen: None, is_stopping: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Return the recipe's metrics on the split, identical on every rank.

        `on_samples` is called after each batch with the number of samples that all ranks have evaluated so far. If
        `is_stopping` returns true, the evaluation raises EvaluationStopped.
        """
        evaluator = self._new_evaluator()

        def process(batches: Iterator[Batch], update: Callable[[Batch], None]) -> None:
            seen = 0
            for batch in batches:
                beat()
                update(batch)
                seen += len(batch["index"])
                on_samples(min(seen * self.world.size, self.count))
                if is_stopping():
                    break

        if self._is_true_anywhere(evaluator.needs_samples):  # if any rank needs the samples, all ranks process them
            process(self._sample_batches(), evaluator.update_samples)
            self._check_stop(is_stopping)
            evaluator.end_samples(self.world.sum(evaluator.sample_sums()))
        with self._predict.evaluating():
            process(self._batches(), lambda batch: evaluator.update(self._predict(batch), batch))
        self._check_stop(is_stopping)
        metrics = evaluator.results(self.world.sum(evaluator.sums()))
        self.notes += tuple(note for note in evaluator.notes if note not in self.notes)
        return metrics

    def _check_stop(self, is_stopping: Callable[[], bool]) -> None:
        if self._is_true_anywhere(is_stopping()):
            raise EvaluationStopped

    def _is_true_anywhere(self, own: bool) -> bool:
        """Return whether a condition is true on any rank."""
        return bool(self.world.sum(torch.tensor([float(own)], device=self.world.device)).item())

    def _batches(self) -> Iterator[Batch]:
        if not self.recipe.generates:
            return self._sample_batches()
        batches = drawn_batches(self.drawer, self.count, self.world.rank, self.world.size)
        counts = self.class_counts
        if counts is None:
            return batches
        # Classes occur in the same proportions as in the real images.
        return (batch | {CLASS_DRAW: in_proportion(batch[CLASS_DRAW], counts)} for batch in batches)

    def _class_protocol(self) -> Protocol:
        if self.class_counts is None or (self.class_counts == self.class_counts[0]).all():
            return {}  # with equal proportions, the draws stay the same
        return {"classes": "in the proportions of the real images"}

    def _sample_batches(self) -> Iterator[Batch]:
        return evaluation_batches(self.pipeline, self.world.rank, self.world.size, self.drawer)


def training_evaluator(parts: Parts) -> SplitEvaluator | None:
    """Return the evaluator used during training.

    Return None if the recipe declares none, the split is missing, or the run is not evaluated.
    """
    return _evaluator_of(parts, parts.recipe.evaluation.split)


def final_evaluator(parts: Parts) -> SplitEvaluator | None:
    """Return the test-split evaluator for the best checkpoint; None unless training uses a validation split."""
    return _evaluator_of(parts, "test") if parts.recipe.evaluation.split == "validation" else None


def _evaluator_of(parts: Parts, split: str) -> SplitEvaluator | None:
    run, loader = parts.config.run, parts.loaders.get(split)
    if not parts.recipe.evaluation.evaluator or loader is None or is_never(run.evaluate_every):
        return None
    captures = run.graph != "off" and not parts.strategy.why_not("capture")
    return SplitEvaluator(parts.recipe, loader, split, parts.world, parts.precision, run, captures=captures)


def is_better(value: float, name: str, best: Best | None, mode: str) -> bool:
    """Return whether a value beats the best so far. Values of metrics with different names are not comparable."""
    if best is None or best.name != name:
        return not math.isnan(value)
    return value > best.value if mode == "max" else value < best.value


class EvaluatedWeights:
    """Switches networks to the weights that are evaluated. Statistics are recomputed only after training steps."""

    def __init__(self, step: Step, feed: TrainingFeed) -> None:
        self._step = step
        self._norms = averaged_norms(step)
        self._batches = _first_batches(step, feed) if self._norms else []
        self._statistics: dict[str, Tensor] = {}
        self._images = -1  # images seen when the statistics were recomputed

    @contextmanager
    def at(self, images: int) -> Iterator[None]:
        """Use EMA weights inside the context, for the networks that the recipe evaluates with an EMA.

        `images` is the number of images seen. All processes must enter the context together. Inside it, each may call
        the networks without the others.
        """
        with ExitStack() as stack:
            for name in self._step.recipe.ema:
                if name in self._step.learners:
                    stack.enter_context(self._step.learners[name].ema_weights())
            stack.enter_context(self._step.strategy.whole_weights())
            if self._norms:
                stack.enter_context(keeping_buffers(self._step.recipe))
                self._set_statistics(images)
            yield

    def statistics(self, images: int) -> dict[str, Tensor]:
        """Return the BatchNorm statistics for EMA weights, by their names in a snapshot. All processes must call this.

        `images` is the number of images seen.
        """
        if self._norms and images != self._images:
            with self.at(images):
                pass
        return self._statistics

    @torch.no_grad()
    def _set_statistics(self, images: int) -> None:
        buffers = {
            f"{EMA}{name}.{key}": norm.get_buffer(key)
            for name, norm in self._norms.items()
            for key in ("running_mean", "running_var")
        }
        if images != self._images:
            _recompute(self._step, list(self._norms.values()), self._batches)
            self._statistics = {name: buffer.clone() for name, buffer in buffers.items()}
            self._images = images
        for name, buffer in buffers.items():
            buffer.copy_(self._statistics[name])


def averaged_norms(step: Step) -> dict[str, AnyBatchNorm]:
    """Return the BatchNorm layers that use running statistics in evaluation, in networks with an EMA."""
    return {
        f"{network}.{name}": module
        for network in step.recipe.ema
        if network in step.learners and step.learners[network].ema
        for name, module in step.recipe.get_submodule(network).named_modules()
        if isinstance(module, AnyBatchNorm) and not isinstance(module, NormByImage) and module.running_mean is not None
    }


def _first_batches(step: Step, feed: TrainingFeed) -> list[Batch]:
    """Return training samples in batches. Images that are generated by class get the classes of the samples."""
    batches = feed.first_batches()
    if CLASS_DRAW in step.recipe.draws:
        num_classes = feed.pipeline.loader.source.spec.num_classes
        for batch in batches:
            batch[CLASS_DRAW] = selecting(step.finish(batch)[LABEL].to(batch[CLASS_DRAW]), num_classes)
    return batches


def _recompute(step: Step, norms: list[AnyBatchNorm], batches: list[Batch]) -> None:
    """Set the statistics to their means over batches of training samples."""
    was_training = step.recipe.training
    step.recipe.train()
    norms = [norm for norm in norms if norm.training]  # the others are frozen: training uses their statistics too
    step.recipe.eval()
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in norms]
    handles = [
        norm.register_forward_pre_hook(partial(_use_own, into), with_kwargs=True)
        for norm, into in zip(norms, found, strict=True)
    ]
    try:
        for batch in batches:
            with eager(), step.strategy.precision.autocast():
                step.recipe.predict(step.finish(batch))
    finally:
        step.recipe.train(was_training)
        for handle in handles:
            handle.remove()
    for norm, statistics in zip(norms, found, strict=True):
        if statistics:  # predict may not use every layer
            _set(norm, *(torch.stack(values).mean(0) for values in zip(*statistics, strict=True)))


def _use_own(
    found: list[tuple[Tensor, Tensor]], norm: nn.Module, inputs: tuple[Tensor, ...], by_name: dict[str, Tensor]
) -> None:
    """Before a BatchNorm's forward pass, make it use the mean and variance of its input, as in training."""
    x = next(iter((*inputs, *by_name.values())))
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    is_single = x.numel() == x.shape[1]  # one value per channel: the unbiased variance would be NaN
    variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0 if is_single else 1)
    found.append((mean, variance))
    assert isinstance(norm, AnyBatchNorm)
    _set(norm, mean, variance)


def _set(norm: AnyBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)


NUM_SAMPLES = 2
PIXELS_AT_ONCE = 2**18  # maximum for a batch; if the images are larger, only one is used
# Exceptions that indicate a mistake. Others, such as a division by zero, can also mean that a correct evaluator needs
# more samples.
MISTAKES = (TypeError, AttributeError, NameError, LookupError, NotImplementedError)
TORCH = str(Path(torch.__file__).parent)


@torch.no_grad()
def rehearse(split_evaluator: SplitEvaluator) -> None:
    """Predict and evaluate a few samples before training, so that a mistake in the evaluation ends the run at once."""
    recipe, evaluator = split_evaluator.recipe, split_evaluator.take_prepared()
    named = f"evaluator {recipe.evaluation.evaluator!r}"
    with _unchanged_generators(split_evaluator.world.device):
        batch = _batch(split_evaluator)
        was_training = recipe.training
        recipe.eval()
        with explained(f"{type(recipe).__name__}.predict"):
            with eager(), split_evaluator.precision.autocast():
                prediction = recipe.predict(batch)
            if not isinstance(prediction, dict) or not all(isinstance(value, Tensor) for value in prediction.values()):
                kind = type(prediction).__name__
                returned = f"a {kind}" if kind != "dict" else "a dict with values that are not tensors"
                raise TypeError(f"returned {returned}: return a dict {{name: tensor}}")
        with explained(f"{named}: update"):
            evaluator.update(prediction, batch)
        recipe.train(was_training)
        with explained(f"{named}: sums"):
            sums = evaluator.sums()
            if not isinstance(sums, Tensor) or sums.ndim != 1:
                raise TypeError("expected a 1-D tensor")
        if type(evaluator).update_samples is Evaluator.update_samples:  # other evaluators must see all samples first
            with explained(f"{named}: results", only=MISTAKES):
                results = evaluator.results(sums)
                if not isinstance(results, dict) or not all(isinstance(v, (int, float)) for v in results.values()):
                    raise TypeError("expected a dict {name: number}")


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


@contextmanager
def _unchanged_generators(device: torch.device) -> Iterator[None]:
    """On exit, restore the states of the random number generators in torch, NumPy and Python."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
