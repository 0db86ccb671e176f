"""`--compile auto` compiles if a run saves more time than compiling takes, and a resumed run keeps the choice."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import make_config, make_parts
from running import run_fork, run_ranks

from paceline.cli.app import run
from paceline.cli.flags import with_optional_values
from paceline.commands import doctor
from paceline.config.files import changed_settings
from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch, Phase
from paceline.launch.tasks import Task
from paceline.parallel.batchnorm import synchronize
from paceline.parallel.place import Place
from paceline.parallel.world import World
from paceline.runs.checkpoint import CheckpointNumbers, Checkpoints, Snapshot
from paceline.runs.compile_table import TABLE, CompileCost, compile_cost, record_gain, record_seconds
from paceline.runs.folder import RunFolder
from paceline.runs.mirror.mirror import Mirror
from paceline.runs.mirror.published import open_destination
from paceline.runs.provenance import cache_file
from paceline.runs.record import Choices, Provenance, RunRecord, read_record
from paceline.training import build
from paceline.training import compile as compile_choice
from paceline.training import compile as compiling
from paceline.training.compile import (
    CACHE_VARIABLE,
    THREADS_VARIABLE,
    TRITON_VARIABLE,
    average_seconds,
    choose,
    choose_for,
    compile_networks,
    describe_kernel_cache,
    prepare_compiler,
    recorded_choice,
)
from paceline.training.step import Step

COST = CompileCost(gain=0.2, seconds_per_network=20, origin="built-in estimates")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_long_run_compiles_and_a_short_run_does_not() -> None:
    assert choose(num_steps=10_000, step_seconds=0.03, num_networks=2, cost=COST).compiles  # saves 60 s, costs 40 s
    assert not choose(num_steps=5_000, step_seconds=0.03, num_networks=2, cost=COST).compiles  # saves 30 s
    assert choose(num_steps=5_000, step_seconds=0.03, num_networks=1, cost=COST).compiles


def test_the_note_states_in_one_line_what_was_compared() -> None:
    note = choose(10_000, 0.03, 2, COST).note
    assert note.startswith("compile: on (auto)") and "\n" not in note
    assert "60 s of 300 s" in note and "40 s" in note and "built-in estimates" in note


@pytest.mark.usefixtures("empty_cache")
def test_measured_gains_and_costs_replace_the_built_in_ones() -> None:
    before = compile_cost("mine")
    assert before.origin == "built-in estimates"
    record_gain(0.31, "mine")
    record_seconds(4.5, "mine")
    assert compile_cost("mine") == CompileCost(0.31, 4.5, "gain and cost measured on this machine")
    assert compile_cost("other") == before, "another recipe has other networks"


@pytest.mark.usefixtures("empty_cache")
def test_the_time_to_compile_with_kernels_of_an_earlier_run_is_kept_separately() -> None:
    record_seconds(24, "mine")
    assert compile_cost("mine", known=True).seconds_per_network < compile_cost("other").seconds_per_network
    record_seconds(3, "mine", known=True)
    assert compile_cost("mine").seconds_per_network == 24
    assert compile_cost("mine", known=True).seconds_per_network == 3


def test_a_run_is_compiled_more_readily_once_its_networks_were_compiled(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: None
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(compile_choice, "time_step", lambda step, batch: 0.01)
    monkeypatch.setattr(compile_choice, "try_compile", lambda step, data, known: "compile: on")
    monkeypatch.setattr(compile_choice, "is_compiled", lambda network: True)
    monkeypatch.setattr(compile_choice, "record_seconds", lambda seconds, recipe, known: None)

    def choice(batch_size: int) -> compile_choice.Choice:
        parts = make_parts(tiny, compile="off", batch_size=str(batch_size))
        monkeypatch.setattr(parts.step, "world", replace(parts.world, device=torch.device("cuda")))
        found = choose_for(parts.config, parts.step, parts.feed, num_steps=15_000)  # saves 15 s of 150
        if batch_size == 4:
            compile_choice.compile_and_record(parts.config, parts.step, next(parts.feed.steps(0, 4)))
        return found

    assert not choice(4).compiles
    again = choice(4)
    assert again.compiles and "kernels of an earlier run" in again.note
    monkeypatch.setattr(compile_choice, "time_step", lambda step, batch: 0.005)
    assert choice(4).note == again.note, "the step of these networks is timed only once"
    assert not choice(8).compiles, "another batch size needs other kernels"
    shutil.rmtree(tmp_path / "kernels")
    assert not choice(4).compiles, "the kernels were deleted"


def test_a_cache_folder_that_cannot_be_written_ends_no_run(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, "")  # restored at the end
    monkeypatch.delenv(CACHE_VARIABLE)
    record_seconds(4.5, "mine")
    assert compile_cost("mine").origin == "built-in estimates"
    assert compile_networks(make_parts(tiny, compile="off").recipe)
    assert str(tmp_path) not in os.environ.get(CACHE_VARIABLE, "")


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("content", ['{"machine": {"host": "other"}, "gains": {"": 0.9}}', "[]", "{", '{"gains": 3}'])
def test_a_table_from_another_machine_or_a_damaged_one_is_ignored(content: str) -> None:
    cache_file(TABLE).parent.mkdir(parents=True)
    cache_file(TABLE).write_text(content)
    assert compile_cost("mine").origin == "built-in estimates"
    record_gain(0.2, "mine")
    assert json.loads(cache_file(TABLE).read_text())["gains"] == {"mine": 0.2}


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
    monkeypatch.setattr(build, "compile_and_record", lambda *_: pytest.fail("the networks are compiled"))
    assert run([*command, "--out", str(tmp_path / "run"), "--compile", "on"]) == 2
    assert "trained with different settings (compile: off → on)" in capsys.readouterr().err


def test_two_ranks_reject_other_settings_in_one_line(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--accelerator", "cpu", "--devices", "2", "--images", "80", "--out", "run")
    assert set(run_ranks(tmp_path, 2, *command)) == {0}
    rejected = run_fork(tmp_path, *command, "--compile", "on")
    assert rejected.wait() == 2 and len(rejected.stderr.splitlines()) == 1, rejected.stderr
    assert "trained with different settings (compile: off → on)" in rejected.stderr


def test_a_run_does_not_switch_between_compiled_and_eager_networks() -> None:
    config = make_config("classification", compile="off")
    assert changed_settings(config.values(), config.with_run(compile="on")) == ["compile: off → on"]


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


@pytest.mark.parametrize("words", [["--compile", "maybe"], ["--compile=maybe"]], ids=" ".join)
def test_an_unknown_value_of_compile_is_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "classification", *words]) == 2
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
    mirror = Mirror(tmp_path / "run", open_destination(url, "--mirror"), url, "one", every=0.05)
    mirror.check()
    mirror.begin()
    assert "is complete" in mirror.finish(60)
    world, fresh = World(Place(), None), RunFolder(tmp_path / "fresh")  # type: ignore[arg-type]
    assert recorded_choice(fresh, world, url) == "on"
    assert recorded_choice(fresh, world, f"file://{tmp_path}/nothing") == ""
    assert not fresh.path.exists()


def test_a_step_that_runs_out_of_memory_while_it_is_timed_is_left_to_the_loop_which_explains_it(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(tiny, compile="off")

    def run_out(step: Step, batch: Batch) -> float:
        step.dry_run(dict(batch))
        for weight in step.recipe.parameters():
            weight.grad = torch.ones_like(weight)
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(compile_choice, "time_step", run_out)
    monkeypatch.setattr(parts.step, "world", replace(parts.world, device=torch.device("cuda")))
    choice = choose_for(parts.config, parts.step, parts.feed, num_steps=10**9)
    assert not choice.compiles and "out of memory" in choice.note
    assert all(weight.grad is None or not weight.grad.any() for weight in parts.recipe.parameters())


def test_networks_with_synchronised_batchnorm_are_not_compiled_unless_requested(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(tiny, compile="off")
    for name, network in parts.recipe.networks.items():
        setattr(parts.recipe, name, synchronize(network, ours=True))
    monkeypatch.setattr(parts.step, "world", replace(parts.world, device=torch.device("cuda")))
    choice = choose_for(parts.config, parts.step, parts.feed, num_steps=10**9)
    assert not choice.compiles and "BatchNorm" in choice.note and "--compile on" in choice.note


def test_the_time_of_a_step_counts_how_often_each_phase_runs() -> None:
    phases = (Phase("generator", "g"), Phase("critic", "c", repeat=5), Phase("penalty", "c", every=16))
    assert average_seconds(phases, [0.010, 0.002, 0.032]) == pytest.approx(0.010 + 5 * 0.002 + 0.032 / 16)


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
    monkeypatch.delenv(TRITON_VARIABLE, raising=False)
    assert describe_kernel_cache() == f"compiled kernels: {tmp_path / 'kernels'} (3 MB)"
    monkeypatch.setenv(TRITON_VARIABLE, "/elsewhere")
    assert "/elsewhere" in describe_kernel_cache()


def test_a_gain_that_cannot_be_saved_is_reported_and_ends_no_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def measure(task: Task, config: Config) -> int:
        Path(json.loads(task.arguments)[0][0]).write_text('{"gain": 0.25}')
        return 0

    monkeypatch.setattr(doctor, "run_in_processes", measure)
    line = doctor._measure_compile_gain()
    assert "save 25% of the step time; not saved" in line and str(tmp_path / "cache") in line
