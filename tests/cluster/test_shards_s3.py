"""Training from shards on a real S3 server, which is killed and restarted. Every sample is seen once per epoch."""

from __future__ import annotations

import random
import shutil
import signal
import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest
import safetensors.numpy
from holds import Holds
from running import run_fork, start_fork, wait_until, weights_of
from s3_server import S3Server

from paceline.commands.pack import pack_to_shards

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")
BUCKET = "data"
EPOCH, KILLS = 1294, 10  # nine tenths of the 1,438 training digits
COMMAND = ("train", TINY, "--data", "shards", "--loader", "workers", "--workers", "2", "--set", "channels=1")
COMMAND = (*COMMAND, "--images", str(2 * EPOCH), "--set", "save_every=5 steps", "--set", "evaluate_every=40 steps")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, server: S3Server) -> Path:
    """Shards of digits in a local folder and, with the same names, in the bucket."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    assert pack_to_shards("digits", str(folder), {"workers": 0}, {}, 1) == 0
    upload(server, folder, "digits")
    return folder


def upload(server: S3Server, folder: Path, name: str) -> None:
    files = server.files()
    if not files.exists(BUCKET):  # type: ignore[attr-defined]
        files.mkdir(BUCKET)  # type: ignore[attr-defined]
    files.put(f"{folder}/", f"{BUCKET}/{name}/", recursive=True)  # type: ignore[attr-defined]


def seen(folder: Path, ranks: int = 1) -> list[int]:
    """Return the samples that were trained on, in order."""
    lines = [(folder / f"rank-{rank}-of-{ranks}").read_text().splitlines() for rank in range(ranks)]
    return [int(index) for row in zip(*lines, strict=True) for line in row for index in line.split()]


def tensors_of(run: Path) -> dict[str, bytes]:
    """Return the weights and the optimizer state, without the settings that the weights file also contains."""
    files = weights_of(run)
    weights = {name: array.tobytes() for name, array in safetensors.numpy.load(files["weights.safetensors"]).items()}
    return weights | {"state": files["state.safetensors"]}


def command(root: object, out: str, cache: Path, *more: str) -> tuple[str, ...]:
    return (*COMMAND, "--data-root", str(root), "--out", out, "--set", f"shard_cache={cache}", *more)


@pytest.mark.timeout(1800)
def test_runs_that_are_killed_see_every_sample_once_and_end_with_the_same_weights(
    tmp_path: Path, server: S3Server, shards: Path
) -> None:
    chance, url = random.Random(3), f"s3://{BUCKET}/digits"
    local = command(shards, "local", tmp_path / "cache-local", "--set", f"record={tmp_path / 'seen-local'}")
    assert run_fork(tmp_path, *local).wait() == 0
    expected, order = tensors_of(tmp_path / "local"), seen(tmp_path / "seen-local")
    assert sorted(order[:EPOCH]) == list(range(EPOCH)) == sorted(order[EPOCH : 2 * EPOCH])
    remote = command(url, "remote", tmp_path / "cache", "--set", "pause=0.01")
    for number in range(KILLS):
        running = start_fork(tmp_path, *remote, environment=server.environment)
        checkpoints = tmp_path / "remote" / "checkpoints"
        before = newest(checkpoints)
        wait_until(lambda before=before, checkpoints=checkpoints: newest(checkpoints) > before, running)
        time.sleep(0.2 * chance.random())
        running.kill(signal.SIGKILL)
        running.wait()
        if number % 3 == 2:
            shutil.rmtree(tmp_path / "cache" / "blocks" / next((tmp_path / "cache" / "blocks").iterdir()).name)
    assert run_fork(tmp_path, *remote, environment=server.environment).wait() == 0
    assert tensors_of(tmp_path / "remote") == expected


def newest(checkpoints: Path) -> int:
    return max((int(path.name) for path in checkpoints.glob("[0-9]*")), default=0) if checkpoints.exists() else 0


@pytest.mark.timeout(900)
def test_training_waits_for_a_server_that_is_killed_and_restarted(
    tmp_path: Path, server: S3Server, shards: Path
) -> None:
    url = f"s3://{BUCKET}/digits"
    # Without a cache, every batch is read from the server.
    holds = Holds(tmp_path / "holds")
    held = command(url, "remote", tmp_path / "cache", "--set", "shard_cache_gb=0", *holds.settings)
    assert run_fork(tmp_path, *command(shards, "local", tmp_path / "cache")).wait() == 0
    holds.hold("loss", after=12)
    running = start_fork(tmp_path, *held, environment=server.environment)
    wait_until(lambda: newest(tmp_path / "remote" / "checkpoints") >= 160, running)
    server.kill()
    holds.release("loss")
    wait_until(lambda: "; retrying" in running.stdout, running)
    server.start()
    assert running.wait(300) == 0, running.stderr
    assert "can be read again after" in running.stdout
    assert tensors_of(tmp_path / "remote") == tensors_of(tmp_path / "local")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cache_gb", [0, 1])
def test_a_shard_that_is_replaced_by_one_of_equal_size_ends_the_run_in_one_line(
    tmp_path: Path, server: S3Server, shards: Path, cache_gb: int
) -> None:
    name = f"replaced-{cache_gb}"
    shutil.copytree(shards, tmp_path / "shards")
    upload(server, tmp_path / "shards", name)
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=12)
    more = ("--set", f"shard_cache_gb={cache_gb}", "--set", "shuffle_block=8", *holds.settings)
    train = command(f"s3://{BUCKET}/{name}", "run", tmp_path / "cache", *more)
    running = start_fork(tmp_path, *train, environment=server.environment)
    wait_until(lambda: newest(tmp_path / "run" / "checkpoints") >= 160, running)
    file = tmp_path / "shards" / "train-000000.tar"
    exchange_labels(file)
    server.files().put(str(file), f"{BUCKET}/{name}/{file.name}")  # type: ignore[attr-defined]
    if cache_gb:  # otherwise, training continues with the cached version
        shutil.rmtree(tmp_path / "cache" / "blocks")
        (tmp_path / "cache" / "blocks").mkdir()
    holds.release("loss")
    for number in range(2):  # also if the same command is run again
        if number:
            running = run_fork(tmp_path, *train, environment=server.environment)
        assert running.wait() == 2 and len(running.stderr.splitlines()) == 1, running.stderr
        assert "does not match its checksum, so the shard was changed or damaged" in running.stderr


def exchange_labels(file: Path) -> None:
    """Add 1 to every class number in a shard of digits, in place."""
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as archive:
        for member in archive:
            if member.name.endswith(".cls"):
                content[member.offset_data] = ord("0") + (content[member.offset_data] - ord("0") + 1) % 10
    file.write_bytes(content)


@pytest.mark.timeout(900)
def test_two_processes_share_a_cold_cache_and_see_each_sample_once(
    tmp_path: Path, server: S3Server, shards: Path
) -> None:
    record, url = tmp_path / "seen", f"s3://{BUCKET}/digits"
    for size in (1, 2):
        more = ("--devices", str(size), "--set", f"record={record}", "--set", "shuffle_block=32", "--set", "pad_crop=0")
        running = run_fork(
            tmp_path, *command(url, f"on-{size}", tmp_path / f"cache-{size}", *more), environment=server.environment
        )
        assert running.wait() == 0 and not running.stderr, running.stderr
    assert seen(record, 2) == seen(record, 1)
    assert Counter(seen(record, 2)[:EPOCH]) == Counter(range(EPOCH))
    whole = sum(file.stat().st_size for file in shards.glob("*.tar"))
    stored = sum(file.stat().st_size for file in (tmp_path / "cache-2" / "blocks").rglob("*") if file.is_file())
    assert stored <= whole


def test_wrong_credentials_end_in_one_line(tmp_path: Path, server: S3Server, shards: Path) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        train = command(f"s3://{BUCKET}/digits", "run", tmp_path / "cache")
        running = run_fork(tmp_path, *train, environment=server.environment | {name: "wrong"})
        assert running.wait() == 2 and "access denied" in running.stderr, running.stderr
        assert len(running.stderr.splitlines()) == 1, running.stderr


@pytest.mark.timeout(900)
def test_a_bucket_that_disappears_ends_in_one_line_and_training_resumes_when_it_is_back(
    tmp_path: Path, server: S3Server, shards: Path
) -> None:
    upload(server, shards, "gone")
    url = f"s3://{BUCKET}/gone"
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=12)
    train = command(url, "run", tmp_path / "cache", "--set", "shard_cache_gb=0", *holds.settings)
    running = start_fork(tmp_path, *train, environment=server.environment)
    wait_until(lambda: newest(tmp_path / "run" / "checkpoints") >= 160, running)
    server.files().rm(url, recursive=True)  # type: ignore[attr-defined]
    holds.release("loss")
    assert running.wait(120) == 2 and len(running.stderr.splitlines()) == 1
    assert "not found" in running.stderr and "check that the bucket and the files exist" in running.stderr
    again = run_fork(tmp_path, *train, environment=server.environment)
    assert again.wait() == 2 and len(again.stderr.splitlines()) == 1, again.stderr
    upload(server, shards, "gone")
    assert run_fork(tmp_path, *train, environment=server.environment).wait() == 0
    assert run_fork(tmp_path, *command(shards, "local", tmp_path / "cache")).wait() == 0
    assert tensors_of(tmp_path / "run") == tensors_of(tmp_path / "local")
