"""One process, one device."""

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import World


class Single(Strategy):
    """The recipe on one device, without a wrapper."""

    max_devices = 1

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        if settings.devices > 1:
            raise UserError(f"--strategy single: uses one device, not {settings.devices}; use ddp, or --devices 1")
        super().__init__(settings, world, precision, recipe)
