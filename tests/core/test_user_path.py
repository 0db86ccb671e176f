"""Paths that the user typed: ~ and ~name, names that cannot exist, and users without a home folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.contracts.data_spec import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import user_cache, user_path, writable_cache
from paceline.data.source import open_sources
from paceline.runs.weights import read_data_spec, write_data_spec

UNKNOWN = "~no-such-user/x"
COMMANDS = {
    "train classification --data folder --data-root {path}",
    "train classification --data npz --data-root {path}",
    "train classification --data shards --data-root {path}",
    "train classification --data mnist --data-root {path}",
    "train restoration --data photos --data-root {path}",
    "train restoration --data pairs --data-root {path}",
    "train translation --data panels --data-root {path}",
    "train classification --init-from {path}",
    "train classification --config {path}",
    "train classification --out {path}",
    "compare classification --out {path}",
    "launch slurm classification --out {path}",
    "launch kubernetes classification --image i --runs-claim c --to {path}",
    "evaluate {path}",
    "predict {path} image.png",
    "apply {path} image.png --out o",
    "apply run image.png --out {path}",
    "sample {path}",
    "export {path} --out o.onnx",
    "measure {path} {path}",
    "import {path} --out x.safetensors",
    "pack {path} packed",
    "pack {path} --to-shards shards",
    "board {path}",
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
@pytest.mark.parametrize("path", [UNKNOWN, "x" * 300])
def test_a_path_that_cannot_exist_is_rejected_in_one_line(
    path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(command.format(path=path).split()) == 2
    line = capsys.readouterr().err
    assert line.startswith("paceline: ") and line.count("\n") == 1 and path[:100] in line
    assert not list(tmp_path.glob(f"{path[0]}*"))


def test_a_tilde_stands_for_the_home_folder_unless_a_file_has_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_path("~/x") == tmp_path / "home" / "x"
    with pytest.raises(UserError, match=r"~backup\.png is not the home folder of a known user"):
        user_path("~backup.png")
    (tmp_path / "~backup.png").touch()
    assert user_path("~backup.png") == Path("~backup.png")


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("a\0b", "use a different path"),
        ("a/" * 5000, "use a shorter one"),
        ("looping/x", "check what is at this path"),
    ],
)
def test_text_that_is_no_path_is_a_user_error(
    path: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "looping").symlink_to("looping")
    with pytest.raises(UserError, match=remedy):
        user_path(path)


def test_the_cache_of_a_user_without_a_home_folder_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # no entry in /etc/passwd
    assert writable_cache("compile") is None
    with pytest.raises(OSError):
        (user_cache() / "shards").mkdir(parents=True)


def test_names_that_are_not_utf8_are_kept_in_data_and_rejected_in_settings(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    spec = DataSpec(1, 8, 8, num_classes=2, class_names=(name, "tea"))
    write_data_spec(tmp_path, spec)
    assert read_data_spec(tmp_path) == spec
    for setting in ("data_root", "out"):
        with pytest.raises(UserError, match=rf"^{setting}='caf\\udce9': is not valid UTF-8"):
            configure("classification", {setting: name})


def test_shards_are_scanned_again_if_the_users_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(24):
        file = tmp_path / "images" / str(number % 2) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((16, 16), 40 + number).save(file)
    assert run(["pack", str(tmp_path / "images"), "--to-shards", str(tmp_path / "shards")]) == 0
    for index in (tmp_path / "shards").glob("*.index.json"):
        index.unlink()
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = configure("classification", {"data": "shards", "data_root": str(tmp_path / "shards")})
    assert len(open_sources(config)["train"]) > 10
    explicit = configure(
        "classification",
        {"data": "shards", "data_root": str(tmp_path / "shards")},
        assignments=[f"shard_cache={tmp_path / 'cache' / 'own'}"],
    )
    with pytest.raises(UserError, match="choose one that can be written to"):
        open_sources(explicit)
