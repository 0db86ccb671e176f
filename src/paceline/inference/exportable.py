"""What of a recipe becomes an ONNX file: for each kind of recipe the inputs, the outputs and what to check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.contracts.recipe import Batch, Recipe
from paceline.core.errors import UserError
from paceline.data.draws import Drawer
from paceline.inference.evaluated_size import evaluated_size
from paceline.inference.image_model import ImageModel
from paceline.inference.trained import Trained

CHECKED_PX = ((96, 128), (160, 96))  # of what takes any size, besides the size that is traced; made to fit if need be
TRACED_PX = (128, 160)  # of a classifier that takes any size
SIDES = ("height", "width")
CHECKED_COUNTS = (1, 3)  # of what takes one size: pictures at once, besides the two that are traced
BATCHES = f"on batches of {' and '.join(map(str, CHECKED_COUNTS))}"

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Exportable:
    """A module that takes tensors in order and gives tensors in order, and how a person is to use it."""

    module: nn.Module
    example: Inputs
    shapes: tuple[Any, ...]  # for each input, its dimensions that may differ
    outputs: tuple[str, ...]
    checks: list[Inputs]  # to be run by the file and by PyTorch
    checked: str  # in words
    words: str
    notes: dict[str, Any] = field(default_factory=dict)  # to be kept in the file


def restoring(image_model: ImageModel) -> Exportable:
    """Pictures in, pictures out, of any size that the networks take."""
    channels, multiple = image_model.spec.channels, image_model.field.multiple_px
    side = max(multiple, 64 // multiple * multiple) * 2
    dims = {name: torch.export.Dim(name, min=1, max=2**16 // multiple) for name in SIDES}
    height, width = (dim if multiple == 1 else multiple * dim for dim in dims.values())
    generator = torch.Generator().manual_seed(0)
    checks = []
    for px in CHECKED_PX:
        size = [max(multiple, side // multiple * multiple) * (1 + (multiple > side)) for side in px]
        checks.append({"pictures": torch.rand(1, channels, *size, generator=generator) * 2 - 1})
    sides = f"sides that are multiples of {multiple}" if multiple > 1 else "any size"
    return Exportable(
        _Restore(image_model.recipe),
        {"pictures": torch.zeros(2, channels, side, side)},
        ({0: torch.export.Dim("n"), 2: height, 3: width},),
        tuple(image_model.results),
        checks,
        f"at {len(checks)} other sizes",
        f"input `pictures` [n, {channels}, height, width] in -1…1, {sides}; "
        f"output {', '.join(image_model.results)}, in -1…1",
    )


def classifying(trained: Trained, path: str) -> Exportable:
    """Pictures as they are in, probabilities out: what scales them is in the file."""
    spec, size = trained.spec, evaluated_size(trained)
    example = torch.zeros(2, spec.channels, *(size or TRACED_PX), dtype=torch.uint8)
    _check_takes_pictures_alone(trained.recipe, example, path)
    generator = torch.Generator().manual_seed(0)
    checks = [
        {"pictures": torch.randint(256, (count, spec.channels, *px), dtype=torch.uint8, generator=generator)}
        for count, px in zip(CHECKED_COUNTS, (size, size) if size else CHECKED_PX, strict=True)
    ]
    sides = {} if size else {at: torch.export.Dim(name, max=2**16) for at, name in enumerate(SIDES, start=2)}
    return Exportable(
        _Classify(trained.recipe),
        {"pictures": example},
        ({0: torch.export.Dim("n"), **sides},),
        ("probabilities",),
        checks,
        BATCHES if size else f"at {len(checks)} other sizes",
        f"input `pictures` uint8 [n, {', '.join(map(str, (spec.channels, *(size or SIDES))))}] in 0…255; "
        f"output probabilities [n, {spec.num_classes}]",
        {"classes": list(trained.classes)},
    )


def generating(trained: Trained) -> Exportable:
    """Noise in, pictures out."""
    recipe = trained.recipe
    drawer = Drawer(recipe.draws, 0, torch.device("cpu"), torch.float32)
    names = _draws_of_pictures(recipe, drawer)
    tables = [drawer.rows("samples", 0, count) for count in (2, *CHECKED_COUNTS)]
    example, *checks = ({name: table[name] for name in names} for table in tables)
    told = [
        f"`{name}` {['n', *recipe.draws[name].shape]} ({recipe.draws[name].kind})".replace("'", "") for name in names
    ]
    return Exportable(
        _Generate(recipe, names),
        example,
        (({0: torch.export.Dim("n")},) * len(names),),
        ("image",),
        checks,
        BATCHES,
        f"input {', '.join(told)}; output image "
        f"[n, {trained.spec.channels}, {trained.spec.height}, {trained.spec.width}], in -1…1",
    )


class _Restore(nn.Module):
    """`restore` as the one thing that a module does, with its results in order."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.recipe.image_to_image(pictures).values())


class _Classify(nn.Module):
    """`predict` of pictures as they are, with probabilities instead of logits."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        # As transforms.py scales them, which keeps a tensor for ever and so cannot be traced.
        scaled = (pictures.to(torch.float32) - 127.5) * (1 / 127.5)
        return (self.recipe.predict({"image": scaled})["logits"].softmax(dim=1),)


class _Generate(nn.Module):
    """`predict` of the draws that it reads."""

    def __init__(self, recipe: Recipe, names: tuple[str, ...]) -> None:
        super().__init__()
        self.recipe, self.names = recipe, names

    def forward(self, *draws: Tensor) -> tuple[Tensor, ...]:
        return (self.recipe.predict(dict(zip(self.names, draws, strict=True)))["image"],)


class _Watched(dict[str, Tensor]):
    """A batch that knows which of its fields were read; of one that is copied, all were."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        """As ever, but a class with its own is copied by way of the methods above, not behind their backs."""
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.append(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.read.append(name)
        return super().pop(name, *default)

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()

    def copy(self) -> Batch:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)


def _check_takes_pictures_alone(recipe: Recipe, pictures: Tensor, path: str) -> None:
    """Refuses a classifier that rolls dice, since no picture gives these, or that does not take the size judged."""
    drawer = Drawer(recipe.draws, 0, torch.device("cpu"), torch.float32)
    draws = drawer.rows("evaluation", 0, len(pictures))
    try:
        read = _draws_read(recipe, {"image": pictures.to(torch.float32)} | draws)
    except RuntimeError as error:
        size = f"{pictures.shape[3]}×{pictures.shape[2]}"
        raise UserError(
            f"{path}: predict() of {type(recipe).__name__} cannot take whole pictures of {size} pixels "
            f"({str(error).splitlines()[0]}); train with --set size=PIXELS if it takes one size alone"
        ) from None
    if read:
        raise UserError(
            f"{path}: predict() of {type(recipe).__name__} reads the draw {read[0]!r}, and a classifier's ONNX file "
            "takes pictures alone; let predict() do without it"
        )


def _draws_of_pictures(recipe: Recipe, drawer: Drawer) -> tuple[str, ...]:
    """The draws that pictures are made of; others are for training alone."""
    names = _draws_read(recipe, drawer.rows("samples", 0, 2))
    if not names:
        raise UserError(
            f"{type(recipe).__name__} reads no draws when it makes pictures, so there is no input to export"
        )
    return names


def _draws_read(recipe: Recipe, batch: Batch) -> tuple[str, ...]:
    watched = _Watched(batch)
    with torch.no_grad():
        recipe.predict(watched)
    return tuple(name for name in recipe.draws if name in watched.read)
