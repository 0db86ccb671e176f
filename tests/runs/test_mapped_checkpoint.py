"""A process that needs some rows of a checkpoint does not read the whole checkpoint into memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.runs.checkpoint import CheckpointNumbers, Checkpoints, Damaged, Snapshot, is_whole, load, load_mapped
from paceline.runs.tensor_files import map_tensors

MIB = 2**20


def anonymous_bytes() -> int:
    """Return the memory of this process that is not a copy of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of 64 MiB with tensors of many kinds."""
    weights = {
        "large": torch.arange(8 * MIB, dtype=torch.float32).reshape(1024, -1),
        "half": torch.arange(6.0).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    }
    weights["alias"] = weights["half"]
    state = {"large/exp_avg": torch.ones(1024, 8 * 1024)}
    return Checkpoints(tmp_path).save(Snapshot(640, weights, state, CheckpointNumbers()))


def test_the_tensors_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    whole, mapped = load(checkpoint), load_mapped(checkpoint)
    assert (mapped.images, mapped.numbers) == (whole.images, whole.numbers)
    for found, expected in ((mapped.weights, whole.weights), (mapped.state, whole.state)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert mapped.weights["last"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pickle.loads(pickle.dumps(mapped.weights["half"])), whole.weights["half"])
    assert len(pickle.dumps(mapped.weights["half"])) < 10_000  # only the tensor, not the whole file


@pytest.mark.parametrize("use", [is_whole, load_mapped], ids=["checked", "mapped"])
def test_a_checkpoint_is_checked_and_used_without_memory_for_all_of_it(
    checkpoint: Path, use: Callable[[Path], object]
) -> None:
    use(checkpoint)  # the first call imports modules
    before = anonymous_bytes()
    used = use(checkpoint)
    rows = used.weights["large"][:16].clone() if isinstance(used, Snapshot) else None
    assert rows is None or rows[0, 1] == 1
    assert anonymous_bytes() - before < 8 * MIB


def test_a_flipped_bit_is_noticed_unless_another_process_has_checked_the_files(checkpoint: Path) -> None:
    file = checkpoint / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match=r"state\.safetensors does not match its recorded SHA-256"):
        load_mapped(checkpoint)
    assert load_mapped(checkpoint, check=False).images == 640


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
def test_a_missing_file_is_reported_by_name(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(Damaged, match=f"{name} is missing"):
        load_mapped(checkpoint, check=False)
    assert not is_whole(checkpoint)


def test_a_strangers_header_that_points_outside_the_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    content = path.read_bytes()
    assert map_tensors(path).keys() == {"a", "b"}
    for damaged in (
        content.replace(b"[16,32]", b"[16,99]"),
        content.replace(b"[0,16]", b"[9,16]"),
        content[:-1],
        content[:20],
        b"",
        (2**62).to_bytes(8, "little") + content[8:],
        content.replace(b"[4]", b"[9]"),
    ):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, KeyError, OSError, safetensors.SafetensorError)):
            map_tensors(path)
