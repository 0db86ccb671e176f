"""Whether sources accept test images that are too large to be decoded as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ACCEPTED = ContextVar("huge test images are accepted", default=False)


@contextmanager
def accepting_huge_images() -> Iterator[None]:
    """Sources that are opened in this context accept huge test images, since the caller reads them by region."""
    before = _ACCEPTED.set(True)
    try:
        yield
    finally:
        _ACCEPTED.reset(before)


def huge_images_are_accepted() -> bool:
    """Return whether the code runs inside `accepting_huge_images`."""
    return _ACCEPTED.get()
