"""`--compile auto` compiles if a run is long, and a resumed run keeps the choice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from ranks import difference, make_config, make_parts, run_steps, weights
from running import run_fork

from paceline.cli.app import run
from paceline.cli.flags import with_optional_values
from paceline.config.files import changed_settings
from paceline.parallel.batchnorm import synchronize
from paceline.parallel.group import Place
from paceline.parallel.world import World
from paceline.runs.checkpoint import CheckpointNumbers, Checkpoints, Snapshot
from paceline.runs.folder import RunFolder
from paceline.runs.mirror import Mirror
from paceline.runs.published import Destination
from paceline.runs.record import Choices, Provenance, RunRecord, read_record
from paceline.training import build
from paceline.training import compile as compiling
from paceline.training.compile import (
    CACHE_VARIABLE,
    THREADS_VARIABLE,
    choose,
    compile_networks,
    describe_kernel_cache,
    prepare_compiler,
    recorded_choice,
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_long_run_is_compiled_unless_batchnorm_is_synchronised(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(tiny, compile="off")
    assert choose(parts.config, parts.step, 10**9) == (False, ""), "on a CPU, nothing is compiled"
    monkeypatch.setattr(parts.step, "world", replace(parts.world, device=torch.device("cuda")))
    assert choose(parts.config, parts.step, 20_000)[0] and not choose(parts.config, parts.step, 19_999)[0]
    assert choose(parts.config.with_run(accumulate=2), parts.step, 10_000)[0]
    assert "--deterministic" in choose(parts.config.with_run(deterministic=True), parts.step, 20_000)[1]
    for name, network in parts.recipe.networks.items():
        setattr(parts.recipe, name, synchronize(network, ours=True))
    compiles, note = choose(parts.config, parts.step, 10**9)
    assert not compiles and "BatchNorm" in note and "--compile on" in note


def test_a_cache_folder_that_cannot_be_written_ends_no_run(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, "")  # restored at the end
    monkeypatch.delenv(CACHE_VARIABLE)
    assert compile_networks(make_parts(tiny, compile="off").recipe)
    assert str(tmp_path) not in os.environ.get(CACHE_VARIABLE, "")


def test_a_run_on_a_cpu_records_off_and_resumes_with_the_same_command(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--accelerator", "cpu", "--set", "evaluate_every=1000 steps", "--out", "run")
    assert run_fork(tmp_path, *command, "--images", "80").wait() == 0
    record = read_record(tmp_path / "run")
    assert record and record.settings["compile"] == "off"
    assert recorded_choice(RunFolder(tmp_path / "run"), World(Place(), None)) == "off"  # type: ignore[arg-type]
    resumed = run_fork(tmp_path, *command, "--images", "160")
    assert resumed.wait() == 0 and "resuming from 80 images" in resumed.stdout


def test_a_run_that_rejects_another_compile_setting_does_so_before_compiling(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("train", tiny, "--accelerator", "cpu", "--images", "80", "--set", "evaluate_every=never")
    assert run_fork(tmp_path, *command, "--out", "run").wait() == 0
    monkeypatch.setattr(build, "try_compile", lambda *_: pytest.fail("the networks are compiled"))
    assert run([*command, "--out", str(tmp_path / "run"), "--compile", "on"]) == 2
    assert "trained with different settings (compile: off → on)" in capsys.readouterr().err
    two = run_fork(tmp_path, *command, "--devices", "2", "--out", "run", "--compile", "on")
    assert two.wait() == 2 and len(two.stderr.splitlines()) == 1, two.stderr
    assert "trained with different settings (compile: off → on" in two.stderr


def test_a_compile_setting_that_was_recorded_as_a_boolean_is_still_valid() -> None:
    config = make_config("classification", compile="off")
    kept = {**config.values(), "compile": False}
    assert not [one for one in changed_settings(kept, config) if one.startswith("compile")]


@pytest.mark.parametrize(
    ("words", "spelled"),
    [
        (["train", "x", "--compile"], ["train", "x", "--compile", "on"]),
        (["train", "x", "--compile", "--lr", "1"], ["train", "x", "--compile", "on", "--lr", "1"]),
        (["train", "x", "--compile", "off"], ["train", "x", "--compile", "off"]),
        (["train", "x", "--no-compile"], ["train", "x", "--compile", "off"]),
        (["train", "x", "--compile=auto"], ["train", "x", "--compile=auto"]),
    ],
)
def test_compile_may_be_given_without_a_value(words: list[str], spelled: list[str]) -> None:
    assert with_optional_values(words) == spelled


def test_an_unknown_value_of_compile_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "classification", "--compile=maybe"]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1 and all(
        word in printed for word in ("maybe", "--compile", "auto", "on", "off")
    )


def test_another_extra_argument_is_reported_even_if_compile_has_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--compile", "classification", "--devices", "two"]) == 2
    assert "two" in (printed := capsys.readouterr().err) and "--compile" not in printed
    assert run(["train", "classification", "extra", "--compile"]) == 2
    assert "extra" in (printed := capsys.readouterr().err) and "--compile" not in printed


def test_a_run_that_is_not_restored_from_its_mirror_yet_keeps_its_choice(tmp_path: Path) -> None:
    choices = Choices("single", 1, "cuda", "resident", 0)
    (tmp_path / "run").mkdir()
    RunRecord("classification", {"compile": "on"}, Provenance("8 samples", choices)).write(tmp_path / "run")
    Checkpoints(tmp_path / "run" / "checkpoints").save(Snapshot(80, {}, {}, CheckpointNumbers()))
    url = f"file://{tmp_path}/away"
    mirror = Mirror(tmp_path / "run", Destination(url, "--mirror"), url, "one", every=0.05)
    mirror.check()
    mirror.begin()
    assert "is complete" in mirror.finish(60)
    world, fresh = World(Place(), None), RunFolder(tmp_path / "fresh")  # type: ignore[arg-type]
    assert recorded_choice(fresh, world, url) == "on"
    assert recorded_choice(fresh, world, f"file://{tmp_path}/nothing") == ""
    assert not fresh.path.exists()


def test_ranks_on_one_machine_share_its_cores_for_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: None
) -> None:
    for name in (THREADS_VARIABLE, CACHE_VARIABLE):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(compiling, "num_cores", lambda: 16)
    prepare_compiler(World(Place(), torch.device("cpu")))
    assert THREADS_VARIABLE not in os.environ, "a run on a CPU does not compile unless the user requests it"
    prepare_compiler(World(Place(size=4, local_size=4), torch.device("cuda", 0)))
    assert os.environ[THREADS_VARIABLE] == "4"
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "cache" / "paceline" / "compile")


@pytest.mark.usefixtures("empty_cache")
def test_the_folder_with_compiled_kernels_is_shown_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    (tmp_path / "kernels" / "triton").mkdir(parents=True)
    (tmp_path / "kernels" / "triton" / "one.cubin").write_bytes(bytes(3_000_000))
    assert describe_kernel_cache() == f"compiled kernels: {tmp_path / 'kernels'} (3 MB)"


def test_without_a_compiler_training_adds_a_note_and_runs_eagerly(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, compiled = make_parts(tiny), make_parts(tiny, compile=True)
    assert any(note.startswith("compile: off, since ") for note in compiled.notes), compiled.notes
    run_steps(plain, 2)
    run_steps(compiled, 2)
    assert difference(weights(plain), weights(compiled)) == 0
