"""One process, one device."""

from paceline.errors import UserError
from paceline.parallel.strategy import Strategy
from paceline.recipe import Recipe


class Single(Strategy):
    """The recipe as it is."""

    def place(self, recipe: Recipe) -> None:
        if self.settings.devices > 1:
            raise UserError(f"--strategy single: uses one device, not {self.settings.devices}; use ddp, or --devices 1")
        super().place(recipe)
