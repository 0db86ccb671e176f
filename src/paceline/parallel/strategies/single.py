"""One process, one device."""

from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.parallel.strategy import Strategy


class Single(Strategy):
    """The recipe as it is."""

    max_devices = 1

    def place(self, recipe: Recipe) -> None:
        if self.settings.devices > 1:
            raise UserError(f"--strategy single: uses one device, not {self.settings.devices}; use ddp, or --devices 1")
        super().place(recipe)
