"""What a run learned, or a weights file holds, ready to be applied to pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.inference.receptive_field import ReceptiveField, receptive_field
from paceline.inference.trained import Stored, Trained, build, check_use, fill, read_stored


@dataclass(frozen=True)
class ImageModel(Trained):
    """A recipe that makes pictures of pictures, and how far its networks see."""

    @property
    def output_scale(self) -> int:
        """How many times as high and wide the results are."""
        return self.recipe.output_scale

    @property
    def results(self) -> tuple[str, ...]:
        """The names of what is made of one picture."""
        return self.field.results

    @cached_property
    def field(self) -> ReceptiveField:
        """What tiles must keep to."""
        return receptive_field(self.recipe.image_to_image, self.spec.channels, self.output_scale)


def open_image_model(path: str, checkpoint: str = "best") -> ImageModel:
    """Opens a run's folder or a weights file; a network that takes part without weights is an error."""
    stored = read_stored(path, checkpoint)
    check_use(stored, "apply", path)
    return make_image_model(stored, path)


def make_image_model(stored: Stored, path: str) -> ImageModel:
    """What was stored, ready to be applied; networks that take no part may have no weights."""
    image_model = ImageModel(build(stored.config, stored.spec), stored.config, stored.spec, stored.origin)
    own = image_model.recipe.state_dict(keep_vars=True)
    needed = [key for key, value in own.items() if id(value) in image_model.field.used]
    fill(image_model.recipe, stored.weights, path, needed)
    return image_model
