"""`paceline.load`: what a run learned, in Python. Its calls have the names of the commands that do the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.data.draws import Drawer
from paceline.data.feed import EVALUATION_BATCH, EVALUATION_PIXELS
from paceline.data.transforms import transform
from paceline.images.decode import BadImage, arrange_image, plain_image
from paceline.inference.applier import Applier, How
from paceline.inference.evaluated_size import evaluated_size
from paceline.inference.image_model import make_image_model
from paceline.inference.trained import Stored, Trained, check_use, networks_in, open_trained, read_stored, uses_of
from paceline.parallel.precision import choose_precision
from paceline.runs.stages import last_finished
from paceline.training.compile import eager
from paceline.training.sampling import fixed_draws, make_pictures

Pictures = Tensor | np.ndarray | Image.Image | Iterable[Image.Image]


def load(path: str, checkpoint: str = "best", device: str | torch.device | None = None) -> Model:
    """Opens a run's folder or a weights file, on a GPU where there is one unless a device is named."""
    place = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = last_finished(path)
    return Model(read_stored(path, checkpoint), path, place)


class Model:
    """A recipe with the weights that were judged, in eval mode on one device.

    `predict` is for classifiers, `sample` for generators, `apply` for what restores, enlarges or translates pictures.
    """

    def __init__(self, stored: Stored, path: str, device: torch.device) -> None:
        self.device = device
        self._stored, self._path, self._run = stored, path, stored.config.run
        self._precision = choose_precision(self._run.precision, device)
        self._applier: Applier | None = None
        if "apply" in uses_of(stored.recipe_class):
            image_model = make_image_model(stored, path)
            self._trained: Trained = image_model
            with self._as_applied():
                self._applier = Applier(How(path), image_model, device)
        else:
            self._trained = open_trained(stored, path)
            self.recipe.to(device=device, dtype=self._precision.weights)

    @property
    def recipe(self) -> Recipe:
        """All networks, and what is computed with them."""
        return self._trained.recipe

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks whose weights there are, by name."""
        return networks_in(self._stored, self.recipe)

    @property
    def spec(self) -> DataSpec:
        """What the data said of itself: channels, height, width, num_classes and more."""
        return self._trained.spec

    @property
    def origin(self) -> str:
        """Where the weights are from, in words."""
        return self._trained.origin

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, or its number where the data had no names."""
        return self._trained.classes

    @torch.no_grad()
    def predict(self, pictures: Pictures) -> Tensor:
        """The probability of each class, float64 [n, classes], of Pillow pictures or of uint8 [n, c, h, w].

        They are computed as `evaluate` computes them. Tensors are taken as they are, like the samples of a source;
        Pillow pictures are brought to the size that the run was judged on.
        """
        check_use(self._stored, "predict", self._path)
        drawer = self._drawer(self._run.seed)
        found, start = [torch.zeros(0, self.spec.num_classes, dtype=torch.float64)], 0
        for raw in self._batches(pictures):
            with self._as_in_the_run(), eager(), self._precision.autocast():
                not_augmented = torch.zeros(len(raw), 0)
                batch = {"image": raw.to(self.device), "uniforms": not_augmented}
                draws = drawer.rows("evaluation", start, start + len(raw))
                logits = self.recipe.predict(transform(batch, None, self._precision.weights) | draws)["logits"]
            found.append(logits.double().softmax(dim=1).cpu())
            start += len(raw)
        made = torch.cat(found)
        if not made.isfinite().all():
            raise UserError(f"{self._path}: its network gives numbers that are not finite; the weights may be damaged")
        return made

    def sample(self, count: int, seed: int | None = None) -> Tensor:
        """Pictures of noise, uint8 [n, c, h, w]: with the run's own seed, those that `paceline sample` shows."""
        check_use(self._stored, "sample", self._path)
        if count < 1:
            raise UserError(f"sample({count}): expected a number of pictures")
        drawer = self._drawer(self._run.seed if seed is None else seed)
        with self._as_in_the_run():
            pictures = make_pictures(self.recipe, fixed_draws(self.recipe, drawer, count), self._precision)
        return torch.from_numpy(pictures).permute(0, 3, 1, 2)

    def apply(self, picture: Image.Image) -> dict[str, Image.Image]:
        """What is made of a picture of any size, by name, in 8 bits; the one that matters is "image"."""
        check_use(self._stored, "apply", self._path)
        assert self._applier
        pixels = np.asarray(_plain(picture))
        with self._as_applied():
            return self._applier.make(pixels if pixels.ndim == 3 else pixels[..., np.newaxis])

    def _batches(self, pictures: Pictures) -> Iterator[Tensor]:
        """Pictures uint8 [n, c, h, w], as many at once as `evaluate` takes."""
        if isinstance(pictures, Image.Image):
            pictures = [pictures]
        size = evaluated_size(self._trained)
        shape = f"uint8 [n, {', '.join(map(str, (self.spec.channels, *(size or ('height', 'width')))))}]"
        if not isinstance(pictures, Tensor | np.ndarray):
            several = isinstance(pictures, Iterable) and not isinstance(pictures, str | bytes)
            found: list[Any] = list(pictures) if several else [pictures]
            for one in found:
                if not isinstance(one, Image.Image):
                    raise UserError(f"give Pillow pictures in a list, or {shape}; not {_kind(one, several)}")
            arrays = [self._arrange(picture) for picture in found]
            alike = len({array.shape for array in arrays}) == 1
            for stack in [np.stack(arrays)] if alike else [array[np.newaxis] for array in arrays]:
                yield from self._batches(torch.from_numpy(stack).permute(0, 3, 1, 2))
            return
        given = list(pictures.shape)
        fits = len(given) == 4 and given[1] == self.spec.channels and size in (None, tuple(given[2:]))
        if pictures.dtype not in (torch.uint8, np.uint8) or not fits:
            raise UserError(f"expected pictures as {shape}, not {pictures.dtype} {given}")
        whole = torch.as_tensor(pictures if isinstance(pictures, Tensor) else np.ascontiguousarray(pictures))
        count = max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // max(1, whole.shape[2] * whole.shape[3])))
        for start in range(0, len(whole), count):
            # In memory as loaders give them, [n, h, w, c]: convolutions of other layouts round otherwise.
            rows = whole[start : start + count].permute(0, 2, 3, 1)
            yield rows.clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)

    def _arrange(self, picture: Image.Image) -> np.ndarray:
        """The middle of a picture, scaled to what the run was judged on, as uint8 [h, w, c]."""
        spec = self.spec
        if spec.channels not in (1, 3):
            raise UserError(f"{self._path}: its pictures have {spec.channels} channels; give them as uint8 tensors")
        height, width = evaluated_size(self._trained) or (0, 0)
        picture = _plain(picture)
        if height != width:
            picture = ImageOps.fit(picture, (width, height), Image.Resampling.BICUBIC)
        return arrange_image(picture, height if height == width else 0, spec.channels)

    def _drawer(self, seed: int) -> Drawer:
        return Drawer(self.recipe.draws, seed, self.device, self._precision.weights)

    def _as_in_the_run(self) -> AbstractContextManager[None]:
        return self._precision.applied(deterministic=self._run.deterministic)

    def _as_applied(self) -> AbstractContextManager[None]:
        """The applier sets the switches that it needs; here they do not outlive the call."""
        return choose_precision("fp32", self.device).applied(deterministic=True)


def _device(wanted: str | torch.device) -> torch.device:
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={str(wanted)!r}: expected 'cpu', 'cuda' or one of several GPUs like 'cuda:1'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={str(wanted)!r}: no CUDA device is visible to PyTorch here; use device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"device={str(wanted)!r}: there is no such GPU here; the last is 'cuda:{last}'")
    return device


def _kind(thing: object, in_a_list: bool) -> str:
    return f"{type(thing).__name__}{' in a list' if in_a_list else ''}"


def _plain(picture: Image.Image) -> Image.Image:
    if not isinstance(picture, Image.Image):
        raise UserError(f"give a Pillow picture, not {_kind(picture, False)}; Image.open(FILE) makes one of a file")
    try:
        return plain_image(picture)
    except BadImage as problem:
        raise UserError(f"a picture cannot be used: {problem}") from None
