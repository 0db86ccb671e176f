"""Names such as `timm:NAME` select networks from other libraries; mistakes are one-line errors."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.models import networks
from paceline.models.networks import NetworkChoice, NetworkTask

TASK = NetworkTask(3, 32, 32, num_classes=10)


def choose(name: str, **arguments: object) -> NetworkChoice:
    return NetworkChoice(name, arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resnet18", "timm:", ":resnet18"])
def test_a_name_without_provider_or_architecture_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match="timm"):
        networks.make_network(choose(name), TASK)


def test_an_unknown_provider_is_rejected_with_the_closest_name() -> None:
    with pytest.raises(UserError, match="unknown provider 'tim'; did you mean 'timm'"):
        networks.make_network(choose("tim:resnet18"), TASK)


@pytest.mark.parametrize("provider", networks.PROVIDERS)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "is_installed", lambda module: False)
    with pytest.raises(UserError, match=rf"pip install 'paceline\[{provider}\]'"):
        networks.make_network(choose(f"{provider}:x"), TASK)


def test_a_network_that_maps_images_to_images_is_rejected_as_a_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "_load", lambda name: None)
    with pytest.raises(UserError, match="spandrel:NAFNet: maps images to images; this recipe needs a classifier"):
        networks.make_network(choose("spandrel:NAFNet"), TASK)
    with pytest.raises(UserError, match="this recipe needs a classifier"):
        networks.load_classifiers("spandrel:NAFNet")


def fail() -> None:
    raise TypeError("first line\nsecond line")


def test_an_argument_with_a_bad_value_is_one_line_with_the_arguments() -> None:
    with pytest.raises(UserError) as caught:
        choose("timm:x", depths="many").build(fail)  # type: ignore[arg-type]
    assert "depths=many (TypeError: first line second line)" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nafnet", "NAFNett", "NAF"])
def test_similar_names_are_suggested_whatever_the_case(name: str) -> None:
    error = NetworkChoice(f"spandrel:{name}", {}).unknown(["NAFNet", "SwinIR"])
    assert str(error).endswith("did you mean spandrel:NAFNet?")
