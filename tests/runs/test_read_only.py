"""A run folder that cannot be written to is reported in one line."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from running import run_fork, start_function_in_ranks

VERSION, OVERRIDES = 0x20080522, 0b110  # from <linux/capability.h>: version 3, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
IMPOSSIBLE = 77


def run_without_overrides(words: tuple[str, ...]) -> int:
    """Run a command that cannot ignore file permissions, even as root."""
    from paceline.cli.app import run

    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(VERSION, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    sets[0] &= ~OVERRIDES
    libc.capset(header, sets)
    return IMPOSSIBLE if os.access("closed", os.W_OK, effective_ids=True) else run(list(words))


def one_line(folder: Path, *words: str) -> str:
    running = start_function_in_ranks(folder, 1, run_without_overrides, words)[0]
    if running.wait() == IMPOSSIBLE:
        pytest.skip("this process can write to any folder")
    assert running.wait() == 2 and len(running.stderr.splitlines()) == 1, running.stderr
    return running.stderr


def test_a_run_folder_that_cannot_be_written_to_is_reported_in_one_line(tmp_path: Path, tiny: str) -> None:
    folder = tmp_path
    assert run_fork(folder, "train", tiny, "--images", "32", "--out", "run").wait() == 0
    longer = ("train", tiny, "--images", "64", "--out")
    (folder / "closed").mkdir(mode=0o555)
    (folder / "empty").mkdir(mode=0o555)
    for path in [folder / "run", *(folder / "run").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        for out in ("run", "empty", "closed/run", "closed/a/b"):
            line = one_line(folder, *longer, out)
            assert "Permission denied" in line and out.partition("/")[0] in line
        (folder / "run").chmod(0o777)  # only the folders inside the run are read-only
        (folder / "run" / ".lock").chmod(0o666)
        assert "Permission denied" in one_line(folder, *longer, "run")
    finally:
        for path in [folder / "run", *(folder / "run").rglob("*")]:
            path.chmod(0o755)
