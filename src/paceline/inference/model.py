"""`paceline.load`: a trained model in Python. Each method has the same name as its command."""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from paceline.contracts.recipe import CLASS_DRAW, Batch, DataSpec, Recipe
from paceline.core.errors import UserError, unknown
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.data.loader import EVALUATION_BATCH, EVALUATION_PIXELS
from paceline.data.source import selecting
from paceline.data.stream import Drawer, transform
from paceline.images.decode import BadImage, arrange_image, plain_image, to_array, to_pillow
from paceline.images.deep import DeepImage, image_size
from paceline.images.readers import ImageReader, make_reader
from paceline.inference.apply import Applier, ApplierSettings
from paceline.inference.files import FoundImage, SkippedImage
from paceline.inference.tiles import Composition
from paceline.inference.trained import (
    StoredModel,
    check_use,
    networks_in,
    open_trained,
    read_stored,
    uses_of,
)
from paceline.parallel.precision import choose_precision
from paceline.runs.finished_run import last_finished
from paceline.training.compile import eager
from paceline.training.previews import fixed_draws, make_images

EVERY_CLASS = "all"  # one class per row


def truncate_draws(recipe: Recipe, draws: Batch, truncation: float, flag: str) -> Batch:
    """Scale normally distributed inputs by `truncation`: below 1, images are more alike and often look better."""
    check_truncation(truncation, flag)
    if truncation == 1:
        return draws
    is_normal = {name: recipe.draws[name].kind == "normal" for name in draws}
    return {name: rows * truncation if is_normal[name] else rows for name, rows in draws.items()}


def check_truncation(truncation: float, flag: str) -> None:
    """Raise UserError if the truncation factor is not between 0 and 2."""
    if not 0 <= truncation <= 2:
        raise UserError(f"{flag}{truncation:g}: must be at least 0 and at most 2")


def choose_class(recipe: Recipe, draws: Batch, spec: DataSpec, label: str | int, columns: int, flag: str) -> Batch:
    """Return draws that select a class by its name or index, or a different class for each row of images.

    If `columns` is 0, the images have no rows, and `all` is an unknown class.
    """
    if columns and is_every_class(label, spec.classes) and CLASS_DRAW in recipe.draws:
        classes = trained_classes(spec)
    else:
        classes, columns = [class_index(recipe, spec, label, flag)], columns or 1
    rows = draws[CLASS_DRAW].clone()
    for start in range(0, len(rows), columns):
        rows[start : start + columns] = selecting(classes[start // columns % len(classes)], spec.num_classes)
    return draws | {CLASS_DRAW: rows}


def is_every_class(label: str | int, classes: tuple[str, ...]) -> bool:
    """Return whether a label selects a different class for each row; a class may itself be named `all`."""
    return label == EVERY_CLASS and EVERY_CLASS not in classes


def trained_classes(spec: DataSpec) -> list[int]:
    """Return the indices of the classes that have training images."""
    return sorted(set(range(spec.num_classes)) - set(spec.empty_classes))


def class_index(recipe: Recipe, spec: DataSpec, label: str | int, flag: str) -> int:
    """Return the index of a class, given by its name or its index; raise UserError if the model cannot generate it.

    If a class name is a number, only names are accepted, since an index could be mistaken for a name.
    """
    if CLASS_DRAW not in recipe.draws:
        raise UserError(f"{flag}{label}: {type(recipe).__name__} is not class-conditional; leave it out")
    text, classes = str(label), spec.classes
    # In names of folders copied from macOS, "ü" may be stored as two characters, but users type it as one.
    composed = [unicodedata.normalize("NFC", name) for name in classes]
    typed = unicodedata.normalize("NFC", text)
    if text in classes:
        index = classes.index(text)
    elif typed in composed:
        index = composed.index(typed)
    else:
        index = int(text) if text.isdecimal() and not any(name.isdecimal() for name in classes) else len(classes)
        if index >= len(classes):
            raise UserError(f"{flag}{label}: {unknown('class', text, classes)}")
    if index in spec.empty_classes:
        raise UserError(f"{flag}{label}: the class has no training images; choose another one")
    return index


def parse_device(wanted: str | torch.device) -> torch.device:
    """Return a device; raise UserError if this machine does not have it."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(wanted)
        if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < num_gpus):
            return device
    except (RuntimeError, TypeError):
        pass
    accepted = "'cpu', 'cuda' or a GPU index such as 'cuda:1'"
    raise UserError(f"device={str(wanted)!r}: expected {accepted}; GPUs on this machine: {num_gpus}")


def plain(image: object) -> Image.Image:
    """Return an upright 8-bit grey or RGB image; raise UserError if the image cannot be used."""
    if not isinstance(image, Image.Image):
        hint = "convert it with Image.fromarray" if hasattr(image, "shape") else "open files with Image.open(FILE)"
        raise UserError(f"expected a Pillow image, not {type(image).__name__}; {hint}")
    if 0 in image.size:
        raise UserError(f"an image cannot be used: it has no pixels ({image.width}×{image.height})")
    try:
        return plain_image(image)
    except BadImage as problem:
        raise UserError(f"an image cannot be used: {problem}") from None


def as_images(composition: Composition) -> dict[str, Image.Image]:
    """Return the results for an image as Pillow images, by name."""
    return {name: to_pillow(pixels) for name, pixels in composition.results().items()}


def split_as_in_evaluation(images: Tensor) -> Iterator[Tensor]:
    """Yield [n, c, h, w] tensors whose size and memory layout are those of batches in an evaluation."""
    count = max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // max(1, images.shape[2] * images.shape[3])))
    for start in range(0, len(images), count):
        # The loaders' layout is [n, h, w, c]; convolutions in other layouts round differently.
        rows = images[start : start + count].permute(0, 2, 3, 1)
        yield rows.clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


Images = Tensor | npt.NDArray[np.uint8] | Image.Image | Iterable[Image.Image]


def load(
    path: str, checkpoint: str = "best", device: str | torch.device | None = None, *, trust: bool = False
) -> Model:
    """Load a run folder or weights file onto a device; by default, onto a GPU if there is one."""
    place = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = last_finished(path, trust=trust)
    return Model(read_stored(path, checkpoint, trust=trust), path, place)


class Model:
    """A trained model in eval mode on one device, as returned by `paceline.load`.

    Use `predict` for classifiers, `sample` for generators, and `apply` for models that restore, upscale or translate
    images. The weights are those used in evaluation: the EMA weights if the recipe uses EMA. `device` is the device
    that holds them.

    Examples:
        >>> model = paceline.load("runs/first", device="cpu")
        >>> model
        Model(classification, 'runs/first', best checkpoint at 1,344 images, cpu)
        >>> model.classes
        ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
        >>> model.spec.num_classes, list(model.networks)
        (10, ['classifier'])
    """

    def __init__(self, stored: StoredModel, path: str, device: torch.device) -> None:
        self.device = device
        self._stored, self._path, self._run = stored, path, stored.config.run
        self._precision = choose_precision(self._run.precision, device)
        self._applier: Applier | None = None
        self._trained = open_trained(stored, path)
        if "apply" in uses_of(stored.recipe_class):
            with self._applier_precision():
                self._applier = Applier(ApplierSettings(), self._trained, [device])
        else:
            self.recipe.to(device=device, dtype=self._precision.weights)

    def __repr__(self) -> str:
        parts = (self._stored.config.recipe_name, repr(self._path), self._stored.checkpoint, str(self.device))
        return f"Model({', '.join(filter(None, parts))})"

    @property
    def recipe(self) -> Recipe:
        """The recipe, with all of its networks."""
        return self._trained.recipe

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks with trained weights, by name; they take images in [-1, 1]."""
        return networks_in(self._stored, self.recipe)

    @property
    def spec(self) -> DataSpec:
        """The data spec of the training data: channels, height, width and more."""
        return self._trained.spec

    @property
    def origin(self) -> str:
        """A description of where the weights come from."""
        return self._trained.origin

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, or the class indices if the classes have no names."""
        return self._trained.classes

    @property
    def reader(self) -> ImageReader:
        """Reads image files as the model needs them."""
        return make_reader(self.spec.channels, self.spec.pixel_format)

    @torch.no_grad()
    def predict(self, images: Images) -> Tensor:
        """Return the probability of each class for each image.

        The computation is the same as in `paceline evaluate`.

        Args:
            images: One or more Pillow images, which are scaled and cropped to the size used to evaluate the run;
                or an [n, c, h, w] tensor or array of the type `spec.dtype` (usually uint8), which is used unchanged.

        Returns:
            The probabilities as a float64 [n, classes] tensor on the CPU. See `classes` for the class names.

        Raises:
            UserError: If the model is not a classifier, or the images have the wrong type or shape.

        Examples:
            >>> from PIL import Image
            >>> model = paceline.load("runs/first")
            >>> probabilities = model.predict(Image.open("docs/examples/digits/2.png"))
            >>> probabilities.shape
            torch.Size([1, 10])
            >>> likeliest = model.classes[probabilities[0].argmax()]
        """
        check_use(self._stored, "predict", self._path)
        drawer = self._drawer(self._run.seed)
        found, start = [torch.zeros(0, self.spec.num_classes, dtype=torch.float64)], 0
        for raw in self._batches(images):
            with self._run_precision(), eager(), self._precision.autocast():
                not_augmented = torch.zeros(len(raw), 0)
                batch = {"image": raw.to(self.device), "uniforms": not_augmented}
                draws = drawer.rows("evaluation", start, start + len(raw))
                logits = self.recipe.predict(
                    transform(batch, None, self._precision.weights, self.spec.pixel_format) | draws
                )["logits"]
            found.append(logits.double().softmax(dim=1).cpu())
            start += len(raw)
        probabilities = torch.cat(found)
        if not probabilities.isfinite().all():
            raise UserError(f"{self._path}: the network's output is not finite; the weights may be damaged")
        return probabilities

    def sample(
        self, count: int, seed: int | None = None, first: int = 0, label: str | int | None = None, truncation: float = 1
    ) -> Tensor:
        """Generate images from noise.

        Args:
            count: The number of images.
            seed: The seed for the noise; by default the run's seed, which generates the same images as
                `paceline sample`.
            first: The index of the first image. Image n is the same, no matter how many images are generated at once.
            label: The class of the images, for class-conditional models: its name or, if no class name is a number,
                its index. By default, classes that have training images are drawn at random.
            truncation: A factor that scales the noise. Below 1, the images are more alike and often look better.

        Returns:
            The images as an [n, c, h, w] tensor on the CPU, of the same data type as the training images: uint8, uint16
            or float32.

        Raises:
            UserError: If the model is not a generator, or an argument is invalid.

        Examples:
            >>> generator = paceline.load("runs/dcgan-digits-0")
            >>> images = generator.sample(16, seed=1)
            >>> images.dtype, images.shape
            (torch.uint8, torch.Size([16, 1, 32, 32]))
        """
        check_use(self._stored, "sample", self._path)
        if count < 1:
            raise UserError(f"sample({count}): the number of images must be at least 1")
        drawer = self._drawer(self._run.seed if seed is None else seed)
        draws = fixed_draws(self.recipe, drawer, self.spec, count, first)
        draws = truncate_draws(self.recipe, draws, truncation, "truncation=")
        if label is not None:
            draws = choose_class(self.recipe, draws, self.spec, label, 0, "label=")
        with self._run_precision():
            images = make_images(self.recipe, draws, self._precision, self.spec.pixel_format)
        return torch.from_numpy(images).permute(0, 3, 1, 2)

    @overload
    def apply(self, image: Image.Image) -> dict[str, Image.Image]: ...
    @overload
    def apply(self, image: Iterable[Image.Image]) -> Iterator[dict[str, Image.Image]]: ...
    def apply(
        self, image: Image.Image | Iterable[Image.Image]
    ) -> dict[str, Image.Image] | Iterator[dict[str, Image.Image]]:
        """Restore, upscale or translate images of any size.

        Large images are processed in tiles. Threads prepare the next images while others are computed.

        Args:
            image: A Pillow image, or an iterable of them, which is read as the results are used. A greyscale network
                processes the channels of a colour image separately.

        Returns:
            The results by name, as 8-bit Pillow images. The main result is "image". For an iterable, an iterator over
            the results of each image, in order.

        Raises:
            UserError: If the model does not transform images, or an image cannot be used.

        Examples:
            >>> from PIL import Image
            >>> restorer = paceline.load("runs/restoration-degraded-0")
            >>> restored = restorer.apply(Image.open("docs/examples/photo.png"))["image"]
            >>> restored.save("restored.png")
        """
        check_use(self._stored, "apply", self._path)
        if self.spec.channels not in (1, 3) or self.spec.value_range:
            raise UserError(f"{self._path}: takes {self._kind}, which Pillow cannot open; use `paceline apply`")
        if isinstance(image, Iterable) and not isinstance(image, Image.Image | str | bytes | np.ndarray | Tensor):
            return self._apply_each(image)
        return as_images(self._composed(to_array(plain(image))))

    def _apply_each(self, images: Iterable[Image.Image]) -> Iterator[dict[str, Image.Image]]:
        before: Composition | None = None
        for pixels in ordered_map(lambda image: to_array(plain(image)), images, num_cores()):
            made = self._composed(pixels)
            if before:
                yield as_images(before)  # while a GPU computes the next results
            before = made
        if before:
            yield as_images(before)

    def _composed(self, pixels: npt.NDArray[np.uint8]) -> Composition:
        assert self._applier
        with self._applier_precision():
            return self._applier.composer.compose([pixels], pixels.nbytes, lambda _: None)[0]

    def _batches(self, images: Images) -> Iterator[Tensor]:
        """Yield [n, c, h, w] tensors of the data spec's dtype with the same batch size as `evaluate`."""
        size, dtype, names = self._trained.evaluated_size, self.spec.dtype, ("height", "width")
        expected = f"{dtype} [n, {', '.join(map(str, (self.spec.channels, *(size or names))))}]"
        if not isinstance(images, Tensor | np.ndarray):
            for stack in self._arranged(images, expected):
                yield from split_as_in_evaluation(stack)
            return
        shape = list(images.shape)
        fits = len(shape) == 4 and shape[1] == self.spec.channels and size in (None, tuple(shape[2:]))
        if str(images.dtype).removeprefix("torch.") != dtype or not fits:
            raise UserError(f"expected images as {expected}, not {images.dtype} {shape}")
        yield from split_as_in_evaluation(
            torch.as_tensor(images if isinstance(images, Tensor) else np.ascontiguousarray(images))
        )

    def _arranged(self, images: Image.Image | Iterable[Image.Image], expected: str) -> list[Tensor]:
        """Convert Pillow images to uint8 [n, c, h, w] tensors: a single tensor if all sizes are equal."""
        several = isinstance(images, Iterable) and not isinstance(images, str | bytes | Image.Image)
        listed: Any = images if several else [images]
        arrays = []
        for image in listed:  # one at a time, to limit memory use for large images
            if not isinstance(image, Image.Image | DeepImage):
                kind = f"{type(image).__name__}{' in a list' if several else ''}"
                raise UserError(f"expected a list of Pillow images or {expected}, not {kind}")
            arrays.append(self._arrange(image))
        one_size = len({array.shape for array in arrays}) == 1
        stacks = [np.stack(arrays)] if one_size else [array[np.newaxis] for array in arrays]
        return [torch.from_numpy(stack).permute(0, 3, 1, 2) for stack in stacks]

    def _arrange(self, image: Image.Image | DeepImage) -> npt.NDArray[Any]:
        """Centre-crop and scale an image to the size used to evaluate the run; return an [h, w, c] array."""
        spec = self.spec
        height, width = self._trained.evaluated_size or (0, 0)
        if isinstance(image, DeepImage):
            return image.fitted(height, width, spec.pixel_format).pixels
        if spec.dtype != "uint8" or spec.channels not in (1, 3):
            raise UserError(f"{self._path}: takes {self._kind}; pass them as a {spec.dtype} array")
        if height != width:
            fitted = ImageOps.fit(plain(image), (width, height), Image.Resampling.BICUBIC)
            return arrange_image(fitted, 0, spec.channels)
        return arrange_image(plain(image), height, spec.channels)

    @property
    def _kind(self) -> str:
        return f"images with {self.spec.channels} channels and {self.spec.pixel_format} pixels"

    def _drawer(self, seed: int) -> Drawer:
        return Drawer(self.recipe.draws, seed, self.device, self._precision.weights)

    def _run_precision(self) -> AbstractContextManager[None]:
        return self._precision.applied(deterministic=self._run.deterministic)

    def _applier_precision(self) -> AbstractContextManager[None]:
        """Return a context that restores the global precision settings, which the applier changes."""
        return choose_precision("fp32", self.device).applied(deterministic=True)


IMAGES_AT_ONCE = 32
MAX_BYTES, BYTES_PER_PX = 500_000_000, 4  # of images that are decoded in advance


@contextmanager
def prediction_file(path: Path, top: int) -> Iterator[Callable[[str, Sequence[tuple[str, float]]], None]]:
    """Open a CSV file, and yield a function that adds an image with its likeliest classes.

    Bytes of a file name that are not UTF-8 stay bytes.
    """
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        table = csv.writer(file)
        table.writerow(["file", *(f"{what}_{n}" for n in range(1, top + 1) for what in ("class", "probability"))])
        yield lambda image, classes: table.writerow([image, *chain.from_iterable(classes)])


def classify_files(
    model: Model, images: Sequence[FoundImage], top: int, skipped: list[SkippedImage]
) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield each image's path and its most likely classes; add files that cannot be read to `skipped`."""

    def decode(image: FoundImage) -> Any:
        try:
            return model.reader.decode(image.path)
        except BadImage as problem:
            return SkippedImage(str(image.path), str(problem))

    def count_bytes(image: FoundImage) -> int:
        try:
            height, width = image_size(image.path)
        except BadImage:
            return 0
        return height * width * BYTES_PER_PX

    def usable(start: int, paths: list[str]) -> Iterator[Any]:
        """Yield decoded images one at a time, since large ones need a lot of memory."""
        for found, image in zip(images[start : start + IMAGES_AT_ONCE], decoded, strict=False):
            if isinstance(image, SkippedImage):
                skipped.append(image)
            else:
                paths.append(str(found.path))
                yield image

    decoded = ordered_map(decode, images, num_cores(), num_bytes=count_bytes, max_bytes=MAX_BYTES)
    for start in range(0, len(images), IMAGES_AT_ONCE):
        paths: list[str] = []
        probabilities = model.predict(usable(start, paths))
        # Among equally likely classes, the one with the lower index comes first, as in evaluation.
        ranked = probabilities.sort(dim=1, descending=True, stable=True)
        for path, values, classes in zip(paths, ranked.values.tolist(), ranked.indices.tolist(), strict=True):
            yield path, [(model.classes[number], value) for number, value in zip(classes[:top], values, strict=False)]
