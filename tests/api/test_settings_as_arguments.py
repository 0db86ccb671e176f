"""The keyword parameters of `train` and `verify` match run settings in name, type and effect."""

from __future__ import annotations

import collections.abc
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import paceline
from paceline.commands import train as train_command
from paceline.commands import verify as verify_command
from paceline.config.flags import SETTINGS_NOT_IN_VERIFY
from paceline.config.resolve import Config
from paceline.config.settings import LearnerSettings, RunSettings
from paceline.core import types
from paceline.core.errors import UserError

SETTINGS = get_type_hints(RunSettings) | get_type_hints(LearnerSettings)
# Some string settings also accept the type that the string represents.
WIDER = {"batch_size": int | str} | dict.fromkeys(("data", "data_root", "out", "init_from", "strategy"), types.StrPath)
# A non-default value for each type, and valid values for string settings that are validated.
OTHER = {bool: True, int: 2, float: 0.5, str: "other"}
OTHER_TEXT = {"preset": "quick", "batch_size": "16", "data": "mnist", "strategy": "single"}


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type of each keyword-only parameter, except `trust`, which is not a setting."""
    names = {name: getattr(paceline, name) for name in paceline.__all__} | vars(types) | {"Literal": Literal}
    hints = get_type_hints(function, localns=names | vars(collections.abc))
    parameters = inspect.signature(function).parameters.values()
    return {one.name: hints[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "trust"}


@pytest.mark.parametrize("function", [paceline.train, paceline.verify])
def test_keyword_parameters_match_settings_in_name_and_type(function: Callable[..., Any]) -> None:
    for name, hint in keywords(function).items():
        assert name in SETTINGS, f"{name} is not a setting"
        assert name not in WIDER or SETTINGS[name] is str
        default = inspect.signature(function).parameters[name].default
        expected = WIDER.get(name, SETTINGS[name])
        assert get_args(hint | None) == get_args(expected | None) and (default is None or hint is expected), name


def test_verify_has_no_parameter_that_the_verify_command_rejects() -> None:
    assert not keywords(paceline.verify).keys() & set(SETTINGS_NOT_IN_VERIFY)
    assert keywords(paceline.verify).keys() < keywords(paceline.train).keys()


@pytest.mark.parametrize("function", [paceline.train, paceline.load, paceline.verify])
def test_a_docstring_describes_every_parameter_in_order(function: Callable[..., Any]) -> None:
    section = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(function) or "", re.DOTALL)
    assert section
    assert re.findall(r"^    \**(\w+): [A-Z\"]", section[1], re.MULTILINE) == [*inspect.signature(function).parameters]


def other_value(name: str) -> Any:
    """Return a non-default value for a setting."""
    hint = SETTINGS[name]
    return get_args(hint)[1] if get_origin(hint) is Literal else OTHER_TEXT.get(name) or OTHER[hint]


def test_each_parameter_changes_the_setting_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "train_and_report", lambda config: config)
    for name in keywords(paceline.train):
        value = other_value(name)
        given = Path(value) if WIDER.get(name) is types.StrPath else value
        config: Any = paceline.train("classification", **{"accelerator": "cpu", name: given})
        assert getattr(config.learner if name == "lr" else config.run, name) == value
    seen: list[Config] = []
    monkeypatch.setattr(verify_command, "differences", lambda config, *_: seen.append(config) or [])
    for name in keywords(paceline.verify):
        value = 3 if name == "devices" else other_value(name)
        assert paceline.verify("classification", **{"accelerator": "cpu", name: value}).ok
        assert getattr(seen[-1].run, name) == value


def test_passing_none_selects_the_recipe_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "train_and_report", lambda config: config)
    nothing: dict[str, Any] = dict.fromkeys(keywords(paceline.train)) | {"accelerator": "cpu"}
    assert paceline.train("dcgan", **nothing) == paceline.train("dcgan", accelerator="cpu")


def test_a_wrong_type_is_reported_under_the_name_that_the_setting_has() -> None:
    with pytest.raises(UserError, match=r"^width: "):
        paceline.train("classification", accelerator="cpu", width="wide")
    with pytest.raises(UserError, match=r"^--epochs: "):
        paceline.train("classification", accelerator="cpu", epochs="many")


def test_a_recipe_may_be_given_as_a_path(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    monkeypatch.setattr(train_command, "train_and_report", lambda config: config)
    config: Any = paceline.train(Path(tiny), accelerator="cpu", width=2)
    assert config.recipe_name == tiny and config.recipe.width == 2
