"""With malicious run folders, no command executes code from them, follows links, hangs or exhausts the memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import HostileRun
from probes import changes, fingerprint, run_command, run_probe
from running import run_fork

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1500)]


def sample_runs(folder: Path, good_run: Path) -> list[HostileRun]:
    """Write run folders with a few basic attacks: links to outside files, a recipe that writes a file, huge numbers."""
    victim = folder / "victim.txt"
    victim.write_text("before\n")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(good_run, folder / name))

    for name in ("metrics.jsonl", "status.json", ".lock", "config.toml", "protocols.json"):
        linked = copy(f"linked-{name}") / name
        linked.unlink(missing_ok=True)
        os.symlink(victim, linked)
    deep = copy("deep-config") / "config.toml"
    deep.write_text("recipe = " + "[" * 100_000)
    status = copy("odd-status") / "status.json"
    status.write_text(json.dumps({"state": ["finished"], "since": "1e999", "total_images": 10**400}))
    metrics = copy("odd-metrics") / "metrics.jsonl"
    metrics.write_text('{"images": 1e999}\n[]\nnull\n{"images": "x", "validation/top1": {}}\n' + "[" * 100_000 + "\n")
    checkpoint = copy("pipe") / "checkpoints" / "000000999999"
    checkpoint.mkdir()
    os.mkfifo(checkpoint / "manifest.json")
    code = copy("code") / "config.toml"
    own = folder / "code" / "recipe.py"
    own.write_text(f"open({str(victim)!r}, 'w').write('executed')\n")
    lines = code.read_text().splitlines()
    code.write_text("\n".join([f"recipe = {json.dumps(str(own))}", *lines[1:]]))
    return [HostileRun(path.name, path, [victim]) for path in sorted(folder.iterdir()) if path.is_dir()]


def listed_runs(folder: Path, good_run: Path) -> list[HostileRun]:
    """Write all malicious run folders, including those with basic attacks."""
    (folder / "own").mkdir()
    own = sample_runs(folder / "own", good_run)
    try:
        from hostile_runs import write_hostile_runs
    except ImportError:
        return own
    (folder / "listed").mkdir()
    return [*own, *write_hostile_runs(folder / "listed", good_run)]


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
    (tmp_path / "runs").mkdir()
    for run in listed_runs(tmp_path / "runs", good_run):
        before = fingerprint(run.victims)
        work = tmp_path / "work"
        work.mkdir()
        ended = run_probe(work, *PROBES[what](run.path, work / "out"))
        fault = changes(before, fingerprint(run.victims)) or ended.fault
        counted.add(run.name, fault)
        shutil.rmtree(work)
    counted.check()
