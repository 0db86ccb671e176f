"""If a checkpoint has invalid content but valid checksums, the previous checkpoint is used or an error is printed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from running import run_fork
from test_checkpoint import same, snapshot, with_best
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.files import checksum_of_content
from paceline.runs.checkpoint import Checkpoints

Edit = Callable[[Any], Any]
TENSORS = ("weights.safetensors", "state.safetensors")


def sign(path: Path, edit_manifest: Edit = lambda manifest: manifest) -> None:
    """Rewrite a checkpoint's manifest so that its checksums match the files."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("seal")
    manifest["sha256"] = {name: sha256((path / name).read_bytes()).hexdigest() for name in manifest["sha256"]}
    manifest = edit_manifest(manifest)
    if isinstance(manifest, dict):
        manifest["seal"] = checksum_of_content(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def edit_numbers(path: Path, edit: Edit) -> None:
    (path / "state.json").write_text(json.dumps(edit(json.loads((path / "state.json").read_text()))))
    sign(path)


def edit_tensors(path: Path, name: str, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    safetensors.torch.save_file(edit(safetensors.torch.load_file(path / name)), path / name)
    sign(path)


def notes(**changes: Any) -> Edit:
    """Return a function that changes the tensor metadata in a manifest."""

    def edit(manifest: Any) -> Any:
        manifest["tensors"]["weights.safetensors"] |= changes
        return manifest

    return edit


NUMBERS: dict[str, Edit] = {
    # 640: an older checkpoint with a newer name
    **{f"images {value!r}": lambda n, v=value: n | {"images": v} for value in ("x", "1280", 640, -1, 1280.0, True)},
    "images missing": lambda n: {name: value for name, value in n.items() if name != "images"},
    "a list": lambda n: [n],
    "evaluated_at bool": lambda n: n | {"evaluated_at": True},
    "evaluated_at later": lambda n: n | {"evaluated_at": 1281},
    "evaluated_at huge": lambda n: n | {"evaluated_at": 10**30},
    "best a list": lambda n: n | {"best": ["validation/top1", 0.5, 640]},
    "best name": lambda n: n | {"best": n["best"] | {"name": 3}},
    "best value text": lambda n: n | {"best": n["best"] | {"value": "0.5"}},
    "best value NaN": lambda n: n | {"best": n["best"] | {"value": float("nan")}},
    "best value huge": lambda n: n | {"best": n["best"] | {"value": 10**400}},
    "best images later": lambda n: n | {"best": n["best"] | {"images": 9999}},
    "best images negative": lambda n: n | {"best": n["best"] | {"images": -640}},
    "scalers a list": lambda n: n | {"scalers": []},
    "scaler a number": lambda n: n | {"scalers": {"network": 1.0}},
    "scale text": lambda n: n | {"scalers": {"network": {"scale": "65536"}}},
    "scale NaN": lambda n: n | {"scalers": {"network": {"scale": float("nan")}}},
}
MANIFESTS: dict[str, Edit] = {
    "a list": lambda m: [m],
    "no checksums": lambda m: m | {"sha256": {}},
    "checksums a list": lambda m: m | {"sha256": []},
    "format text": lambda m: m | {"format": "2"},
    "tensors a list": lambda m: m | {"tensors": []},
    "unknown note": notes(other={}),
    "aliases a list": notes(aliases=[1]),
    "alias of nothing": notes(aliases={"network.other": "network.missing"}),
    "alias of a number": notes(aliases={"network.other": 3}),
    "alias over a tensor": notes(aliases={"network.weight": "ema/network.weight"}),
    "format of nothing": notes(formats={"network.missing": "channels_last"}),
    "format of a matrix": notes(formats={"network.weight": "channels_last"}),
    "unknown format": notes(formats={"network.weight": "sideways"}),
}
CASES = [("state.json", name) for name in NUMBERS] + [("manifest.json", name) for name in MANIFESTS]


@pytest.mark.parametrize(("file", "kind"), CASES)
def test_a_checkpoint_with_invalid_content_but_valid_checksums_is_treated_as_damaged(
    tmp_path: Path, file: str, kind: str
) -> None:
    checkpoints, lines = Checkpoints(tmp_path), []
    for images in (640, 1280):
        checkpoints.save(with_best(snapshot(images, images), 640))
    path = checkpoints.path(1280)
    if file == "state.json":
        edit_numbers(path, NUMBERS[kind])
    else:
        sign(path, MANIFESTS[kind])
    found = checkpoints.latest(lines.append)
    assert found and same(found, with_best(snapshot(640, 640), 640))
    assert len(lines) == 1 and "is damaged" in lines[0] and str(path) in lines[0]
    shutil.rmtree(checkpoints.path(640))
    with pytest.raises(UserError, match="there is no earlier checkpoint"):
        checkpoints.latest(lines.append)


def test_a_checkpoint_with_an_invalid_safetensors_file_is_treated_as_damaged(tmp_path: Path) -> None:
    checkpoints, lines = Checkpoints(tmp_path), []
    for images in (640, 1280):
        checkpoints.save(snapshot(images))
    (checkpoints.path(1280) / "state.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ?")
    sign(checkpoints.path(1280))
    assert checkpoints.latest(lines.append) and len(lines) == 1 and "state.safetensors" in lines[0]


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def mapped(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: change(value) if part in name else value for name, value in tensors.items()}


UNFIT: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "a weight is missing": (TENSORS[0], without("classifier.0.bias")),
    "a weight has another shape": (TENSORS[0], mapped("classifier.5.bias", lambda t: t[:-1].clone())),
    "a weight has another type": (TENSORS[0], mapped("classifier.0.weight", lambda t: t.half())),
    "a weight is too many": (TENSORS[0], lambda tensors: tensors | {"classifier.9": torch.zeros(1)}),
    "an average is missing": (TENSORS[0], without("ema/classifier.5.weight")),
    "an average has another shape": (TENSORS[0], mapped("ema/classifier.5", lambda t: t[..., None].clone())),
    "a momentum is missing": (TENSORS[1], without("/5.weight/momentum_buffer")),
    "a momentum has another shape": (TENSORS[1], mapped("/5.weight/", lambda t: t[:1].clone())),
    "a momentum has another type": (TENSORS[1], mapped("/5.weight/", lambda t: t.to(torch.int32))),
    "a momentum is too many": (TENSORS[1], lambda tensors: tensors | {"classifier/9/momentum_buffer": torch.zeros(1)}),
}


def test_a_checkpoint_whose_tensors_do_not_fit_is_reported_and_the_previous_one_is_used(
    tmp_path: Path, tiny: str
) -> None:
    settings = ("--set", "momentum=0.9", "--set", "ema_half_life=64 images", "--set", "save_every=1 steps")
    command = ("train", tiny, *settings, "--set", f"keep={len(UNFIT) + 1}", "--set", "evaluate_every=99 steps")
    command += ("--images", str(16 * (len(UNFIT) + 1)), "--out", "run")
    assert run_fork(tmp_path, *command).wait() == 0
    folder = tmp_path / "run" / "checkpoints"
    whole = {path.name: (path / TENSORS[0]).read_bytes() for path in folder.iterdir()}
    paths = sorted(folder.iterdir())[-len(UNFIT) :]
    for path, (name, edit) in zip(paths, UNFIT.values(), strict=True):
        edit_tensors(path, name, edit)
    again = run_fork(tmp_path, *command)
    assert again.wait() == 0 and again.stderr == ""
    reported = [line for line in again.stdout.splitlines() if "using the previous one" in line]
    for path, kind in zip(paths, UNFIT, strict=True):
        assert sum(path.name in line for line in reported) == 1, f"{kind}: {again.stdout}"
    assert "resuming from 16 images" in again.stdout
    assert (paths[-1] / TENSORS[0]).read_bytes() == whole[paths[-1].name]


def test_if_no_checkpoint_fits_the_network_an_error_is_printed_and_nothing_changes(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--set", "momentum=0.9", "--images", "16", "--out", "run")
    assert run_fork(tmp_path, *command).wait() == 0
    path = tmp_path / "run" / "checkpoints" / f"{16:012d}"
    edit_tensors(path, *UNFIT["a momentum has another shape"])
    again = run_fork(tmp_path, *command, "--images", "32")
    assert again.wait() == 2 and len(again.stderr.splitlines()) == 1 and "momentum_buffer" in again.stderr
    assert path.exists()
