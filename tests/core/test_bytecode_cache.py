"""If Python cannot keep the bytecode of torch beside its source code, it is kept in the user's cache."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.startup import PREFIX, SAMPLES, WRITES_NONE

IMPORTS = "from paceline.core.startup import keep_bytecode; keep_bytecode(); import torch._dynamo"
PRINTS = "import os, sys; print(sys.pycache_prefix, os.environ.get('PYTHONPYCACHEPREFIX'))"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with a small package that is named torch."""
    for sample in SAMPLES:
        (tmp_path / "site" / "torch" / sample).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / "torch" / sample).write_text("value = 1\n")
    (tmp_path / "site" / "torch" / "_dynamo" / "__init__.py").touch()
    return tmp_path / "site"


def prefix_of(site: Path, **variables: str) -> str:
    """Import the package in a new process; return its folder for bytecode, which child processes must share."""
    source = str(Path(__file__).parents[2] / "src")
    environment = {name: value for name, value in os.environ.items() if name not in (PREFIX, WRITES_NONE)}
    environment |= {"PYTHONPATH": f"{site}{os.pathsep}{source}", "XDG_CACHE_HOME": str(site.parent / "cache")}
    command = [sys.executable, "-c", f"{IMPORTS}; {PRINTS}"]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    own, of_children = done.stdout.split()
    assert own == of_children
    return own


def test_bytecode_that_python_must_not_write_beside_the_source_is_kept_in_the_cache(site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "paceline" / "bytecode"
    assert prefix_of(site, **{WRITES_NONE: "1"}) == str(folder)
    assert list(folder.rglob("torch/__init__.*.pyc"))
    assert not list(site.rglob("*.pyc"))
    assert folder.stat().st_mode & 0o077 == 0, "other users must not add code"


def test_an_ordinary_installation_keeps_its_bytecode_where_it_is(site: Path) -> None:
    assert prefix_of(site) == "None"
    assert list(site.rglob("*.pyc"))


def test_only_valid_bytecode_counts(site: Path, tmp_path: Path) -> None:
    compileall.compile_dir(site, quiet=1)
    assert prefix_of(site, **{WRITES_NONE: "1"}) == "None"
    (site / "torch" / SAMPLES[1]).write_text("value = 22\n")
    assert prefix_of(site, **{WRITES_NONE: "1"}) == str(tmp_path / "cache" / "paceline" / "bytecode")


def test_the_users_own_folder_is_kept_and_a_cache_that_cannot_be_written_changes_nothing(
    site: Path, tmp_path: Path
) -> None:
    assert prefix_of(site, **{WRITES_NONE: "1", PREFIX: str(tmp_path / "mine")}) == str(tmp_path / "mine")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert prefix_of(site, **{WRITES_NONE: "1"}) == "None"


def test_a_folder_of_another_user_is_not_trusted(site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "paceline" / "bytecode"
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(folder, 12345, 12345)
    assert prefix_of(site, **{WRITES_NONE: "1"}) == "None"
