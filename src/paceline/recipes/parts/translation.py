"""The plan of an image translation (which panels are generated from which), and its networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from paceline.contracts.data_spec import SEGMENTATION, DataSpec
from paceline.core.errors import UserError, unknown
from paceline.models.layers import Norm
from paceline.models.pix2pix import MULTIPLE_PX, Padding, ResnetGenerator, UnetGenerator, smallest_side_px

PAPERS_FUSION = (0.25, 0.15, 0.25, 0.1, 0.25)  # DeepLIIF's weights for input, hematoxylin, DAPI, Lap2, marker


@dataclass(frozen=True)
class Plan:
    """The panels to generate from the input, and the weights of their losses."""

    modalities: tuple[str, ...]  # panels to generate, each with a separate generator
    fusion: tuple[float, ...]  # segmentation weights for the input and each modality; () if there are none
    generator_weights: dict[str, float]  # weight of each panel in the generators' loss
    discriminator_weights: dict[str, float]  # weight of each panel in the discriminators' loss

    @property
    def panels(self) -> tuple[str, ...]:
        """All panels to generate, with the segmentation last."""
        return self.modalities + ((SEGMENTATION,) if self.fusion else ())

    def segmenters(self) -> list[int]:
        """Return which images are segmented: 0 is the input, i is modality i. Images with weight 0 are omitted."""
        return [number for number, weight in enumerate(self.fusion) if weight]


def plan_pix2pix(spec: DataSpec, target: str) -> Plan:
    """Return a plan that generates one panel from the input."""
    if not spec.panels:
        raise _no_panels()
    if target and target not in spec.panels:
        raise UserError(f"target={target}: {unknown('panel', target, spec.panels)}")
    if not target and len(spec.panels) > 1:
        raise UserError(
            f"model=pix2pix generates one panel, but the data has {', '.join(spec.panels)}: "
            f"choose one with --set target={spec.panels[0]}, or --set model=deepliif"
        )
    one = {target or spec.panels[0]: 1.0}
    return Plan(tuple(one), (), one, one)


def plan_deepliif(spec: DataSpec, modalities: int, fusion: str, generators: str, discriminators: str) -> Plan:
    """Return a plan that generates every panel and segments the input and each modality."""
    if not spec.panels:
        raise _no_panels()
    names = tuple(panel for panel in spec.panels if panel != SEGMENTATION)
    if modalities and modalities != len(names):
        raise UserError(
            f"modalities={modalities}: the data has {len(names)}, not counting the input and the segmentation "
            f"({', '.join(names) or 'none'}); list its panels with --set panels=…"
        )
    if not names:
        raise UserError(
            "model=deepliif needs at least one modality besides the segmentation; add one, or use --set model=pix2pix"
        )
    segmented = SEGMENTATION in spec.panels
    weights: tuple[float, ...] = ()
    if segmented:
        weights = _weights("segmentation_weights", fusion, ("the input", *names)) or _usual_fusion(len(names))
    elif fusion:
        raise UserError(
            f"segmentation_weights={fusion}: the data has no panel {SEGMENTATION!r}; "
            "name it with --set panels=…, or remove the setting"
        )
    panels = names + ((SEGMENTATION,) if segmented else ())
    even = (1 / len(panels),) * len(panels)
    of_generators = _weights("generator_weights", generators, panels) or even
    of_discriminators = _weights("discriminator_weights", discriminators, panels) or even
    return Plan(
        names,
        weights,
        dict(zip(panels, of_generators, strict=True)),
        dict(zip(panels, of_discriminators, strict=True)),
    )


def _usual_fusion(modalities: int) -> tuple[float, ...]:
    return PAPERS_FUSION if modalities + 1 == len(PAPERS_FUSION) else (1 / (modalities + 1),) * (modalities + 1)


def _weights(name: str, text: str, of: tuple[str, ...]) -> tuple[float, ...]:
    """Parse comma-separated weights, one for each name in `of`; return () for an empty string."""
    if not text.strip():
        return ()
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"{name}={text}: expected numbers separated by commas") from None
    if len(weights) > len(of):
        raise UserError(f"{name}={text}: has {len(weights)} weights; expected {len(of)} ({', '.join(of)})")
    if len(weights) < len(of):
        raise UserError(
            f"{name}={text}: {of[len(weights)]!r} has no weight; expected {len(of)} weights ({', '.join(of)})"
        )
    if not all(0 <= weight <= 1 for weight in weights):
        raise UserError(f"{name}={text}: weights must be between 0 and 1")
    if not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise UserError(f"{name}={text}: sums to {sum(weights):g}, but must sum to 1")
    if name != "segmentation_weights" and 0 in weights:
        raise UserError(
            f"{name}={text}: {of[weights.index(0)]!r} has weight 0 and would not be trained; remove it from panels=…"
        )
    return weights


def _no_panels() -> UserError:
    return UserError("translation needs data with panels in addition to the input: use --data panels")


GeneratorKind: TypeAlias = Literal[
    "auto", "resnet_9", "resnet_6", "unet_512", "unet_256", "unet_128", "unet_64", "unet_32"
]
UNETS_PX = (512, 256, 128, 64, 32)


def largest_fitting_unet(spec: DataSpec) -> str:
    """Return the largest U-Net whose total downsampling factor divides the image sides; if none does, resnet_9."""
    fitting = [f"unet_{side}" for side in UNETS_PX if spec.height % side == spec.width % side == 0]
    return fitting[0] if fitting else "resnet_9"


def multiple_px(kind: str) -> int:
    """Return the number of pixels that must divide both sides of a generator's input."""
    family, _, number = kind.partition("_")
    return int(number) if family == "unet" else MULTIPLE_PX


def check_generator(setting_name: str, kind: str, spec: DataSpec) -> None:
    """Raise UserError if a generator does not fit the training images."""
    multiple = multiple_px(kind)
    if spec.height % multiple or spec.width % multiple:
        raise UserError(
            f"{setting_name}={kind}: needs sides that are multiples of {multiple}, but the training images are "
            f"{spec.width}×{spec.height}; change --crop, or choose a different generator"
        )


def check_discriminator(num_layers: int, spec: DataSpec) -> None:
    """Raise UserError if the training images are too small for a discriminator."""
    if min(spec.height, spec.width) < smallest_side_px(num_layers):
        raise UserError(
            f"d_layers={num_layers}: needs at least {smallest_side_px(num_layers)} pixels per side, but the training "
            f"images are {spec.width}×{spec.height}: use fewer layers (--set d_layers=1) or a larger --crop"
        )


def make_generator(kind: str, channels: int, ngf: int, norm: Norm, dropout: float, padding: Padding) -> nn.Module:
    """Return an image-to-image generator."""
    family, _, number = kind.partition("_")
    if family == "unet":
        return UnetGenerator(channels, channels, ngf, int(number).bit_length() - 1, norm, dropout)
    return ResnetGenerator(channels, channels, ngf, int(number), norm, dropout, padding)
