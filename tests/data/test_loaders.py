"""All loaders yield the same batches in the same order, and leave no processes behind."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from endless import endless
from made_data import raw_batches
from running import Running, has_ended, start_function_in_ranks, wait_until

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data import whole_source
from paceline.data.loader import Loader
from paceline.data.loaders.workers import Workers
from paceline.data.source import ArraySource, Sample, Source, Subset
from paceline.data.sources.digits import Digits
from paceline.data.stream import in_order
from paceline.data.transforms import Augment, transform

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


def test_every_loader_is_tested_here_or_in_test_dali() -> None:
    assert {name for name, _ in SETUPS} | {"dali"} == set(registry.names("loader"))


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


@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_a_user_error_in_a_worker_prints_one_line(name: str, workers: int) -> None:
    with pytest.raises(UserError) as raised:
        take(build(name, Slow(), workers=workers), Slow(), 4)
    assert str(raised.value) == "images/99.png: unreadable image"


def test_data_kept_in_memory_is_the_same_when_read_in_chunks(digits: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_source, "BYTES_PER_READ", 100 * 1032)
    pieces = whole_source.Pixels(digits, CPU, num_workers=0).samples
    assert np.array_equal(pieces["image"].numpy(), digits.read_many(np.arange(len(digits)))["image"])


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)))


def test_closing_a_loader_ends_its_workers(digits: Source) -> None:
    before = set(children(os.getpid()))
    loader = Workers(digits, CPU, RunSettings(workers=2))
    batches = raw_batches(loader, endless(digits, BATCH, seed=0))
    next(batches)
    started = [pid for pid in children(os.getpid()) if pid not in before]
    assert len(started) == 2
    loader.close()
    wait_until_gone(started)
    assert next(batches, None) is None


def test_the_next_evaluation_reuses_the_workers(digits: Source) -> None:
    before = set(children(os.getpid()))
    loader = Workers(digits, CPU, RunSettings(workers=2))
    requests = [in_order(start, start + 50) for start in (0, 50, 100)]
    seen = []
    for _ in range(3):
        batches = list(raw_batches(loader, requests))
        assert torch.equal(torch.cat([batch["index"] for batch in batches]), torch.arange(150))
        seen.append([pid for pid in children(os.getpid()) if pid not in before])
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 2
    loader.close()
    wait_until_gone(seen[0])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_a_worker_does_not_run_the_handler_that_it_inherited(
    number: signal.Signals, digits: Source
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the handler of the training process")

    before, handler = set(children(os.getpid())), signal.signal(number, fail)
    try:
        loader = Workers(digits, CPU, RunSettings(workers=2))
        batches = raw_batches(loader, endless(digits, BATCH, seed=0))
        for _ in range(2):  # one from each worker: both have begun
            next(batches)
        for pid in set(children(os.getpid())) - before:
            os.kill(pid, number)
        assert len([next(batches) for _ in range(50)]) == 50
        loader.close()
    finally:
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


def test_an_array_source_with_images_alone_can_be_loaded() -> None:
    source = ArraySource({"image": np.zeros((BATCH, 2, 2, 1), np.uint8)}, DataSpec(1, 2, 2))
    for name, workers in SETUPS:
        assert take(build(name, source, workers=workers), source, 1)[0].keys() == {"image", "index", "uniforms"}
