"""Errors that are caused by limits of the system are described in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.core.errors import UserError, describe_limit
from paceline.core.files import write_file, write_json


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
    "error",
    [
        *(OSError(number, "limit") for number in (errno.EMFILE, errno.ENOMEM, errno.EAGAIN)),
        MemoryError(),
        ImportError("libtorch.so: cannot be loaded"),
        fail_in("threading", RuntimeError("no thread")),
    ],
)
def test_an_error_caused_by_a_limit_is_described_with_a_remedy(error: Exception) -> None:
    assert "ulimit -n" in describe_limit(error) and "\n" not in describe_limit(error)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENAMETOOLONG, "limit", "x" * 300), "use a shorter one"),
        (OSError(errno.ENOSPC, "full", "a.png"), "a.png: full: check the permissions"),
        (PermissionError(errno.EACCES, "denied"), "denied: check the permissions"),
        (RuntimeError("other"), ""),
        (fail_in("other", RuntimeError("other")), ""),
        (OSError(errno.ENOENT, "other"), ""),
    ],
)
def test_a_failed_disk_and_a_long_path_are_described_with_a_remedy(error: Exception, line: str) -> None:
    assert line in describe_limit(error) and bool(line) == bool(describe_limit(error))


def test_a_folder_in_place_of_a_file_is_described_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    for write in (write_file, write_json):
        with pytest.raises(OSError) as caught:
            write(tmp_path / "status.json", "")
        line = describe_limit(caught.value)
        assert line.startswith(f"{tmp_path / 'status.json'}: ") and line.endswith("check what is at this path")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    write_file(tmp_path / "file", "content")
    assert (tmp_path / "file").read_text() == "content"


def test_a_command_in_a_folder_that_was_removed_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert run(["settings"]) == 2
    assert "the working directory was removed" in capsys.readouterr().err


def test_a_message_that_quotes_a_damaged_file_is_shortened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise UserError(f"{'9' * 50_000}: repair the file")

    monkeypatch.setattr("paceline.commands.configure.resolve_config", fail)
    assert run(["train", "classification"]) == 2
    line = capsys.readouterr().err
    assert len(line) < 4000 and line.endswith(": repair the file\n")
