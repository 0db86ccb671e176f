"""Remote shards: ranges, the cache, prefetching, and servers that fail. tests/cluster tests a real S3 server."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from file_server import FileServer
from made_data import encode_png, random_images, raw_batches, write_tar
from running import wait_until

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.storage import files, reader
from paceline.core.storage.files import Span, Storage
from paceline.core.storage.reader import Block, BlockCache
from paceline.data.loaders.workers import Workers
from paceline.data.source import ArraySource, Sample, Subset
from paceline.data.sources.shards import Shards
from paceline.data.stream import Stream, in_order

pytest.importorskip("aiohttp")
IMAGES = random_images(40, 60, 60, 3)  # incompressible: about 11 kB each


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 2**15)
    monkeypatch.setattr(files, "OPENING_SECONDS", 1.0)
    monkeypatch.setattr(files, "GONE_SECONDS", 0.5)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FileServer]:
    for split, rows in (("train", range(30)), ("test", range(30, 40))):
        members = {}
        for n in rows:
            members |= {f"{n:03d}.png": encode_png(IMAGES[n]), f"{n:03d}.cls": b"%d" % (n % 4)}
        write_tar(tmp_path / "served" / f"{split}-0.tar", members)
    server = FileServer(tmp_path / "served")
    yield server
    server.stop()


def open_shards(url: str, cache: Path, split: str = "train", **settings: object) -> Shards:
    chosen = {"shard_cache": str(cache), "shard_cache_gb": 0.01, "workers": 0, **settings}
    return Shards(split, Shards.Settings(data="shards", data_root=url, **chosen))  # type: ignore[arg-type]


def stored_bytes(cache: Path) -> int:
    return sum(file.stat().st_size for file in (cache / "blocks").rglob("*") if file.is_file())


def stored_blocks(cache: Path) -> set[str]:
    return {str(file.relative_to(cache)) for file in (cache / "blocks").rglob("*") if file.is_file()}


def test_batches_are_read_with_few_requests_and_a_warm_cache_without_the_server(
    served: FileServer, tmp_path: Path
) -> None:
    source = open_shards(served.url, tmp_path / "cache")
    assert len(source) == 30 and np.array_equal(source.read(7)["image"], IMAGES[7])
    ranges = served.ranges("train-0.tar")
    assert len(ranges) < 5 and "-" not in ranges[1:], "the scan reads large ranges"
    served.requests.clear()
    again = open_shards(served.url, tmp_path / "cache")
    assert np.array_equal(again.read_many(np.arange(30))["image"], IMAGES[:30])
    assert [one for one in served.ranges("train-0.tar") if one != "-"] == []
    shutil.copytree(tmp_path / "cache" / "index", tmp_path / "second" / "index")
    source = open_shards(served.url, tmp_path / "second")  # reads the first sample
    for rows, num_requests in ((np.arange(10, 20), 1), (np.array([29, 5]), 2)):  # adjacent blocks are read together
        served.requests.clear()
        source.read_many(rows)
        assert len(served.ranges("train-0.tar")) == num_requests


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_prefetched_and_equal_the_images(served: FileServer, tmp_path: Path, workers: int) -> None:
    source = Subset(open_shards(served.url, tmp_path / "cache", shuffle_block=5, shuffle_mixed=2), np.arange(28))
    stream = Stream(0, len(source), source.shuffle)
    loader = Workers(source, torch.device("cpu"), Shards.Settings(workers=workers))
    requests = [stream.take(start, start + 7) for start in range(0, 56, 7)]
    for request, batch in zip(requests, raw_batches(loader, requests), strict=True):
        assert np.array_equal(batch["image"].permute(0, 2, 3, 1).numpy(), IMAGES[request.index])
        assert np.array_equal(batch["label"].numpy(), request.index % 4)
    loader.close()


def test_prefetching_downloads_in_the_background(served: FileServer, tmp_path: Path) -> None:
    open_shards(served.url, tmp_path / "first")
    for name in ("second", "third"):
        shutil.copytree(tmp_path / "first" / "index", tmp_path / name / "index")
    source = open_shards(served.url, tmp_path / "second")
    open_shards(served.url, tmp_path / "third").read_many(np.arange(3, 6))
    wanted = stored_blocks(tmp_path / "third")
    assert not wanted <= stored_blocks(tmp_path / "second")
    source.prefetch(np.arange(3, 6))
    wait_until(lambda: wanted <= stored_blocks(tmp_path / "second"))
    served.stop()
    assert np.array_equal(source.read(4)["image"], IMAGES[4])


class Announced(ArraySource):
    """A source that records what it is asked to prefetch, and what is read."""

    lookahead = 2

    def __init__(self) -> None:
        super().__init__({"image": IMAGES, "label": np.arange(40)}, DataSpec(3, 60, 60, num_classes=40))
        self.events: list[tuple[str, list[int]]] = []

    def prefetch(self, indices: np.ndarray) -> None:
        self.events.append(("prefetch", indices.tolist()))

    def read_many(self, indices: np.ndarray) -> Sample:
        self.events.append(("read", indices.tolist()))
        return super().read_many(indices)


def test_every_batch_is_announced_once_two_batches_before_it_is_read() -> None:
    source = Announced()
    loader = Workers(Subset(source, np.arange(39, -1, -1)), torch.device("cpu"), Shards.Settings(workers=0))
    requests = [in_order(start, start + 8) for start in range(0, 40, 8)]
    assert len(list(raw_batches(loader, requests))) == 5
    batches = [list(range(39 - start, 31 - start, -1)) for start in range(0, 40, 8)]
    kinds = "PPPRPRPRRR"
    numbers = iter([0, 1, 2, 0, 3, 1, 4, 2, 3, 4])
    assert source.events == [("prefetch" if kind == "P" else "read", batches[next(numbers)]) for kind in kinds]


def test_the_cache_stays_within_its_limit_and_removes_the_oldest_blocks(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 1000)
    for number in range(30):
        cache.write(Block("a", number), bytes([number]) * 100)
        cache.read(Block("a", 0), 0, 1)  # used again and again
        os.utime(tmp_path / "blocks" / "a" / "0", ns=(10**18 + number * 10**9,) * 2)
        os.utime(tmp_path / "blocks" / "a" / str(number), ns=(10**18 + number * 10**9,) * 2)
        assert stored_bytes(tmp_path) <= 1000
    assert cache.has(Block("a", 0)) and cache.has(Block("a", 29)) and not cache.has(Block("a", 5))
    assert cache.read(Block("a", 29), 10, 12) == b"\x1d\x1d" and cache.read(Block("a", 29), 90, 110) is None
    cache.write(Block("a", 99), bytes(2000))
    assert not cache.has(Block("a", 99)), "a block larger than the limit is not stored"


def _fill(folder: Path, process: int) -> None:
    cache = BlockCache(folder, 20_000)
    for number in range(10**6):
        cache.write(Block(f"p{process}", number), bytes(1000))


@pytest.mark.slow
def test_processes_share_a_cache_whose_limit_survives_kills(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    BlockCache(tmp_path, 20_000)
    for _ in range(3):
        processes = [fork.Process(target=_fill, args=(tmp_path, n), daemon=True) for n in range(3)]
        for process in processes:
            process.start()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            with stopped([process.pid or 0 for process in processes]):
                assert stored_bytes(tmp_path) <= 20_000
        for process in processes:
            process.kill()
            process.join()
    cache = BlockCache(tmp_path, 20_000)
    for number in range(30):
        cache.write(Block("after", number), bytes(1000))
    assert cache.has(Block("after", 29)) and stored_bytes(tmp_path) <= 20_000


@contextmanager
def stopped(processes: list[int]) -> Iterator[None]:
    """Stop child processes while their files are examined, which takes long on a busy machine."""
    for process in processes:
        os.kill(process, signal.SIGSTOP)
        os.waitpid(process, os.WUNTRACED)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


def test_damaged_blocks_in_the_cache_are_downloaded_again(served: FileServer, tmp_path: Path) -> None:
    source = open_shards(served.url, tmp_path / "cache")
    for opened in (source, None):  # a source that is open, and one whose index is made from the damaged blocks
        for number, name in enumerate(sorted(stored_blocks(tmp_path / "cache"))):  # as after a power failure
            file = tmp_path / "cache" / name
            file.write_bytes(b"" if opened and number % 3 == 0 else bytes(file.stat().st_size))
        if opened is None:
            shutil.rmtree(tmp_path / "cache" / "index")
            opened = open_shards(served.url, tmp_path / "cache")
        assert np.array_equal(opened.read_many(np.arange(30))["image"], IMAGES[:30])


def test_a_full_disk_disables_the_cache_with_one_line(
    served: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reader, "replacing", fail)
    source = open_shards(served.url, tmp_path / "cache")
    assert np.array_equal(source.read_many(np.arange(30))["image"], IMAGES[:30])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("No space left on device; data is not cached; free up space")


def test_the_cache_leaves_space_on_the_disk_free(
    served: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MIN_FREE_BYTES", 2**60)
    source = open_shards(served.url, tmp_path / "cache")
    assert np.array_equal(source.read(3)["image"], IMAGES[3]) and stored_bytes(tmp_path / "cache") == 0


def test_images_are_read_without_a_cache_if_the_server_supports_ranges(served: FileServer, tmp_path: Path) -> None:
    served.compresses = True
    source = open_shards(served.url, tmp_path / "cache", shard_cache_gb=0)
    assert np.array_equal(source.read_many(np.arange(30))["image"], IMAGES[:30])
    assert not (tmp_path / "cache" / "blocks").exists()
    served.requests.clear()
    batch = source.read_many(np.array([25, 3, 14]))  # labels are read together with the images
    assert batch["label"].tolist() == [1, 3, 2] and len(served.ranges("train-0.tar")) == 3
    served.ranges_supported = False
    with pytest.raises(UserError, match=r"train-0\.tar: the server sent .* bytes instead of .*range requests"):
        source.read(0)


def test_a_huge_manifest_is_not_downloaded(served: FileServer, tmp_path: Path) -> None:
    served.extra_bytes = 2**28
    with pytest.raises(UserError, match=r"shards\.json has more than 16,777,216 bytes"):
        open_shards(served.url, tmp_path / "cache")
    assert served.sent_bytes < 2**27


def test_blocks_of_another_user_and_unreadable_blocks_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    cache = BlockCache(tmp_path, 1000)
    cache.write(Block("a", 0), b"abc")
    (tmp_path / "blocks" / "a" / "1").mkdir()  # opening succeeds, but reading fails
    (tmp_path / "blocks" / "stray").write_bytes(b"")
    monkeypatch.setattr(os, "utime", fail)
    assert cache.read(Block("a", 0), 0, 3) == b"abc" and cache.read(Block("a", 1), 0, 3) is None
    (tmp_path / "blocks" / "a" / "1").rmdir()
    (tmp_path / "usage").unlink()
    cache.write(Block("a", 2), bytes(900))
    assert cache.has(Block("a", 2))


def test_scattered_reads_hold_few_blocks_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Recorded(reader.Reader):
        def _pieces(self, cache: BlockCache, span: Span, found: dict[Block, bytes]) -> Iterator[bytes]:
            held.append(sum(map(len, found.values())))
            return super()._pieces(cache, span, found)

    monkeypatch.setattr(reader, "BLOCK_BYTES", 2**10)
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 2**13)
    content = random_images(2**17).tobytes()
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "x.tar").write_bytes(content)
    server = FileServer(tmp_path / "served")
    storage = Storage(server.url, "x")
    files = storage.describe_files(["x.tar"])
    source = Recorded(storage, files, BlockCache(tmp_path / "cache", 10**6), 5.0)
    starts = list(range(0, 2**17, 2**11))
    read = source.read([Span(files[0].place, start, start + 10) for start in starts])
    server.stop()
    assert read == [content[start : start + 10] for start in starts]
    assert len(held) == len(starts) and max(held) <= 2**13


def test_reading_waits_for_a_server_that_restarts(served: FileServer, tmp_path: Path) -> None:
    source = open_shards(served.url, tmp_path / "cache", shard_cache_gb=0)
    served.requests.clear()
    served.fails = True
    pid = os.fork()
    if pid == 0:  # a worker process
        equal = np.array_equal(source.read(5)["image"], IMAGES[5])
        os._exit(0 if equal else 1)
    wait_until(lambda: served.requests)
    served.fails = False
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("fault", ["fails", "is_silent"])
def test_a_server_that_stops_to_answer_ends_in_one_line(
    fault: str, served: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ANSWER_SECONDS", 1.0)
    source = open_shards(served.url, tmp_path / "cache", shard_cache_gb=0, shard_wait=0.5)
    setattr(served, fault, True)
    with pytest.raises(UserError, match=r"train-0\.tar: cannot be read .*check the URL and the server"):
        source.read(0)


@pytest.mark.parametrize("cache_gb", [0, 0.01])
def test_a_shard_that_is_replaced_on_the_server_during_a_run_is_found(
    cache_gb: float, served: FileServer, tmp_path: Path
) -> None:
    source = open_shards(served.url, tmp_path / "cache", shard_cache_gb=cache_gb)
    if cache_gb:
        shutil.rmtree(tmp_path / "cache" / "blocks")
        (tmp_path / "cache" / "blocks").mkdir()
    members = {}
    for n in range(30):
        members |= {f"{n:03d}.png": encode_png(IMAGES[n]), f"{n:03d}.cls": b"%d" % ((n + 1) % 4)}
    write_tar(tmp_path / "served" / "train-0.tar", members)
    with pytest.raises(UserError, match=r"train-0\.tar/007: does not match its checksum"):
        source.read(7)


@pytest.mark.parametrize("manner", ["refuses connections", "fails"])
def test_a_server_that_does_not_answer_at_the_start_ends_in_one_line(
    manner: str, served: FileServer, tmp_path: Path
) -> None:
    served.fails = True
    if manner == "refuses connections":
        served.stop()
    with pytest.raises(UserError, match=r"--data-root http.*: cannot be read .*check the URL and the server"):
        open_shards(served.url, tmp_path / "cache")


def test_a_shard_that_disappears_or_changes_ends_in_one_line(served: FileServer, tmp_path: Path) -> None:
    source = open_shards(served.url, tmp_path / "cache", shard_cache_gb=0)
    file = tmp_path / "served" / "train-0.tar"
    content = bytearray(file.read_bytes())
    content[2000:3000] = bytes(1000)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"train-0\.tar/000: does not match its checksum.*restore the shard"):
        source.read(0)
    file.write_bytes(content[:5000])
    with pytest.raises(UserError, match=r"train-0\.tar: shorter than recorded in its index"):
        source.read(0)
    file.unlink()
    with pytest.raises(UserError, match=r"train-0\.tar: not found.*check that the bucket and the files exist"):
        source.read(0)
    with pytest.raises(UserError, match=r"--data-root http.*: (no \.tar files|not) found"):
        open_shards(f"{served.url}/nowhere", tmp_path / "cache")


def test_a_replaced_shard_is_indexed_again(served: FileServer, tmp_path: Path) -> None:
    open_shards(served.url, tmp_path / "cache")
    members = {f"{n}.png": encode_png(image) for n, image in enumerate(IMAGES[::-1][:5])}
    file = tmp_path / "served" / "train-0.tar"
    write_tar(file, members)
    os.utime(file, (10**9, 10**9))
    source = open_shards(served.url, tmp_path / "cache", crop=8)
    assert len(source) == 5 and np.array_equal(source.read(0)["image"], IMAGES[-1])
