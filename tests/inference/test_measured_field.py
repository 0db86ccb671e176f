"""The receptive field of attention in windows is measured; tiles with the measured halo equal the full result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.contracts.recipe import DataSpec, Recipe
from paceline.inference.receptive_field import ReceptiveField, measured_field, receptive_field, window_multiple


class Windows(nn.Module):
    """Attention inside windows. If `shift` is not 0, the windows are shifted and masked as in Swin."""

    def __init__(self, width: int, window_size: int, shift: int) -> None:
        super().__init__()
        self.window_size, self.shift = window_size, shift
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def partition(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        side = self.window_size
        return x.view(n, h // side, side, w // side, side, c).transpose(2, 3).reshape(-1, side * side, c)

    def mask(self, h: int, w: int) -> Tensor:
        regions = torch.zeros(1, h, w, 1)
        cuts = (slice(0, -self.window_size), slice(-self.window_size, -self.shift), slice(-self.shift, None))
        for number, (rows, columns) in enumerate((rows, columns) for rows in cuts for columns in cuts):
            regions[:, rows, columns] = number
        parts = self.partition(regions)[..., 0]
        return torch.where(parts[:, None] == parts[:, :, None], 0.0, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        rows = x.permute(0, 2, 3, 1)
        rows = rows.roll((-self.shift, -self.shift), (1, 2)) if self.shift else rows
        q, k, v = self.qkv(self.partition(rows)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2)
        scores = scores + self.mask(h, w).to(scores) if self.shift else scores
        made = self.out(scores.softmax(-1) @ v)
        side = self.window_size
        made = made.view(n, h // side, w // side, side, side, c).transpose(2, 3).reshape(n, h, w, c)
        made = made.roll((self.shift, self.shift), (1, 2)) if self.shift else made
        return x + made.permute(0, 3, 1, 2)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean((2, 3), keepdim=True)


class Placed(nn.Module):
    """Adds a value that depends on the row, as absolute position embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.arange(x.shape[2], dtype=x.dtype).remainder(24).view(1, 1, -1, 1).sin()


class Everywhere(nn.Module):
    """Adds a value that depends on all pixels, which cannot be followed."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return x + (tokens.softmax(1) * tokens).sum(1)[:, :, None, None]


class Windowed(Recipe):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(None, DataSpec(3, 32, 32))
        self.network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *layers, nn.Conv2d(4, 3, 3, padding=1))

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        height, width = images.shape[-2:]
        padded = nn.functional.pad(images, (0, -width % 8, 0, -height % 8), "replicate")
        return {"image": self.network(padded)[..., :height, :width].clamp(-1, 1)}


def field_of(recipe: Recipe) -> ReceptiveField:
    return receptive_field(recipe.image_to_image, 3, 1, window_multiple(recipe))


def recipe_with(*layers: nn.Module) -> Windowed:
    torch.manual_seed(0)
    recipe = Windowed(*layers).eval()
    for module in recipe.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, 0, 0.3)
    return recipe


@torch.no_grad()
def test_windows_and_their_shifts_determine_halo_and_alignment() -> None:
    recipe = recipe_with(Windows(4, 8, 0), Windows(4, 8, 4), Windows(4, 8, 0))
    traced = field_of(recipe)
    assert traced.is_measurable and traced.obstacles and traced.multiple_px == 8
    field = measured_field(recipe, 3, traced)
    assert not field.obstacles and not field.is_measurable
    # The first convolution reads 1 pixel beyond the windows; the last one needs the neighbouring window, which the
    # shifted windows extend by half a window on each side.
    assert field.tiled_halo_px == 24 and 16 < field.halo_px <= 24
    # With a halo that is one window narrower, a tile differs.
    halo, image, recipe = 16, torch.rand(1, 3, 80, 80, dtype=torch.float64) - 0.5, recipe.double()
    whole = recipe.image_to_image(image)["image"][..., 32:40, 32:40]
    tile = recipe.image_to_image(image[..., 32 - halo : 40 + halo, 32 - halo : 40 + halo])["image"]
    assert (tile[..., halo : halo + 8, halo : halo + 8] - whole).abs().max() > 1e-9


@torch.no_grad()
def test_tiles_with_the_measured_halo_equal_the_full_result() -> None:
    recipe = recipe_with(Windows(4, 8, 4), Windows(4, 8, 0), Windows(4, 8, 4))
    field = measured_field(recipe, 3, field_of(recipe))
    image, recipe = torch.rand(1, 3, 75, 83, dtype=torch.float64) - 0.5, recipe.double()
    whole, halo, side = recipe.image_to_image(image)["image"], field.tiled_halo_px, 24
    for top in range(0, 75, side):
        for left in range(0, 83, side):
            above, before = max(0, top - halo), max(0, left - halo)
            tile = image[..., above : top + side + halo, before : left + side + halo]
            made = recipe.image_to_image(tile)["image"][..., top - above :, left - before :][..., :side, :side]
            assert (made - whole[..., top : top + side, left : left + side]).abs().max() < 1e-9


def test_a_network_with_windows_that_also_pools_over_the_image_is_not_measured() -> None:
    field = field_of(recipe_with(Windows(4, 8, 0), Pooled()))
    assert not field.is_measurable and field.obstacles[0] == "the network pools over the whole image"
    assert field.multiple_px == 8  # tiles are still aligned to the windows


@pytest.mark.parametrize(
    ("layers", "obstacle"),
    [
        ((Windows(4, 8, 0), Placed()), "the result depends on the position in the image"),
        ((Everywhere(),), "the result depends on pixels more than 512 pixels away"),
    ],
)
def test_results_that_tiles_cannot_reproduce_are_reported(layers: tuple[nn.Module, ...], obstacle: str) -> None:
    recipe = recipe_with(*layers)
    assert measured_field(recipe, 3, field_of(recipe)).obstacles == (obstacle,)
