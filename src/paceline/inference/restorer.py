"""What a run learned, or a weights file holds, ready to be applied to pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paceline.inference.receptive_field import ReceptiveField, receptive_field
from paceline.inference.trained import Stored, Trained, build, check_use, fill, read_stored


@dataclass(frozen=True)
class Restorer(Trained):
    """A recipe that makes pictures of pictures, and how far its networks see."""

    @property
    def enlarges(self) -> int:
        """How many times as high and wide the results are."""
        return self.recipe.enlarges

    @property
    def results(self) -> tuple[str, ...]:
        """The names of what is made of one picture."""
        return self.field.results

    @cached_property
    def field(self) -> ReceptiveField:
        """What tiles must keep to."""
        return receptive_field(self.recipe.restore, self.facts.channels, self.enlarges)


def open_restorer(path: str, checkpoint: str = "best") -> Restorer:
    """Opens a run's folder or a weights file; a network that takes part without weights is an error."""
    stored = read_stored(path, checkpoint)
    check_use(stored, "apply", path)
    return make_restorer(stored, path)


def make_restorer(stored: Stored, path: str) -> Restorer:
    """What was stored, ready to be applied; networks that take no part may have no weights."""
    restorer = Restorer(build(stored.config, stored.facts), stored.config, stored.facts, stored.origin)
    own = restorer.recipe.state_dict(keep_vars=True)
    needed = [key for key, value in own.items() if id(value) in restorer.field.used]
    fill(restorer.recipe, stored.weights, path, needed)
    return restorer
