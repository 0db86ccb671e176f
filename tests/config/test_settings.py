"""Settings are checked against their bounds, and large integers stay exact."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.config.resolve import resolve
from paceline.config.settings import BOUNDS, LearnerSettings, RunSettings, setting
from paceline.config.spans import Span
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.data.source import RegisteredSources


@dataclass(frozen=True)
class OwnSettings:
    share: float = setting(0.5, "a fraction", above=0, at_most=1)
    plain: int = 3  # a plain field, declared without `setting()`


class OwnRecipe(Recipe):
    Settings = OwnSettings


def resolved(**settings: Any) -> Any:
    return resolve("own", OwnRecipe, [("--set", settings)], RegisteredSources())


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


@pytest.mark.parametrize("name", ["save_every", "evaluate_every", "log_every", "burn_in", "ema_half_life", "warmup"])
@pytest.mark.parametrize(("amount", "unit"), [("1e400", "images"), ("1e308", "epochs"), ("1e17k", "images")])
def test_a_span_that_is_too_long_to_count_is_rejected(name: str, amount: str, unit: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(**{name: f"{amount} {unit}"})
    assert str(caught.value) == f"{name}='{amount} {unit}': must be at most 1e+18 {unit}"


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


def test_a_span_may_be_longer_than_the_run() -> None:
    span = Span.parse("1e18 epochs", "warmup")
    assert span.to_images(epoch=10**9, step=8, total=80) == round(1e27)


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


@pytest.mark.parametrize(
    ("text", "number"), [("9007199254740993", 2**53 + 1), ("5e4", 50_000), ("3.0", 3), (7.0, 7), (-0.0, 0)]
)
def test_integers_keep_every_digit(text: Any, number: int) -> None:
    assert resolved(plain=text).recipe.plain == number


@pytest.mark.parametrize("text", ["3.5", "many", "", "inf", "nan", 2.5, None, True])
def test_values_that_are_not_integers_are_rejected(text: Any) -> None:
    with pytest.raises(UserError, match="is not a whole number"):
        resolved(plain=text)


@pytest.mark.parametrize(("name", "kind"), [("lr", "a number"), ("devices", "a whole number"), ("data_root", "text")])
def test_a_boolean_is_neither_a_number_nor_text(name: str, kind: str) -> None:
    for value in (True, False):
        with pytest.raises(UserError, match=f"^--set {name}: {value} is not {kind}$"):
            resolved(**{name: value})
