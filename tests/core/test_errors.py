"""Errors that are caused by limits of the system are described in one line."""

from __future__ import annotations

import errno

import pytest

from paceline.core.errors import describe_limit


def fail_in(module: str, error: Exception) -> Exception:
    """Return an error that was raised in a function of this module."""
    namespace = {"__name__": module, "error": error}
    exec("def start():\n    raise error", namespace)
    try:
        namespace["start"]()  # type: ignore[operator]
    except Exception as raised:
        return raised
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EMFILE, "limit"), "ulimit -n"),
        (OSError(errno.ENOMEM, "limit"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (ImportError("libtorch.so: cannot be loaded"), "ulimit -v"),
        (BlockingIOError(errno.EAGAIN, "fork"), "ulimit -u"),
        (fail_in("threading", RuntimeError("no thread")), "ulimit -u"),
        (OSError(errno.ENAMETOOLONG, "limit", "x" * 300), "use a shorter one"),
        (
            OSError(errno.ENOSPC, "No space left", "a.png"),
            "a.png: No space left: check the permissions",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied: check the permissions"),
    ],
)
def test_an_error_caused_by_a_limit_is_described_with_a_remedy(error: Exception, remedy: str) -> None:
    assert remedy in describe_limit(error) and "\n" not in describe_limit(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("other"), fail_in("other", RuntimeError("other")), OSError(errno.ENOENT, "other")]
)
def test_other_errors_are_not_described_as_limits(error: Exception) -> None:
    assert not describe_limit(error)
