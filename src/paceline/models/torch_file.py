"""Files that torch wrote, from elsewhere: nothing in them is executed, and what cannot be used is said in one line."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import UserError

BEGINNINGS = (b"PK\x03\x04", b"\x80")  # an archive, and the pickle that torch wrote before


def read_torch_file(path: Path, named: str) -> Any:
    """What a file holds, on the CPU; `named` is how a person named it, for errors."""
    try:
        with path.open("rb") as file:
            beginning = file.read(4)
        if not beginning:
            raise UserError(f"{named}: is empty")
        if not beginning.startswith(BEGINNINGS):
            raise UserError(f"{named}: was not written by torch.save")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd files, which are refused here in one line
            return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError:
        raise UserError(f"{named}: holds more than tensors, and is not read: save its state_dict alone") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{named}: cannot be read, perhaps it is cut off ({reason})") from None
