"""Runs, mirrors and weights files have a format version. Unsupported versions are reported in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from running import run_fork

from paceline.cli.app import run
from paceline.config.files import RUN_FORMAT, read_file
from paceline.core.errors import UserError
from paceline.core.files import checksum_of_content
from paceline.runs.finished_run import config_of
from paceline.runs.mirror import Mirror
from paceline.runs.published import Destination, list_manifests, restore
from paceline.runs.weights import FORMAT, read_weights

REMEDY = f"but this version of Paceline reads format {RUN_FORMAT}: train it again, or use the version that wrote it"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    tiny = str(Path(__file__).resolve().parent.parent / "tiny.py")
    done = run_fork(folder, "train", tiny, "--out", "run", "--images", "16", "--mirror", f"file://{folder}/away")
    assert done.wait() == 0, done.stderr
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.copytree(made / "away", tmp_path / "away")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "where", "found"),
    [
        ("evaluate run", "run", None),
        ("evaluate run", "run", 3),
        ("compare run --out report", "run", 1),
        ("predict run images --out table.csv", "run", 3),
        ("train TINY --out run --images 32", "--out run", 1),
        ("train TINY --out other --config run/config.toml", "--config run/config.toml", 3),
        ("train TINY --out other --init-from run", "--init-from run: run", 1),
    ],
)
def test_a_run_with_an_unsupported_format_is_reported_in_one_line(
    place: Path, tiny: str, command: str, where: str, found: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path("run/config.toml")
    line = f"format = {RUN_FORMAT}\n"
    assert config.read_text().count(line) == 1
    before = config.read_text().replace(line, "" if found is None else f"format = {found}\n")
    config.write_text(before)
    assert run([tiny if word == "TINY" else word for word in command.split()]) == 2
    remedy = REMEDY.replace("train it again", "copy the settings that you need into a new file")
    shown = f"run format {found or 1}, {remedy if '--config' in command else REMEDY}"
    assert capsys.readouterr().err == f"paceline: {where}: {shown}\n" and config.read_text() == before


def test_a_missing_entry_in_the_config_is_reported(place: Path) -> None:
    config = Path("run/config.toml")
    config.write_text("".join(line for line in config.open() if not line.startswith("accelerator = ")))
    with pytest.raises(UserError, match=r"run/config.toml: \[provenance\] cannot be read \('accelerator'\)"):
        config_of("run")


def test_a_run_without_its_data_spec_is_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = Path("run/data_spec.json")
    for content in (None, "not json", '{"channels": 3}'):
        spec.unlink(missing_ok=True)
        if content:
            spec.write_text(content)
        assert run(["predict", "run", "images", "--out", "table.csv"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("paceline: run/data_spec.json: ") and error.endswith("or train the run again\n")


def test_a_mirror_with_an_unsupported_format_is_reported_and_left_unchanged(place: Path) -> None:
    destination = Destination(f"file://{place}/away", "--mirror")
    for name in list_manifests(destination):
        content = json.loads((place / "away" / name).read_text())
        content = {key: value for key, value in content.items() if key != "seal"} | {"format": 1}
        (place / "away" / name).write_text(json.dumps(content | {"seal": checksum_of_content(content)}))
    before = {file: file.read_bytes() for file in (place / "away").rglob("*") if file.is_file()}
    (place / "back").mkdir()
    message = f"its snapshots: run format 1, {REMEDY}"
    with pytest.raises(UserError, match=message):
        restore(destination, place / "back", 0, pytest.fail, lambda: None)
    mirror = Mirror(place / "run", destination, "away", "one", every=0.05)
    with pytest.raises(UserError, match=f"--mirror away: {message}"):
        mirror.check()
    assert {file: file.read_bytes() for file in (place / "away").rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("found", [None, "1", "3"])
def test_a_weights_file_with_an_unsupported_format_is_reported_in_one_line(tmp_path: Path, found: str | None) -> None:
    metadata = {"paceline.recipe": "classification"} | ({FORMAT: found} if found else {})
    safetensors.torch.save_file({"weight": torch.zeros(3)}, tmp_path / "w.safetensors", metadata)
    with pytest.raises(UserError) as caught:
        read_weights(tmp_path / "w.safetensors")
    assert str(caught.value) == (
        f"{tmp_path / 'w.safetensors'}: run format {found or 1}, but this version of Paceline reads format "
        f"{RUN_FORMAT}: import it again, or use the version that wrote it"
    )


def test_settings_inherited_from_a_run_do_not_include_its_paths(place: Path) -> None:
    inherited = read_file("run/config.toml")
    assert inherited["images"] == 16 and not {"out", "mirror", "resume_from", "provenance"} & inherited.keys()
