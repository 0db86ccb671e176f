"""A trained model that transforms images of any size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.contracts.recipe import Recipe
from paceline.inference.blending import NO_BLEND, Blend, read_blended
from paceline.inference.measured_field import measured_field, window_multiple
from paceline.inference.receptive_field import ReceptiveField, receptive_field
from paceline.inference.trained import StoredModel, TrainedModel, build_for, load_into
from paceline.inference.uses import check_use, uses_of
from paceline.runs.weights import evaluated_values


@dataclass(frozen=True)
class ImageModel(TrainedModel):
    """A recipe that maps images to images, and its receptive field."""

    @property
    def output_scale(self) -> int:
        """The height and width of the results relative to the input."""
        return self.recipe.output_scale

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the images computed from one input image."""
        return self.receptive_field.results

    @cached_property
    def receptive_field(self) -> ReceptiveField:
        """The halo and alignment that tiles need to produce the same result as the whole image."""
        window_px = window_multiple(self.recipe)
        return receptive_field(self.recipe.image_to_image, self.spec.channels, self.output_scale, window_px)

    @cached_property
    def tiled_field(self) -> ReceptiveField:
        """The receptive field for tiles. If it cannot be traced, it is measured, which takes several seconds."""
        field = self.receptive_field
        return measured_field(self.recipe, self.spec.channels, field) if field.is_measurable else field


def open_image_model(path: str, checkpoint: str = "best", blend: Blend = NO_BLEND) -> ImageModel:
    """Open a run folder or weights file whose recipe transforms images."""
    stored = read_blended(path, checkpoint, blend)
    check_use(stored, "apply", path)
    return make_image_model(stored, path)


def open_recipe(stored: StoredModel, path: str) -> Recipe:
    """Return a recipe with its weights; weights that `image_to_image` does not need may be missing."""
    recipe = build_for(stored)
    load_usable(recipe, stored, path)
    return recipe


def make_image_model(stored: StoredModel, path: str) -> ImageModel:
    """Return a stored model with its weights. Networks that `image_to_image` does not use may lack weights."""
    image_model = ImageModel(build_for(stored), stored.config, stored.spec, stored.origin)
    _load(image_model, stored, path)
    return image_model


def load_usable(recipe: Recipe, stored: StoredModel, path: str) -> None:
    """Load stored weights into a recipe; weights that `image_to_image` does not need may be missing."""
    is_complete = recipe.state_dict().keys() <= evaluated_values(stored.weights).keys()
    if "apply" in uses_of(stored.recipe_class) and not is_complete:
        _load(ImageModel(recipe.eval(), stored.config, stored.spec, stored.origin), stored, path)
    else:
        load_into(recipe, stored.weights, path, required=recipe.state_dict())


def _load(image_model: ImageModel, stored: StoredModel, path: str) -> None:
    own = image_model.recipe.state_dict(keep_vars=True)
    required = [key for key, value in own.items() if id(value) in image_model.receptive_field.used]
    load_into(image_model.recipe, stored.weights, path, required)
