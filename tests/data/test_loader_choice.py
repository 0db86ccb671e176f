"""A run chooses its loader automatically, and keeps data in memory if it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import raw_batches

from paceline.commands.configure import configure
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data import whole_source
from paceline.data.loader import Fit, Loader, choose_loader, choose_loaders
from paceline.data.loaders.resident import Resident
from paceline.data.loaders.workers import Workers
from paceline.data.source import ArraySource, Source
from paceline.data.sources.digits import Digits
from paceline.data.stream import in_order
from paceline.data.whole_source import SHARES
from paceline.parallel.group import Place
from paceline.parallel.world import World
from paceline.training.build import assemble

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
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

        monkeypatch.setattr(whole_source, "free_bytes", free_bytes)
        return requested

    return set_room


@pytest.mark.parametrize("requested", ["auto", "resident"])
def test_data_is_kept_on_the_device_if_it_fits(requested: str) -> None:
    digits = Digits("test", RunSettings())
    name, reason, home = choose_loader(RunSettings(loader=requested), digits, CPU)
    assert (name, home) == ("resident", CPU) and " fit in " in reason and "25% of the free host memory" in reason


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
    assert "remains of 60% of the free GPU memory" in lines[1] and "remains of 25% of the free host memory" in lines[2]


def test_a_run_prints_which_split_does_not_fit(room: SetRoom) -> None:
    config = configure("classification", {"accelerator": "cpu", "data": "digits"}, small=True)
    train, validation = 1294, 144  # together 1,438 digits; another 359 are for testing
    room(sample_bytes=16 * 16 + 8, cpu=train + validation)
    parts = assemble(config, World(Place(), CPU))
    try:
        kinds = {split: type(loader) for split, loader in parts.loaders.items()}
        assert kinds == {"train": Resident, "test": Workers, "validation": Resident}
        (note,) = [note for note in parts.notes if note.startswith("loader workers")]
        assert note.startswith("loader workers for test: ") and "do not fit" in note
    finally:
        for loader in parts.loaders.values():
            loader.close()


def test_the_chosen_loader_keeps_its_data_on_the_right_device(room: SetRoom) -> None:
    room(cpu=4)
    loader = choose_loader(RunSettings(), samples(4), CPU).build(samples(4), CPU, RunSettings())
    assert isinstance(loader, Resident) and loader.home == CPU
    (batch,) = raw_batches(loader, [in_order(0, 4)])
    assert batch["image"].shape == (4, 3, 8, 8)
    loader.close()


OWN_LOADER = """
from paceline.data.loader import Fit, Loader

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


def test_the_automatic_choice_tries_loaders_in_their_declared_order(
    monkeypatch: pytest.MonkeyPatch, room: SetRoom
) -> None:
    room(cpu=10)
    assert choose_loader(RunSettings(), samples(2), CPU).name == "resident"
    monkeypatch.setattr(Workers, "auto_order", Resident.auto_order - 1)  # type: ignore[operator]
    assert choose_loader(RunSettings(), samples(2), CPU) == ("workers", "automatic", None)


def test_a_source_that_no_loader_supports_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for loader in (Resident, Workers):
        monkeypatch.setattr(loader, "fits", classmethod(lambda cls, *_: Fit(False, f"not by {cls.__name__}")))
    with pytest.raises(UserError, match=r"--loader auto: no loader .*: not by Resident; not by Workers"):
        choose_loader(RunSettings(), samples(1), CPU)


@pytest.mark.parametrize("name", registry.names("loader"))
def test_every_loader_has_a_description(name: str) -> None:
    loader = registry.load_class("loader", name, Loader)
    assert loader.description and bool(loader.package) == bool(loader.extra)
    assert not loader.package or loader.auto_order is None, "loaders with an extra package are never automatic"
