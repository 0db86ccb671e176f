"""Plugins from packages and user files work like built-in plugins, and broken plugins affect no others."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import Running, run_fork, start_function_in_ranks, weights_of

from paceline.cli.app import run
from paceline.config.resolve import source_settings
from paceline.contracts.recipe import Recipe
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.core.registry import ANNOUNCED
from paceline.data.source import Source
from paceline.parallel.strategy import Strategy

EXAMPLE = Path(__file__).parents[1] / "examples" / "paceline-example"
SHORT = ("--images", "48", "--set", "width=2", "--accelerator", "cpu")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example package and return the folder that contains it."""
    copy = shutil.copytree(
        EXAMPLE, tmp_path_factory.mktemp("source") / "example"
    )  # pip modifies the folder it installs from
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    install += ["--no-build-isolation", "--no-index", "--target", str(target), str(copy)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def from_example(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example package importable in this process."""
    monkeypatch.syspath_prepend(example)
    for name in [name for name in sys.modules if name.partition(".")[0] == "paceline_example"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an installed package whose plugins are all broken."""
    folder = tmp_path_factory.mktemp("broken")
    make_package(
        folder,
        "paceline-broken",
        {
            "recipes": {"rotnet": "broken_rotnet", "gone": "not_there", "nameless": "broken_fine:Absent"},
            "sources": {"halves": "broken_halves", "unset": "broken_unset"},
            "loaders": {"stuck": "broken_rotnet"},
            "strategies": {"leaving": "broken_leaving", "wrong": "broken_fine:Fine"},
            "evaluators": {"guess": "broken_rotnet"},
            "loggers": {"smoke": "broken_rotnet"},
            "importers": {"theirs": "broken_rotnet"},
        },
        broken_rotnet="'''Learns from rotations.'''\nimport a_module_that_is_not_there\n",
        broken_halves="class Halves(:\n",
        broken_unset="from paceline.data.source import Source\nclass Unset(Source):\n    Settings = 3\n",
        broken_leaving="import sys\nsys.exit(5)\n",
        broken_fine="class Fine:\n    pass\n",
    )
    return folder


def make_package(folder: Path, name: str, plugins: dict[str, dict[str, str]], **modules: str) -> None:
    """Write a package as pip would install it, with the given modules and plugins."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    metadata = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [
        line
        for group, entries in plugins.items()
        for line in (f"[paceline.{group}]", *(f"{entry} = {value}" for entry, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def start_with(package: Path, folder: Path, *words: str) -> Running:
    """Start a `paceline` command with the given package importable, also in the processes that the command starts."""
    return start_function_in_ranks(folder, 1, run_with, str(package), words)[0]


def run_with(package: str, words: tuple[str, ...]) -> int:
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    return run(list(words))


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


# Plugins from installed packages


@pytest.mark.usefixtures("from_example")
def test_installed_plugins_are_described_without_being_imported_and_may_refer_to_a_module_or_a_class() -> None:
    assert {"rotation", "classification"} <= set(registry.names("recipe"))
    assert {"shapes", "digits"} <= set(registry.names("source"))
    assert registry.about("recipe", "rotation").startswith("Rotation: a network learns to predict by which multiple of")
    assert registry.about("source", "shapes").startswith("Labelled images of upright arrows, houses and Ts")
    assert "paceline_example" not in sys.modules
    assert registry.load_class("recipe", "rotation", Recipe).__name__ == "Rotation"
    assert registry.load_class("source", "shapes", Source).__name__ == "Shapes"
    assert "'shapes'" in source_settings()["noise"]
    assert not registry.plugin_problems()


@pytest.mark.parametrize("kind", registry.KINDS.values(), ids=lambda kind: kind.name)
def test_a_package_can_add_plugins_of_every_kind(
    kind: registry.Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(
        tmp_path,
        "paceline-more",
        {kind.group.removeprefix("paceline."): {"extra": "more_extra:Extra"}},
        more_extra="'''More.'''\n\nclass Extra:\n    '''One more.'''\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "more_extra", raising=False)
    assert "extra" in registry.names(kind.name) and registry.about(kind.name, "extra") == "One more."
    assert registry.load_class(kind.name, "extra", object).__name__ == "Extra"
    others = set(registry.KINDS) - {kind.name}
    assert not [other for other in others if "extra" in registry.names(other)]


def test_settings_train_and_verify_work_with_an_installed_recipe_and_source(example: Path, tmp_path: Path) -> None:
    listed = start_with(example, tmp_path, "settings", "rotation", "--data", "shapes")
    trained = start_with(example, tmp_path, "train", "rotation", "--data", "shapes", *SHORT, "--out", "run")
    assert listed.wait() == 0, listed.stderr
    assert "source shapes" in listed.stdout and "standard deviation of the noise" in listed.stdout
    assert trained.wait() == 0, trained.stderr
    assert "validation/top1" in trained.stdout and weights_of(tmp_path / "run")
    # With ddp, the worker processes must find the plugins, too.
    words = ("verify", "rotation", "--data", "shapes", "--accelerator", "cpu", "--strategies", "single,ddp")
    verified = start_with(example, tmp_path, *words, "--steps", "3")
    assert verified.wait() == 0, verified.stdout + verified.stderr
    assert "rotation on shapes" in verified.stdout and "gradients" in verified.stdout


# Plugins that cannot be loaded

MODULE = "cannot be imported: ModuleNotFoundError: No module named"
FAULTS = {
    "rotnet": f"{MODULE} 'a_module_that_is_not_there'; uninstall or repair it",
    "gone": f"{MODULE} 'not_there'; uninstall or repair it",
    "nameless": "cannot be imported: AttributeError: module 'broken_fine' has no attribute 'Absent'; uninstall or",
    **dict.fromkeys(("stuck", "guess", "smoke", "theirs"), f"{MODULE} 'a_module_that_is_not_there'; uninstall or"),
    "halves": "cannot be imported: SyntaxError: invalid syntax (broken_halves.py, line 1); uninstall or repair it",
    "leaving": "cannot be imported: SystemExit: 5; uninstall or repair it",
}


def test_the_settings_command_lists_broken_plugins_with_their_package(
    broken: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(broken)
    assert run(["settings"]) == 0
    printed = capsys.readouterr().out
    assert "1,797 handwritten digits" in printed and "Learns from rotations." in printed
    for name, fault in FAULTS.items():
        (line,) = [line for line in printed.splitlines() if line.startswith(f"plugin {name!r}")]
        assert line.startswith(f"plugin {name!r} from package paceline-broken 0.1: {fault}")


def test_an_entry_point_that_refers_to_an_unrelated_class_is_reported(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(broken)
    with pytest.raises(UserError, match=r"'wrong' from package paceline-broken 0.1: defines no subclass of Strategy"):
        registry.load_class("strategy", "wrong", Strategy)


def test_a_broken_package_does_not_affect_commands_that_do_not_use_it(broken: Path, tiny: str, tmp_path: Path) -> None:
    trained = start_with(broken, tmp_path, "train", tiny, *SHORT, "--out", "run")
    rejected = start_with(broken, tmp_path, "train", tiny, "--set", "low_root=x")  # loads all source classes
    doctor = start_with(broken, tmp_path, "doctor")
    used = start_with(broken, tmp_path, "train", tiny, "--strategy", "leaving")
    assert trained.wait() == 0 and not trained.stderr, trained.stderr
    assert rejected.wait() == 2 and "low_root belongs to source" in rejected.stderr
    assert doctor.wait() == 0, doctor.stderr
    assert used.wait() == 2
    assert used.stderr == f"paceline: plugin 'leaving' from package paceline-broken 0.1: {FAULTS['leaving']}\n"


# Plugins with equal names


def test_a_package_with_damaged_metadata_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("unrelated", b"[console_scripts]\nx = \xff\xfe:main\n"),
        ("damaged", b"[paceline.recipes]\nx\n"),
    ):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "classification" in registry.names("recipe")


def test_a_built_in_plugin_is_used_instead_of_an_installed_one_with_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_package(tmp_path, "paceline-dcgan", {"recipes": {"dcgan": "their_dcgan"}}, their_dcgan="raise SystemError\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ANNOUNCED, "")
    for _ in range(2):
        assert registry.load_class("recipe", "dcgan", Recipe).__module__ == "paceline.recipes.dcgan"
    line = (
        "plugin 'dcgan' from package paceline-dcgan 0.1: hidden by the built-in recipe 'dcgan'; rename or uninstall it"
    )
    assert capsys.readouterr().err == f"{line}\n"
    assert registry.plugin_problems() == [line] and registry.names("recipe").count("dcgan") == 1


def test_two_installed_plugins_with_the_same_name_are_reported_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("paceline-one", "paceline-two"):
        make_package(tmp_path, name, {"recipes": {"mine": "some_recipe"}})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        registry.load_class("recipe", "mine", Recipe)
    assert "paceline-one 0.1" in one_line(error) and "paceline-two 0.1" in one_line(error)
    assert len(registry.plugin_problems()) == 1 and "uninstall all but one" in registry.plugin_problems()[0]


# Plugins in the user's own files

OWN_STRATEGY = """
from paceline.parallel.strategies.ddp import DistributedDataParallel

class Mine(DistributedDataParallel):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.notes.append(f"my strategy has {self.world.size} devices")
"""
OWN_LOADER = """
import torch
from paceline.data.loader import Loader
from paceline.data.stream import channels_first, upload

class Mine(Loader):
    def fetch(self, requests):
        print("my loader reads", flush=True)
        for tickets in requests:
            arrays = {**self.source.read_many(tickets.index), "index": tickets.index, "uniforms": tickets.uniforms}
            yield channels_first(upload({name: torch.from_numpy(a) for name, a in arrays.items()}, self.device))
"""


def test_a_run_with_a_user_loader_equals_a_run_with_a_built_in_loader(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "my_loader.py").write_text(OWN_LOADER)
    ours = run_fork(tmp_path, "train", tiny, *SHORT, "--loader", "workers", "--out", "ours")
    own = run_fork(tmp_path, "train", tiny, *SHORT, "--loader", "./my_loader.py", "--out", "own")
    assert ours.wait() == own.wait() == 0, own.stderr
    assert "running the code in my_loader.py" in own.stdout and "my loader reads" in own.stdout
    (ours_state, own_state) = (weights_of(tmp_path / name) for name in ("ours", "own"))
    assert own_state["state.safetensors"] == ours_state["state.safetensors"]


@pytest.mark.slow
def test_train_and_verify_work_with_a_user_strategy(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "my_strategy.py").write_text(OWN_STRATEGY)
    own = ("--strategy", "./my_strategy.py", "--devices", "2")
    trained = run_fork(tmp_path, "train", tiny, *SHORT, *own, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    assert trained.stdout.count("running the code in my_strategy.py") == 1
    assert "my strategy has 2 devices" in trained.stdout
    words = ("verify", tiny, "--accelerator", "cpu", "--strategies", "single,./my_strategy.py", "--steps", "3")
    verified = run_fork(tmp_path, *words)
    assert verified.wait() == 0, verified.stdout + verified.stderr


def test_a_user_source_works_with_a_user_recipe(tiny: str, tmp_path: Path) -> None:
    assert run_fork(tmp_path, "new", "source", "my_source").wait() == 0
    trained = run_fork(tmp_path, "train", tiny, *SHORT, "--data", "./my_source.py", "--out", "run")
    assert trained.wait() == 0, trained.stderr
    assert "data ./my_source.py: 900 train" in trained.stdout


@pytest.mark.slow  # waits for the timeout of a real process
def test_a_run_that_waits_for_a_mirror_that_does_not_answer_ends_after_the_timeout(tiny: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        words = ("train", tiny, "--resume-from", url, "--timeout", "2", "--out", "run")
        running = start_with(tmp_path, tmp_path, *words)
        assert running.wait() == 2
    (line,) = [line for line in running.stderr.splitlines() if line.startswith("paceline: ")]
    assert "no progress for " in line and "Traceback" not in running.stderr
