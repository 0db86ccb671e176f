"""Mirroring runs to a real S3 server. Killing the server during uploads loses no published snapshot."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from holds import Holds
from running import Running, metrics_without_times, run_fork, start_fork, wait_until, weights_of
from s3_server import BUCKET, S3Server

from paceline.board.files import open_files
from paceline.board.gallery import Gallery
from paceline.board.run import tail
from paceline.core.files import checksum_of_file
from paceline.runs.published import Destination, list_manifests, read_manifest
from paceline.runs.status import MirrorState, Status
from paceline.training.stop import MIRROR_INCOMPLETE

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")
QUICK = ("--set", "mirror_every=0.2", "--set", "pause=0.05")


def whole_snapshots(destination: Destination, scratch: Path) -> list[int]:
    """Return the image counts of all published snapshots, and check that their files are complete and intact."""
    found = []
    for name in list_manifests(destination):
        manifest = read_manifest(destination, name)
        for piece in manifest.files.values():
            destination.fetch(piece.object, scratch)
            assert checksum_of_file(scratch) == piece.sha256, f"{piece.object} of {name}"
        found.append(manifest.images)
    return found


def is_uploading(run: Path) -> bool:
    return (run / ".mirror" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mirrored_runs_lose_nothing_when_the_server_is_killed_during_uploads(tmp_path: Path, server: S3Server) -> None:
    chance, tally = random.Random(5), Counter[str]()
    command = ("train", TINY, *QUICK, "--images", "640", "--set", "width=256", "--set", "save_every=2 steps")
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    expected = weights_of(tmp_path / "whole")
    for number in range(10):
        run, url = tmp_path / f"run-{number}", f"s3://{BUCKET}/kills/{number}"
        destination = Destination(url, "--mirror")
        running = start_fork(tmp_path, *command, "--out", run.name, "--mirror", url, environment=server.environment)
        at = chance.choice([32, 64, 96, 160])
        wait_until(lambda run=run, at=at: mirrored(run) >= at, running)
        wait_until(lambda run=run: is_uploading(run), running)
        time.sleep(0.1 * chance.random())
        server.kill()
        tally["in an upload"] += is_uploading(run)
        running.kill(signal.SIGSTOP)  # pause the run while the uploaded files are checked
        server.start()
        left = whole_snapshots(destination, tmp_path / "scratch")
        assert left and max(left) >= at
        running.kill(signal.SIGCONT)
        assert running.wait() == 0 and f"mirror: {url} is complete" in running.stdout, running.stdout
        assert max(whole_snapshots(destination, tmp_path / "scratch")) == 640
        back = run_fork(
            tmp_path, *command, "--out", f"back-{number}", "--resume-from", url, environment=server.environment
        )
        assert back.wait() == 0 and "finished at 640 images" in back.stdout
        same = weights_of(run) == expected == weights_of(tmp_path / f"back-{number}")
        tally["lost nothing"] += same
        print(f"killed after {at}+ images were up, {left} whole: {'the same bits' if same else 'OTHER BITS'}")
    print(dict(tally))
    assert tally["lost nothing"] == 10 and tally["in an upload"] >= 5


def mirrored(run: Path) -> int:
    """Return the image count of the last snapshot that a run reports as mirrored."""
    try:
        state = MirrorState.parse((run / "mirror.json").read_bytes())
    except FileNotFoundError:
        return 0
    return state.images if state else 0


def test_a_run_resumes_from_the_mirror_alone_on_an_empty_disk(tmp_path: Path, server: S3Server) -> None:
    holds, url = Holds(tmp_path / "holds"), f"s3://{BUCKET}/moved"
    command = ("train", TINY, "--set", "mirror_every=0.2", "--set", "dropout=0.2", *holds.settings)
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    holds.hold("loss", after=17)
    both = (*command, "--mirror", url, "--resume-from", url)
    first: Running = start_fork(tmp_path, *both, "--out", "run", environment=server.environment)
    wait_until(lambda: mirrored(tmp_path / "run") >= 160, first)
    first.kill()
    first.wait()
    holds.release("loss")
    shutil.rmtree(tmp_path / "run")
    again = run_fork(tmp_path, *both, "--out", "elsewhere", environment=server.environment)
    assert again.wait() == 0 and "restored the run at" in again.stdout, again.stderr
    assert weights_of(tmp_path / "elsewhere") == weights_of(tmp_path / "whole")
    assert metrics_without_times(tmp_path / "elsewhere") == metrics_without_times(tmp_path / "whole")
    assert 480 in whole_snapshots(Destination(url, "--mirror"), tmp_path / "scratch")


def test_a_wrong_key_is_reported_in_the_log_and_run_folder_and_training_continues(
    tmp_path: Path, server: S3Server
) -> None:
    wrong = server.environment | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=9)  # the run does not end before its mirror has failed for the first time
    mirror = ("--mirror", f"s3://{BUCKET}/wrong", "--set", "mirror_wait=2")
    running = start_fork(tmp_path, "train", TINY, *QUICK, "--out", "run", *mirror, *holds.settings, environment=wrong)
    wait_until(lambda: "mirror: upload" in running.stdout, running)
    holds.release("loss")
    assert running.wait() == MIRROR_INCOMPLETE, running.stderr
    printed = [line for line in running.stdout.splitlines() if line.startswith("mirror:")]
    assert len(printed) == 2 and "failed" in printed[0] and "is missing" in printed[1]
    state = MirrorState.parse((tmp_path / "run" / "mirror.json").read_bytes())
    assert state and state.images == 0 and state.error
    rejected = run_fork(
        tmp_path, "train", TINY, "--out", "other", "--resume-from", f"s3://{BUCKET}/wrong", environment=wrong
    )
    assert rejected.wait() == 2 and "cannot be read" in rejected.stderr and len(rejected.stderr.splitlines()) == 1


def test_the_board_shows_a_mirrored_run(tmp_path: Path, server: S3Server) -> None:
    url = f"s3://{BUCKET}/shown/a run with 'quotes' $(and) more"
    command = ("train", TINY, *QUICK, "--out", "run", "--mirror", url)
    assert run_fork(tmp_path, *command, environment=server.environment).wait() == 0
    gallery = Gallery(open_files(f"s3://{BUCKET}/shown"))
    gallery.refresh()
    (run,) = gallery.summaries().runs
    assert run["name"] == "a run with 'quotes' $(and) more" and run["state"] == "finished" and run["images"] == 480
    assert run["lines"] == len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert Status.parse((tmp_path / "run" / "status.json").read_bytes()).since == run["since"]  # type: ignore[union-attr]
    text = tail(gallery.files, gallery.runs[run["id"]].logs()[0])
    assert "resuming from" not in text and "480 images" in text
