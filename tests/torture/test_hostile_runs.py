"""With malicious run folders, no command executes code from them, follows links, hangs or exhausts the memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_runs import CANARY, write_hostile_runs
from probes import changes, fingerprint, run_command, run_probe
from running import run_fork

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    trained = run_fork(folder, *RESUME, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    return folder / "run"


RESUME = ("train", "classification", "--data", "digits", "--images", "64", "--batch-size", "32", "--set", "width=8")
RESUME += ("--set", "size=8", "--set", "pad_crop=0", "--accelerator", "cpu")


def load(run: str) -> int:
    """Load a run from Python, as a user's program does."""
    import paceline

    try:
        paceline.load(run)
    except paceline.UserError as error:
        print(error)
    return 0


def show_on_board(run: str) -> int:
    """Read everything that the board shows about a run."""
    from paceline.board.files import open_files
    from paceline.board.gallery import Gallery

    gallery = Gallery(open_files(run))
    for _ in range(3):
        gallery.refresh()
        json.dumps(gallery.summaries().runs, default=str)
    return 0


PROBES: dict[str, Callable[[Path, Path], tuple[Any, ...]]] = {
    "load": lambda run, out: (load, str(run)),
    "evaluate": lambda run, out: (run_command, ["evaluate", str(run), "--accelerator", "cpu"]),
    "resume": lambda run, out: (run_command, [*RESUME, "--images", "96", "--out", str(run)]),
    "compare": lambda run, out: (run_command, ["compare", str(run), "--out", str(out)]),
    "board": lambda run, out: (show_on_board, str(run)),
}


@pytest.mark.parametrize("what", PROBES)
def test_malicious_run_folders_do_no_harm(good_run: Path, tmp_path: Path, tally: Any, what: str) -> None:
    counted = tally(f"hostile runs: {what}")
    for run in write_hostile_runs(tmp_path / "runs", good_run):
        before = fingerprint(run.victims)
        work = tmp_path / "work"
        work.mkdir()
        ended = run_probe(work, *PROBES[what](run.path, work / "out"))
        fault = changes(before, fingerprint(run.victims)) or ended.fault
        counted.add(run.name, fault or ("executed code" if (tmp_path / "runs" / CANARY).exists() else ""))
        shutil.rmtree(work)
    counted.check()
