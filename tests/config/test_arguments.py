"""A setting can be a table of named values (`network_args`), whose entries keep their types in every file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.config.files import changed_settings, identity, parse_assignments, read_file, to_toml
from paceline.config.resolve import Arguments, Config, resolve
from paceline.config.settings import setting
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.data.source import RegisteredSources
from paceline.runs.recipe import resolve_config
from paceline.runs.weights import weights_metadata


def resolved(*layers: Any) -> Config:
    return resolve_config("classification", [("--set", layer) for layer in layers])


def given(*words: str) -> Arguments:
    return resolved(parse_assignments(f"network_args.{word}" for word in words)).recipe.network_args


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("1e-6", 1e-6),
        ("true", True),
        ("False", False),
        ("avg", "avg"),
        ("[3,3,9,3]", [3, 3, 9, 3]),
        ("", ""),
        ('"7"', "7"),
        ("null", "null"),
    ],
)
def test_text_from_the_command_line_becomes_the_type_it_looks_like(text: str, value: object) -> None:
    (found,) = given(f"x={text}").values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["[1,", "[[1]]", '{"a": 1}', "NaN", "Infinity"])
def test_a_value_that_is_no_number_text_or_list_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match=r"--set network_args\.x"):
        given(f"x={text}")


def test_a_table_cannot_be_set_as_a_whole_from_text() -> None:
    with pytest.raises(UserError, match=r"--set network_args: is a table"):
        resolved(parse_assignments(["network_args=5"]))


def test_later_layers_override_single_entries_of_a_table() -> None:
    config = resolved({"network_args": {"a": 1, "b": 2}}, {"network_args.b": 3}, {"network-args": {"c": "7"}})
    assert config.recipe.network_args == {"a": 1, "b": 3, "c": "7"}


def test_arguments_survive_a_settings_file_with_their_types(tmp_path: Path) -> None:
    arguments = {"rate": 0.1, "count": 7, "flag": True, "name": "7", "sizes": [1, 2]}
    config = resolved({"network_args": arguments})
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config.values(), {}))
    assert tomllib.loads(file.read_text())["network_args"] == arguments
    again = resolve_config("classification", [("--config", read_file(str(file)))])
    assert again.recipe == config.recipe and hash(again.recipe) == hash(config.recipe)
    assert changed_settings(read_file(str(file)), config) == []


def test_a_resumed_run_must_keep_its_arguments() -> None:
    kept = {"network_args": {"rate": 0.1}}
    assert "network_args.rate: 0.1 → 0.2" in changed_settings(kept, resolved({"network_args.rate": 0.2}))
    assert "network_args.rate: 0.1 → None" in changed_settings(kept, resolved({}))


def test_an_empty_value_is_shown_in_quotes() -> None:
    assert changed_settings({"network": ""}, resolved({"network": "vit"})) == ["network: '' → vit"]


def test_a_setting_that_an_older_run_lacks_counts_as_its_default_on_resume() -> None:
    older = {name: value for name, value in resolved({}).values().items() if name != "label_smoothing"}
    assert changed_settings(older, resolved({})) == []
    assert changed_settings(older, resolved({"label_smoothing": 0.5})) == ["label_smoothing: 0.0 → 0.5"]


def test_a_run_keeps_its_identity_when_a_newer_version_adds_a_setting() -> None:
    @dataclass(frozen=True)
    class Older:
        width: int = setting(8, "width", at_least=1)

    @dataclass(frozen=True)
    class Newer(Older):
        depth: int = setting(2, "depth", at_least=1)

    def identity_of(settings: type[Any], **given: Any) -> str:
        recipe = type("Own", (Recipe,), {"Settings": settings})
        return identity(resolve("own", recipe, [("--set", given)], RegisteredSources()), "data")

    assert identity_of(Older, width=16) == identity_of(Newer, width=16)
    assert len({identity_of(Older), identity_of(Older, width=16), identity_of(Newer, depth=3)}) == 3


@pytest.mark.parametrize("nested", [True, False])
def test_a_weights_file_contains_the_arguments_but_no_settings_of_single_networks(nested: bool) -> None:
    table = {"network_args": {"depths": [1, 1]}} if nested else {"network_args.depths": [1, 1]}
    settings = {"network": "timm:x", **table, "classifier": {"lr": 0.1}, "data": "digits"}
    stored = weights_metadata("classification", settings, DataSpec(1, 8, 8))["paceline.settings"]
    assert '"network_args.depths": [1, 1]' in stored and "lr" not in stored


def test_a_recipe_without_such_a_table_rejects_its_entries() -> None:
    with pytest.raises(UserError, match="unknown setting"):
        resolve_config("dcgan", [("--set", {"network_args.x": 1})])
