"""Settings are checked against their bounds, keep their types in files, and every line of a file is read."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.configure import configure
from paceline.config.files import changed_settings, identity, parse_assignments, read_file, to_toml
from paceline.config.resolve import Arguments, Config, resolve
from paceline.config.settings import BOUNDS, LearnerSettings, RunSettings, Span, setting
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.runs.recipe import resolve_config
from paceline.runs.weights import weights_metadata

# Bounds


@dataclass(frozen=True)
class OwnSettings:
    share: float = setting(0.5, "a fraction", above=0, at_most=1)
    plain: int = 3  # a plain field, declared without `setting()`


class OwnRecipe(Recipe):
    Settings = OwnSettings


def resolved(**settings: Any) -> Any:
    return resolve("own", OwnRecipe, [("--set", settings)])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"share": 0}, "share=0: must be above 0 and at most 1"),
        ({"share": 1.5}, "share=1.5: must be above 0 and at most 1"),
        ({"devices": 0}, "--devices 0: must be at least 1"),
        ({"split_seed": 2**63}, f"split_seed={2**63}: must be at least 0 and below {2**63}"),
        ({"beta1": 1}, "beta1=1: must be at least 0 and below 1"),
        ({"lr": -0.1}, "--lr -0.1: must be at least 0"),
        ({"generator": {"lr": -0.1}}, "generator.lr=-0.1: must be at least 0"),
        ({"lr": -0.1, "generator.lr": 0.1}, "--lr -0.1: must be at least 0"),
    ],
)
def test_a_value_out_of_bounds_is_reported_with_the_bounds(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(**given)
    assert str(caught.value) == line


def test_a_span_that_is_too_long_to_count_is_rejected() -> None:
    for name in ("save_every", "evaluate_every", "log_every", "burn_in", "ema_half_life", "warmup"):
        for amount, unit in (("1e400", "images"), ("1e308", "epochs"), ("1e17k", "images")):
            with pytest.raises(UserError) as caught:
                resolved(**{name: f"{amount} {unit}"})
            assert str(caught.value) == f"{name}='{amount} {unit}': must be at most 1e+18 {unit}"
    span = Span.parse("1e18 epochs", "warmup")  # longer than the run
    assert span.to_images(epoch=10**9, step=8, total=80) == round(1e27)


def test_a_span_of_zero_needs_no_unit() -> None:
    assert Span.parse("0", "ema_half_life") == Span.parse("0 images", "ema_half_life")
    for given in ("0", 0):
        resolved(ema_half_life=given, burn_in=given, warmup=given)
    with pytest.raises(UserError, match="evaluate_every='0': must be greater than 0; use 'never' to switch it off"):
        resolved(evaluate_every="0")
    with pytest.raises(UserError, match="warmup='5': expected a span like '5 epochs'"):
        Span.parse("5", "warmup")


def test_an_invalid_span_of_one_network_is_reported_with_the_name_of_the_network() -> None:
    with pytest.raises(UserError, match=r"^classifier\.warmup='5 epohs': expected a span"):
        resolved(**{"classifier.warmup": "5 epohs"})


def test_the_bounds_themselves_are_accepted() -> None:
    config = resolved(share=1, plain=-5, seed=2**63 - 1, clip=0, generator={"momentum": 0})
    assert (config.recipe.share, config.recipe.plain, config.run.seed) == (1, -5, 2**63 - 1)


def test_every_numeric_setting_has_bounds() -> None:
    unbounded = {
        f.name
        for group in (RunSettings, LearnerSettings)
        for f in dataclasses.fields(group)
        if f.type in ("int", "float") and not f.metadata["bounds"]
    }
    assert not unbounded
    assert set(RunSettings.__dataclass_fields__["seed"].metadata["bounds"]) <= set(BOUNDS)


def test_integers_keep_every_digit() -> None:
    for text, number in (("9007199254740993", 2**53 + 1), ("5e4", 50_000), ("3.0", 3), (7.0, 7), (-0.0, 0)):
        assert resolved(plain=text).recipe.plain == number
    for text in ("3.5", "many", "", "inf", "nan", 2.5, None, True):
        with pytest.raises(UserError, match="is not a whole number"):
            resolved(plain=text)
    for name, kind in (("lr", "a number"), ("devices", "a whole number"), ("data_root", "text")):
        with pytest.raises(UserError, match=f"^--set {name}: True is not {kind}$"):
            resolved(**{name: True})


# Arguments: tables of settings


def classification(*layers: Any) -> Config:
    return resolve_config("classification", [("--set", layer) for layer in layers])


def given(*words: str) -> Arguments:
    return classification(parse_assignments(f"network_args.{word}" for word in words)).recipe.network_args


def test_text_from_the_command_line_becomes_the_type_it_looks_like() -> None:
    for text, value in (
        *(("7", 7), ("1e-6", 1e-6), ("true", True), ("False", False), ("avg", "avg"), ("[3,3,9,3]", [3, 3, 9, 3])),
        *(("", ""), ('"7"', "7"), ("null", "null")),
    ):
        (found,) = given(f"x={text}").values()
        assert found == value and type(found) is type(value)
    for text in ("[1,", "[[1]]", '{"a": 1}', "NaN", "Infinity"):
        with pytest.raises(UserError, match=r"--set network_args\.x"):
            given(f"x={text}")
    with pytest.raises(UserError, match=r"--set network_args: is a table"):
        classification(parse_assignments(["network_args=5"]))
    with pytest.raises(UserError, match="unknown setting"):
        resolve_config("dcgan", [("--set", {"network_args.x": 1})])


def test_later_layers_override_single_entries_of_a_table() -> None:
    config = classification({"network_args": {"a": 1, "b": 2}}, {"network_args.b": 3}, {"network-args": {"c": "7"}})
    assert config.recipe.network_args == {"a": 1, "b": 3, "c": "7"}


def test_arguments_survive_a_settings_file_with_their_types(tmp_path: Path) -> None:
    arguments = {"rate": 0.1, "count": 7, "flag": True, "name": "7", "sizes": [1, 2]}
    config = classification({"network_args": arguments})
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config.values(), {}))
    assert tomllib.loads(file.read_text())["network_args"] == arguments
    again = resolve_config("classification", [("--config", read_file(str(file)))])
    assert again.recipe == config.recipe and hash(again.recipe) == hash(config.recipe)
    assert changed_settings(read_file(str(file)), config) == []


def test_a_resumed_run_must_keep_its_arguments() -> None:
    kept = {"network_args": {"rate": 0.1}}
    assert "network_args.rate: 0.1 → 0.2" in changed_settings(kept, classification({"network_args.rate": 0.2}))
    assert "network_args.rate: 0.1 → None" in changed_settings(kept, classification({}))
    assert changed_settings({"network": ""}, classification({"network": "vit"})) == ["network: '' → vit"]


def test_a_setting_that_an_older_run_lacks_counts_as_its_default_on_resume() -> None:
    older = {name: value for name, value in classification({}).values().items() if name != "label_smoothing"}
    assert changed_settings(older, classification({})) == []
    assert changed_settings(older, classification({"label_smoothing": 0.5})) == ["label_smoothing: 0.0 → 0.5"]


def test_a_run_keeps_its_identity_when_a_newer_version_adds_a_setting() -> None:
    @dataclass(frozen=True)
    class Older:
        width: int = setting(8, "width", at_least=1)

    @dataclass(frozen=True)
    class Newer(Older):
        depth: int = setting(2, "depth", at_least=1)

    def identity_of(settings: type[Any], **given: Any) -> str:
        recipe = type("Own", (Recipe,), {"Settings": settings})
        return identity(resolve("own", recipe, [("--set", given)]), "data")

    assert identity_of(Older, width=16) == identity_of(Newer, width=16)
    assert len({identity_of(Older), identity_of(Older, width=16), identity_of(Newer, depth=3)}) == 3


@pytest.mark.parametrize("nested", [True, False])
def test_a_weights_file_contains_the_arguments_but_no_settings_of_single_networks(nested: bool) -> None:
    table = {"network_args": {"depths": [1, 1]}} if nested else {"network_args.depths": [1, 1]}
    settings = {"network": "timm:x", **table, "classifier": {"lr": 0.1}, "data": "digits"}
    stored = weights_metadata("classification", settings, DataSpec(1, 8, 8))["paceline.settings"]
    assert '"network_args.depths": [1, 1]' in stored and "lr" not in stored


# Files


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [
        ("own.ini", "[training]\nwarmup = 50%\n", {"warmup": "50%"}),
        ("own.ini", "[DEFAULT]\nepochs = 3\n", {"epochs": "3"}),
        ("own.ini", "[generator]\nlr = 0.3\n[discriminator]\nlr = 0.3\n", {"lr": "0.3"}),
        ("own.toml", 'epochs = "3"\n', {"epochs": "3"}),
    ],
)
def test_every_line_of_a_settings_file_is_read(tmp_path: Path, name: str, text: str, settings: dict[str, str]) -> None:
    for encoding in ("utf-8", "utf-8-sig"):  # with and without a byte order mark
        (tmp_path / name).write_text(text, encoding=encoding)
        assert read_file(str(tmp_path / name)) == settings


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.ini", "[g]\nlr = 0.3\n[d]\nlr = 0.2\n", r"a\.ini: lr is 0\.3 in \[g\] and 0\.2 in \[d\], .*TOML"),
        ("a.yaml", "lr: 0.1\n", r"a\.yaml: .*; use a TOML or INI file$"),
        ("a.toml", "epochs = 3\n[provenance]\nformat = 1\n", r"run format 1, .*: copy the settings that you need into"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_with_what_to_do(
    tmp_path: Path, name: str, text: str, line: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=line):
        read_file(str(tmp_path / name))
    with pytest.raises(UserError, match=r": a folder; use a TOML or INI file, such as the config\.toml in a run"):
        read_file(str(tmp_path))


@pytest.mark.parametrize("text", ['diffaugment = "color"', 'preset = "cifar10_reference"'])
def test_settings_of_another_recipe_are_reported_with_the_name_of_that_recipe(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'recipe = "dcgan"\n{text}\n')
    with pytest.raises(UserError, match=r"^--config .*config\.toml: is for recipe 'dcgan' .*; use recipe 'dcgan', or"):
        configure("classification", {}, config_file=str(file))


def test_a_file_of_another_recipe_is_accepted_if_its_settings_fit(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('recipe = "dcgan"\nepochs = 3\n')
    assert configure("classification", {}, config_file=str(file)).run.epochs == 3
    with pytest.raises(UserError, match=r"^--set: unknown setting 'epocs'; did you mean 'epochs'"):
        configure("classification", {}, config_file=str(file), assignments=["epocs=3"])


def test_an_empty_preset_on_the_command_line_overrides_the_preset_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('preset = "quick"\nlr = 0.3\n')
    without = configure("classification", {}).recipe
    assert configure("classification", {}, config_file=str(file)).recipe != without
    for flags, assignments in (({"preset": ""}, []), ({}, ["preset="])):
        config = configure("classification", flags, config_file=str(file), assignments=assignments)
        assert config.run.preset == "" and config.recipe == without and config.learner.lr == 0.3
