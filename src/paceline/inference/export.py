"""Writes an ONNX file with checks for its inputs, and compares its results with PyTorch's."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from paceline.contracts.data_spec import PixelFormat
from paceline.contracts.recipe import CLASS_DRAW, Batch, Recipe
from paceline.core.errors import UserError, place_outside
from paceline.data.stream import Drawer
from paceline.inference.trained import StoredModel, TrainedModel, main_use, open_trained

CHECKED_PX = ((96, 128), (160, 96))  # sizes to check if any size is accepted; rounded to allowed multiples
TRACED_PX = (128, 160)  # image size for tracing a classifier that accepts any size
SIDES = ("height", "width")
CHECKED_COUNTS = (1, 3)  # batch sizes to check for models with a fixed image size; tracing uses 2
LARGEST_SIDE_PX = 2**16

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Exportable:
    """A module to export: its inputs, its outputs, inputs for a check, and a description."""

    module: nn.Module
    example: Inputs
    dynamic_shapes: tuple[object, ...]  # for each input, the dimensions that may vary
    outputs: tuple[str, ...]
    checks: list[Inputs]  # inputs on which ONNX Runtime and PyTorch are compared
    usage: str  # description of the inputs and outputs, shown to the user
    metadata: Mapping[str, list[str]] = field(default_factory=dict)  # stored in the ONNX file


def make_exportable(stored: StoredModel, path: str) -> Exportable:
    """Return the exportable form of a stored model; raise UserError if it cannot be exported."""
    use = main_use(stored, "export", path)
    trained = open_trained(stored, path)
    if use == "apply":
        return _image_to_image(trained)
    return _generator(trained) if use == "sample" else _classifier(trained, path)


def _image_to_image(image_model: TrainedModel) -> Exportable:
    """Return an Exportable that maps images to images, of any size that the networks accept.

    Networks that divide images into windows are exported for one image of the training size: their masks depend on the
    size, and many compute the number of images in a way that cannot be traced.
    """
    channels, multiple = image_model.spec.channels, image_model.receptive_field.multiple_px
    generator = torch.Generator().manual_seed(0)
    dynamic: dict[int, object] = {}
    if image_model.receptive_field.is_traced:
        side = max(multiple, 64 // multiple * multiple) * 2
        example_px = (side, side)
        dims = [torch.export.Dim(name, min=1, max=LARGEST_SIDE_PX // multiple) for name in SIDES]
        dynamic = {at: dim if multiple == 1 else multiple * dim for at, dim in enumerate(dims, start=2)}
        dynamic[0] = torch.export.Dim("n")
        sizes = [
            [max(multiple, px // multiple * multiple) * (1 + (multiple > px)) for px in size] for size in CHECKED_PX
        ]
        accepted = "any size" if multiple == 1 else f"sides that are multiples of {multiple}"
        usage = f"input `images` [n, {channels}, height, width] in [-1, 1], {accepted}"
    else:
        scale, spec = image_model.output_scale, image_model.spec
        height, width = (-(-side // scale // multiple) * multiple for side in (spec.height, spec.width))
        example_px, sizes = (height, width), [[height, width]] * 2
        usage = f"input `images` [1, {channels}, {height}, {width}] in [-1, 1]"
    return Exportable(
        _ImageToImage(image_model.recipe),
        {"images": torch.zeros(2 if dynamic else 1, channels, *example_px)},
        (dynamic or None,),
        tuple(image_model.results),
        [{"images": torch.rand(1, channels, *size, generator=generator) * 2 - 1} for size in sizes],
        f"{usage}; output {', '.join(image_model.results)}, in [-1, 1]",
    )


def _classifier(trained: TrainedModel, path: str) -> Exportable:
    """Return an Exportable that maps pixels to class probabilities; the exported model scales its inputs.

    It takes uint8 or, if the classifier was trained on another type, float32 with the same values.
    """
    spec, size, pixels = trained.spec, trained.evaluated_size, trained.spec.pixel_format
    dtype = torch.uint8 if spec.dtype == "uint8" else torch.float32
    example = torch.zeros(2, spec.channels, *(size or TRACED_PX), dtype=dtype)
    _check_takes_images_alone(trained.recipe, example, path)
    generator, checks = torch.Generator().manual_seed(0), []
    for count, px in zip(CHECKED_COUNTS, (size, size) if size else CHECKED_PX, strict=True):
        values = torch.rand((count, spec.channels, *px), generator=generator) * pixels.span + pixels.low
        checks.append({"images": (values.round() if pixels.is_integer else values).to(dtype)})
    sides = {} if size else {at: torch.export.Dim(name, max=LARGEST_SIDE_PX) for at, name in enumerate(SIDES, start=2)}
    return Exportable(
        _Classify(trained.recipe, pixels),
        {"images": example},
        ({0: torch.export.Dim("n"), **sides},),
        ("probabilities",),
        checks,
        f"input `images` {str(dtype).removeprefix('torch.')} "
        f"[n, {', '.join(map(str, (spec.channels, *(size or SIDES))))}] in {pixels.low:g}…{pixels.high:g}; "
        f"output probabilities [n, {spec.num_classes}]",
        {"classes": list(trained.classes)},
    )


def _check_takes_images_alone(recipe: Recipe, images: Tensor, path: str) -> None:
    """Raise UserError if a classifier reads draws (random inputs) or rejects the image size used in evaluation."""
    what = f"{path}: {type(recipe).__name__}.predict()"
    try:
        with torch.no_grad():
            recipe.predict({"image": images.to(torch.float32)})
    except KeyError as error:
        raise UserError(
            f"{what} reads the random input {error}, but a classifier's ONNX file only takes images; do not use random "
            "inputs in predict()"
        ) from None
    except RuntimeError as error:
        raise UserError(
            f"{what} does not accept whole images of {images.shape[3]}×{images.shape[2]} pixels "
            f"({str(error).splitlines()[0]}); train with --set size=PIXELS if it needs a fixed size"
        ) from None


def _generator(trained: TrainedModel) -> Exportable:
    """Return an Exportable that maps noise and, if the generator is class-conditional, class numbers to images."""
    recipe, spec = trained.recipe, trained.spec
    drawer = Drawer(recipe.draws, 0, torch.device("cpu"), torch.float32)
    names = used_draws(recipe, drawer.rows("samples", 0, 2))
    if not names:
        raise UserError(
            f"{type(recipe).__name__} uses no random input (draw) to generate images, so there is no input to export"
        )
    tables = [drawer.rows("samples", 0, count) for count in (2, *CHECKED_COUNTS)]
    described, metadata = {name: recipe.draws[name].kind for name in names}, {}
    if CLASS_DRAW in names:
        for table in tables:
            table[CLASS_DRAW] = (table[CLASS_DRAW] * spec.num_classes).long()
        described[CLASS_DRAW] = f"int64, 0…{spec.num_classes - 1}"
        metadata = {"classes": list(trained.classes)}
        if spec.empty_classes:
            metadata["empty_classes"] = [trained.classes[index] for index in spec.empty_classes]
    example, *checks = ({name: table[name] for name in names} for table in tables)
    inputs = [
        f"`{name}` [{', '.join(map(str, ('n', *recipe.draws[name].shape)))}] ({described[name]})" for name in names
    ]
    return Exportable(
        _Generate(recipe, names, spec.num_classes),
        example,
        (({0: torch.export.Dim("n")},) * len(names),),
        ("image",),
        checks,
        f"input {', '.join(inputs)}; output image [n, {spec.channels}, {spec.height}, {spec.width}], in [-1, 1]",
        metadata,
    )


def used_draws(recipe: Recipe, draws: Batch) -> tuple[str, ...]:
    """Return the names of the draws (random inputs) without which `predict` fails."""

    def is_used(name: str) -> bool:
        try:
            recipe.predict({other: rows for other, rows in draws.items() if other != name})
        except Exception:  # a KeyError, or whatever follows from a default such as None
            return True
        return False

    with torch.no_grad():
        return tuple(filter(is_used, recipe.draws))


class _ImageToImage(nn.Module):
    """Wraps `image_to_image` in a module that returns the results in a fixed order."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.recipe.image_to_image(images).values())


class _Classify(nn.Module):
    """Wraps `predict` in a module that takes pixels and returns probabilities instead of logits."""

    def __init__(self, recipe: Recipe, pixels: PixelFormat) -> None:
        super().__init__()
        self.recipe, self.pixels = recipe, pixels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        # Scale as in data/stream.py, whose function caches a tensor and so cannot be traced.
        scaled = (images.to(torch.float32) - self.pixels.middle) * (1 / self.pixels.half)
        return (self.recipe.predict({"image": scaled})["logits"].softmax(dim=1),)


class _Generate(nn.Module):
    """Wraps `predict` in a module whose inputs are the draws (random inputs) that `predict` reads.

    The draw that selects the class is replaced by the number of the class.
    """

    def __init__(self, recipe: Recipe, names: tuple[str, ...], num_classes: int) -> None:
        super().__init__()
        self.recipe, self.names, self.num_classes = recipe, names, num_classes

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        draws = dict(zip(self.names, inputs, strict=True))
        if CLASS_DRAW in draws:
            draws[CLASS_DRAW] = (draws[CLASS_DRAW] + 0.5) / self.num_classes
        return (self.recipe.predict(draws)["image"],)


OPSET = 20
LIBRARIES = tuple(  # the folders of torch, Paceline and Python's own modules
    f"{folder}/"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], Path(contextlib.__file__).parent)
)


def write_onnx(exportable: Exportable, path: Path) -> None:
    """Trace a module and write it with its metadata."""
    import onnx

    with _quiet():
        torch.onnx.export(
            exportable.module,
            tuple(exportable.example.values()),
            str(path),
            input_names=list(exportable.example),
            output_names=list(exportable.outputs),
            dynamic_shapes=exportable.dynamic_shapes,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    if exportable.metadata:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in exportable.metadata.items()})
        onnx.save(model, path)


def largest_difference(exportable: Exportable, file: Path, origin: str) -> float:
    """Return the largest difference between the ONNX file's results and PyTorch's, at new image sizes."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it contacts a server and leaves a temporary file
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for inputs in exportable.checks:
        with torch.no_grad():
            expected = exportable.module(*inputs.values())
        made = session.run(list(exportable.outputs), {name: tensor.numpy() for name, tensor in inputs.items()})
        for one, other in zip(made, expected, strict=True):
            if not other.isfinite().all():
                raise UserError(f"{origin}: the network's output is not finite; the weights may be damaged")
            worst = float(np.maximum(worst, np.abs(one - other.numpy()).max()))  # the built-in max() could drop a NaN
    return worst


@contextlib.contextmanager
def explaining_failures(origin: str) -> Iterator[None]:
    """Replace an exception from exporting or running a network with a one-line UserError with the line of code."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        cause = error.__cause__ or error  # the exporter hides the cause behind a page of advice
        where = place_outside(cause, LIBRARIES)
        problem = (str(cause).strip().splitlines() or [""])[0]
        raise UserError(
            f"{origin}: the network cannot be exported to ONNX{where}: {type(cause).__name__}: {problem}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's progress reports and graphs, which are meant for its developers."""
    before, unread = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
