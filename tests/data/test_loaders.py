"""All loaders yield the same batches in the same order within the memory, and leave no processes behind."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from endless import endless
from made_data import raw_batches
from PIL import Image
from running import Running, has_ended, start_fork, start_function_in_ranks, wait_until

from paceline.config.flags import PhotoSettings
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data import loader as loaders
from paceline.data import worker_pool
from paceline.data.bundled import FOLDER
from paceline.data.loader import SHARES, Fit, Loader, choose_loader, choose_loaders
from paceline.data.loaders import resident
from paceline.data.loaders.resident import Pixels, Resident
from paceline.data.loaders.workers import Workers
from paceline.data.source import ArraySource, Sample, Source, Subset
from paceline.data.sources.digits import Digits
from paceline.data.sources.photos import Photos
from paceline.data.stream import Augment, in_order, transform
from paceline.data.worker_pool import MAX_READERS, WorkerPool, num_readers, read_in_order

# Batches and processes


CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
BATCH = 48


def build(name: str, source: Source, device: torch.device = CPU, workers: int = 0) -> Loader:
    return registry.load_class("loader", name, Loader)(source, device, RunSettings(workers=workers))


def take(loader: Loader, source: Source, count: int) -> list[Batch]:
    try:
        return list(itertools.islice(raw_batches(loader, endless(source, BATCH, seed=0)), count))
    finally:
        loader.close()


class Slow(Source):
    """A source whose first samples take longest to read, so that workers finish out of order."""

    spec = DataSpec(3, 6, 4, num_classes=10)

    def __len__(self) -> int:
        return 100

    def __init__(self) -> None:
        pass

    def read(self, index: int) -> Sample:
        if index == 99:
            raise UserError("images/99.png: unreadable image")
        time.sleep(0.0005 * (index % 7 == 0))
        image = np.random.default_rng(index).integers(0, 256, (6, 4, 3), dtype=np.uint8)
        return {"image": image, "label": np.asarray(index % 10), "mask": image[..., :1]}


@pytest.fixture(scope="module")
def digits() -> Source:
    return Digits("test", RunSettings())


SETUPS = [("workers", 0), ("workers", 2), ("resident", 0), ("resident", 2)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_batches_contain_the_requested_samples_and_random_numbers(
    name: str, workers: int, device: torch.device, digits: Source
) -> None:
    random_state = torch.get_rng_state()
    loader = build(name, digits, device, workers)
    for batch, request in zip(take(loader, digits, 12), endless(digits, BATCH, seed=0), strict=False):
        expected = digits.read_many(request.index) | request._asdict()
        assert batch.keys() == expected.keys() and all(value.device == device for value in batch.values())
        batch["image"] = batch["image"].permute(0, 2, 3, 1)
        for field, values in expected.items():
            assert (
                np.array_equal(batch[field].cpu().numpy(), values) and batch[field].cpu().numpy().dtype == values.dtype
            )
    requests = [in_order(start, min(start + 100, len(digits))) for start in range(0, len(digits), 100)]
    evaluated = list(raw_batches(build(name, digits, device, workers), requests))
    assert [len(batch["index"]) for batch in evaluated] == [100, 100, 100, 59]
    assert torch.equal(torch.cat([batch["index"] for batch in evaluated]).cpu(), torch.arange(len(digits)))
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_prepared_batches_are_bit_identical_for_every_loader_and_device(
    name: str, workers: int, device: torch.device
) -> None:
    source, augment = Subset(Slow(), np.arange(0, 98, 2)), Augment(pad_crop=2, flip=True, cutout=3)
    expected = take(build("workers", source), source, 4)
    batches = take(build(name, source, device, workers), source, 4)
    for one, other in zip(batches, expected, strict=True):
        for dtype in (torch.float32, torch.bfloat16):
            prepared, reference = transform(one, augment, dtype), transform(other, augment, dtype)
            assert prepared.keys() == {"image", "label", "mask", "index"}
            assert prepared["mask"].shape == (BATCH, 1, 6, 4)
            for field in prepared:
                assert torch.equal(prepared[field].cpu(), reference[field])
                assert prepared[field].stride() == reference[field].stride()


def test_a_user_error_in_a_worker_prints_one_line() -> None:
    for name, workers in SETUPS:
        with pytest.raises(UserError) as raised:
            take(build(name, Slow(), workers=workers), Slow(), 4)
        assert str(raised.value) == "images/99.png: unreadable image"


def test_data_kept_in_memory_is_the_same_when_read_in_chunks(digits: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "BYTES_PER_READ", 100 * 1032)
    pieces = resident.Pixels(digits, CPU, num_workers=0).samples
    assert np.array_equal(pieces["image"].numpy(), digits.read_many(np.arange(len(digits)))["image"])


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)))


def test_closing_a_loader_ends_its_workers_which_the_next_evaluation_reuses(digits: Source) -> None:
    before = set(children(os.getpid()))
    loader = Workers(digits, CPU, RunSettings(workers=2))
    requests = [in_order(start, start + 50) for start in (0, 50, 100)]
    seen = []
    for _ in range(3):
        batches = list(raw_batches(loader, requests))
        assert torch.equal(torch.cat([batch["index"] for batch in batches]), torch.arange(150))
        seen.append([pid for pid in children(os.getpid()) if pid not in before])
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 2
    endlessly = raw_batches(loader, endless(digits, BATCH, seed=0))
    next(endlessly)
    loader.close()
    wait_until_gone(seen[0])
    assert next(endlessly, None) is None


def test_a_signal_to_a_worker_does_not_run_the_handler_that_it_inherited(digits: Source) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the handler of the training process")

    numbers, before = (signal.SIGHUP, signal.SIGUSR1), set(children(os.getpid()))
    handlers = [signal.signal(number, fail) for number in numbers]
    try:
        loader = Workers(digits, CPU, RunSettings(workers=2))
        batches = raw_batches(loader, endless(digits, BATCH, seed=0))
        for _ in range(2):  # one from each worker: both have begun
            next(batches)
        for pid in set(children(os.getpid())) - before:
            for number in numbers:
                os.kill(pid, number)
        assert len([next(batches) for _ in range(20)]) == 20
        loader.close()
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def test_two_concurrent_request_streams_do_not_interfere(digits: Source) -> None:
    loader = Workers(digits, CPU, RunSettings(workers=1))
    first, second = (raw_batches(loader, [in_order(start, start + 9) for start in (at, at + 9)]) for at in (0, 100))
    found = [int(next(rows)["index"][0]) for rows in (first, second, first, second)]
    loader.close()
    assert found == [0, 100, 9, 109]


def load_until_stopped() -> None:
    """Load batches until SIGTERM arrives, and then fifty more."""
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    source = ArraySource({"image": np.zeros((8, 2, 2, 1), np.uint8)}, DataSpec(1, 2, 2))
    batches = Workers(source, CPU, RunSettings(workers=2)).fetch(in_order(0, 8) for _ in itertools.count())
    for _ in range(2):  # one from each worker: both have begun
        next(batches)
    print("ready", flush=True)
    while not stopped:
        next(batches)
    for _ in range(50):
        next(batches)
    print("orderly end", flush=True)


@pytest.fixture
def trainer(tmp_path: Path) -> Running:
    (running,) = start_function_in_ranks(tmp_path, 1, load_until_stopped)
    wait_until(lambda: "ready" in running.stdout, running)
    return running


def test_workers_end_when_their_parent_is_killed(trainer: Running) -> None:
    workers = children(trainer.pid)
    assert len(workers) == 2 and not any(map(has_ended, workers))
    trainer.kill()
    trainer.wait()
    wait_until_gone(workers)


def test_a_sigterm_to_the_process_group_does_not_end_the_workers(trainer: Running) -> None:
    workers = children(trainer.pid)
    trainer.interrupt_group(signal.SIGTERM)
    assert trainer.wait() == 0 and trainer.stdout == "ready\norderly end\n"
    wait_until_gone(workers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_loading_a_batch_does_not_wait_for_the_gpu(name: str, workers: int, digits: Source) -> None:
    loader = build(name, digits, torch.device("cuda", 0), workers)
    batches = raw_batches(loader, endless(digits, BATCH, seed=0))
    augment = Augment(pad_crop=4, flip=True, cutout=8)
    transform(next(batches), augment, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in itertools.islice(batches, 8):
            transform(batch, augment, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        loader.close()


# Choice of the loader


GPU = torch.device("cuda", 0)
SAMPLE_BYTES = 8 * 8 * 3
SetRoom = Callable[..., list[str]]


class Photographs(ArraySource):
    """Samples that are expensive to read."""

    decodes = True


def samples(count: int, kind: type[ArraySource] = ArraySource) -> Source:
    return kind({"image": np.zeros((count, 8, 8, 3), np.uint8)}, DataSpec(3, 8, 8))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> SetRoom:
    """Return a function that sets how many samples fit on each type of device and records memory queries."""

    def set_room(sample_bytes: int = SAMPLE_BYTES, **counts: int) -> list[str]:
        requested: list[str] = []

        def free_bytes(device: torch.device) -> int:
            requested.append(device.type)
            return round((counts[device.type] * sample_bytes + 1) / SHARES[device.type])

        monkeypatch.setattr(loaders, "free_bytes", free_bytes)
        return requested

    return set_room


@pytest.mark.parametrize("requested", ["auto", "resident"])
def test_data_is_kept_on_the_device_if_it_fits(requested: str) -> None:
    digits = Digits("test", RunSettings())
    name, reason, home = choose_loader(RunSettings(loader=requested), digits, CPU)
    assert (name, home) == ("resident", CPU) and " fit in " in reason and "of host memory" in reason


def test_a_requested_loader_is_used() -> None:
    assert choose_loader(RunSettings(loader="workers"), samples(1), CPU) == ("workers", "requested", None)


@pytest.mark.parametrize("requested", ["auto", "resident"])
def test_data_that_does_not_fit_in_host_memory_is_read_by_workers(requested: str, room: SetRoom) -> None:
    room(cpu=10)
    settings = RunSettings(loader=requested)
    assert choose_loader(settings, samples(10), CPU).name == "resident"
    for name, reason, _ in (
        choose_loader(settings, samples(11), CPU),
        choose_loader(dataclasses.replace(settings, devices=2), samples(10), CPU),  # two processes share the memory
    ):
        assert name == "workers" and "do not fit" in reason


@pytest.mark.parametrize("requested", ["auto", "resident"])
def test_data_too_large_for_a_gpu_is_kept_in_host_memory_or_read_from_files(requested: str, room: SetRoom) -> None:
    settings, source = RunSettings(loader=requested), samples(10, Photographs)
    room(cuda=0, cpu=10)
    name, why, home = choose_loader(settings, source, GPU)
    assert (name, home) == ("resident", CPU) and "do not fit" in why and "host memory" in why
    room(cuda=0, cpu=0)
    name, why, _ = choose_loader(settings, source, GPU)
    assert name == "workers" and "paceline pack" in why
    assert "paceline pack" not in choose_loader(settings, samples(10), GPU).reason


def test_all_splits_share_the_available_memory_and_training_data_comes_first(room: SetRoom) -> None:
    requested = room(cuda=100, cpu=30)
    sources = {"test": samples(30), "train": samples(80), "validation": samples(25), "other": samples(15)}
    choices, lines = choose_loaders(RunSettings(), sources, GPU)
    homes = {split: choice.home for split, choice in choices.items()}
    assert homes == {"train": GPU, "test": CPU, "validation": None, "other": GPU}
    assert choices["validation"].name == "workers"
    assert requested == ["cuda", "cpu"], "free memory is queried once, before anything is allocated"
    assert [line.split(":")[0] for line in lines] == [
        "loader resident",
        "loader resident for test",
        "loader workers for validation",
    ]
    assert "of GPU memory" in lines[1] and "of host memory" in lines[2]


OWN_LOADER = """
from paceline.data.loader import SHARES, Fit, Loader

class Own(Loader):
    auto_order = {order}

    @classmethod
    def fits(cls, source, device, budget):
        return Fit(len(source) < 3, "fewer than three" if len(source) < 3 else "three or more")

    def fetch(self, requests):
        raise NotImplementedError
"""


def test_a_user_loader_declares_whether_it_supports_the_data(tmp_path: Path, room: SetRoom) -> None:
    room(cpu=3)
    file = tmp_path / "own.py"
    file.write_text(OWN_LOADER.format(order=None))
    settings = RunSettings(loader=str(file))
    assert choose_loader(settings, samples(2), CPU) == (str(file), "fewer than three", None)
    name, why, home = choose_loader(settings, samples(3), CPU)
    assert (name, home) == ("resident", CPU) and why.startswith("three or more; ") and " fit in " in why


def test_a_source_that_no_loader_supports_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for loader in (Resident, Workers):
        monkeypatch.setattr(loader, "fits", classmethod(lambda cls, *_: Fit(False, f"not by {cls.__name__}")))
    with pytest.raises(UserError, match=r"--loader auto: no loader .*: not by Resident; not by Workers"):
        choose_loader(RunSettings(), samples(1), CPU)


# Reading all samples at the start


# torch warns if there are more processes than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_a_process_reads_with_its_share_of_the_cores_but_with_workers_0_in_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, workers, devices, expected in ((16, 2, 4, 4), (2, 8, 1, 8), (64, 2, 1, MAX_READERS), (16, 0, 1, 0)):
        monkeypatch.setattr(worker_pool, "num_cores", lambda cores=cores: cores)
        assert num_readers(RunSettings(workers=workers, devices=devices)) == expected


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with photographs of several formats and sizes, which other programs have written."""
    for name in ("astronaut.webp", "coins.png", "retina.jpg", "moon.png", "rocket.jpg", "brick.png"):
        with Image.open(FOLDER / name) as image:
            image.crop((0, 0, 120, 90 + len(name))).save(tmp_path / name)
    return tmp_path


def open_photos(folder: Path) -> Photos:
    return Photos("test", PhotoSettings(test_root=str(folder), workers=1))


def test_pixels_do_not_depend_on_the_number_of_processes_and_a_damaged_file_is_named(photos: Path) -> None:
    source = open_photos(photos)
    alone, together = Pixels(source, CPU, 0), Pixels(source, CPU, 3)
    assert len(source) == 6 and alone.samples.keys() == together.samples.keys()
    assert all(torch.equal(alone.samples[name], together.samples[name]) for name in alone.samples)
    damaged = photos / "moon.png"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"moon\.png"):
        Pixels(source, CPU, 3)


def test_many_processes_read_smaller_pieces_so_that_memory_stays_bounded(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in photos.glob("*"):
        with Image.open(file) as image:
            image.resize((32, 32)).save(file)
    source = open_photos(photos)  # 3,072 bytes per image
    monkeypatch.setattr(worker_pool, "BYTES_WAITING", 4 * 2 * 3072)
    sizes = {
        workers: [len(piece["index"]) for piece in read_in_order(source, workers, 2**20)] for workers in (0, 1, 2, 4)
    }
    assert sizes == {0: [6], 1: [4, 2], 2: [2, 2, 2], 4: [1] * 6}


def test_large_samples_are_read_by_fewer_processes(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    class Counted(WorkerPool):
        def __init__(self, source: Source, num_workers: int) -> None:
            used.append(num_workers)
            super().__init__(source, num_workers)

    source = open_photos(photos)
    assert source.sizes is not None
    largest = int(source.sizes.prod(axis=1).max()) * 3
    monkeypatch.setattr(worker_pool, "WorkerPool", Counted)
    for room in (2 * 2 * largest + 1000, largest):
        monkeypatch.setattr(worker_pool, "LARGE_BYTES_WAITING", room)
        assert sum(len(piece["index"]) for piece in read_in_order(source, 4, 2**20)) == 6
    assert used == [2, 1]


SLOW = """
import os
import time

import numpy as np

from paceline import DataSpec, Source


class Slow(Source):
    spec = DataSpec(1, 8, 8, num_classes=10)

    def __init__(self, split, settings):
        pass

    def __len__(self):
        return 200

    def read(self, index):
        return {"image": np.zeros((8, 8, 1), np.uint8), "label": np.int64(index % 10)}

    def read_many(self, indices):
        open(f"reads-{os.getpid()}", "w").close()
        time.sleep(60)  # much longer than the test takes
"""


def test_ctrl_c_while_all_samples_are_read_ends_the_run_and_its_processes(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = ("--data", "./slow.py", "--accelerator", "cpu", "--workers", "2", "--loader", "resident", "--out", "run")
    running = start_fork(tmp_path, "train", tiny, *words)
    (file,) = wait_until(lambda: list(tmp_path.glob("reads-*")), running)  # the samples fit in one piece
    reader = int(file.name.partition("-")[2])
    assert reader != running.pid
    running.interrupt_group()
    assert running.wait() == 130
    wait_until(lambda: has_ended(reader))


# Memory and files that processes share


FILES = resource.RLIMIT_NOFILE
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # from <linux/sched.h> and <linux/mount.h>


def mount_tmpfs(folder: str, size: int) -> None:
    """Mount a small tmpfs on a folder, visible only to this process and its children; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={size}".encode()),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "cannot mount a tmpfs")


def use_temporary_folder(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # the process that forked this one has stored its own, here and in multiprocessing
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


def small_shared_memory() -> None:
    mount_tmpfs("/dev/shm", 256 * 1024)


def no_shared_memory() -> None:
    mount_tmpfs("/dev/shm", 4096)


def long_temporary_folder() -> None:
    use_temporary_folder(os.path.abspath("long" * 50))


def run_under(condition: Callable[[], None], arguments: tuple[str, ...]) -> int:
    from paceline.cli.app import run

    try:
        condition()
    except PermissionError:
        return SKIPPED
    return run(list(arguments))


SKIPPED = 99


def run_limited(folder: Path, condition: Callable[[], None], *arguments: str) -> Running:
    (running,) = start_function_in_ranks(folder, 1, run_under, condition, arguments)
    if running.wait() == SKIPPED:
        pytest.skip("needs root, to mount a tmpfs")
    return running


@pytest.mark.parametrize("condition", [small_shared_memory, long_temporary_folder])
def test_a_batch_that_cannot_be_shared_ends_training_with_the_remedies(
    tmp_path: Path, tiny: str, condition: Callable[[], None]
) -> None:
    loading = ("--set", "loader=workers", "--set", "workers=2")
    run = ("train", tiny, "--set", "size=64", "--batch-size", "128", "--images", "256", "--out", "run")
    check_error(run_limited(tmp_path, condition, *run, *loading))


def test_packing_reports_that_its_loader_processes_cannot_share_memory(tmp_path: Path) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (300, 300, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "a" / f"{number}.png")
    pack = ("pack", "folder", "packed", "--data-root", "images", "--set", "size=300", "--set", "workers=1")
    check_error(run_limited(tmp_path, no_shared_memory, *pack))


def read_with_few_files(folder: str) -> None:
    source, (_, most) = Photos("test", PhotoSettings(test_root=folder, workers=1)), resource.getrlimit(FILES)
    for spare in range(0, 32, 2):
        resource.setrlimit(FILES, (len(os.listdir("/proc/self/fd")) + spare, most))
        with pytest.raises(UserError, match=r"Too many open files.*ulimit -n.*--workers 0"):
            list(read_in_order(source, 2, 2**20))


def test_too_few_open_files_for_loader_processes_are_reported_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64 + number)).save(tmp_path / "images" / f"{number}.png")
    (running,) = start_function_in_ranks(tmp_path, 1, read_with_few_files, "images")
    assert running.wait() == 0 and not running.stderr, running.stderr


def check_error(running: Running) -> None:
    lines = running.stderr.splitlines()
    assert running.wait() == 2 and len(lines) == 1, running.stderr
    assert all(remedy in lines[0] for remedy in ("--shm-size", "TMPDIR", "ulimit -n", "--workers 0"))
