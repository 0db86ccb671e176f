"""Image translation: from one modality to others, learned from aligned pairs or panels.

`pix2pix` generates one panel from the input (Isola et al. 2017). `deepliif` generates several modalities and a
segmentation, fused from segmentations of the input and of each modality (Ghahremani et al. 2022). One phase trains all
generators together, since the segmentation loss also reaches the modalities' generators. A second phase trains all
discriminators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.data_spec import SEGMENTATION
from paceline.contracts.recipe import Batch, DataSpec, Evaluation, Loss, Phase, Recipe, Weights
from paceline.core.errors import UserError, unknown
from paceline.images.rectangles import in_windows
from paceline.models.features import Features
from paceline.models.layers import Norm, normalise_by_image
from paceline.models.losses import BCE, SQUARES, Objective
from paceline.models.pix2pix import (
    MULTIPLE_PX,
    Padding,
    PatchDiscriminator,
    ResnetGenerator,
    UnetGenerator,
    smallest_side_px,
)
from paceline.recipes.parts.restoration import check_colours

OBJECTIVES: dict[str, Objective] = {"vanilla": BCE, "lsgan": SQUARES}
GeneratorKind: TypeAlias = Literal[
    "auto", "resnet_9", "resnet_6", "unet_512", "unet_256", "unet_128", "unet_64", "unet_32"
]


@dataclass(frozen=True)
class TranslationSettings:
    """The panels, the networks, and the weights of the losses."""

    model: Literal["deepliif", "pix2pix"] = setting("deepliif", "deepliif generates several panels, pix2pix only one")
    target: str = setting("", "panel that pix2pix generates if the data has several panels")
    modalities: int = setting(0, "deepliif: number of modalities that the data must have; 0: any number", at_least=0)
    generator: GeneratorKind = setting(
        "auto",
        "network that generates a panel; auto: resnet_9 for deepliif, the largest U-Net that fits for pix2pix",
    )
    segmentation_generator: GeneratorKind = setting("auto", "segmentation network; auto: the largest U-Net that fits")
    ngf: int = setting(64, "channels in the generators' first feature map", at_least=1)
    ndf: int = setting(64, "channels in the discriminators' first feature map", at_least=1)
    d_layers: int = setting(0, "discriminator layers; 0 means 4 for deepliif, 3 for pix2pix", at_least=0, at_most=6)
    norm: Literal["batch", "instance", "none"] = setting("batch", "normalisation layers")
    batchnorm: Literal["running", "instance"] = setting(
        "running",
        "with norm=batch, normalise new images using training-set statistics (running) or each image's own (instance)",
    )
    dropout: float = setting(0.5, "dropout probability in the generators", at_least=0, below=1)
    padding: Literal["reflect", "zero"] = setting("zero", "padding in the residual blocks")
    gan: Literal["vanilla", "lsgan"] = setting("vanilla", "adversarial loss")
    segmentation_gan: Literal["vanilla", "lsgan"] = setting("lsgan", "adversarial loss for the segmentation")
    distance: Literal["smooth_l1", "l1"] = setting("smooth_l1", "pixel loss between a panel and its target")
    distance_weight: float = setting(100.0, "weight of the pixel loss; the adversarial loss has weight 1", at_least=0)
    perceptual: float = setting(0.0, "weight of the perceptual loss (L1 on VGG19 features); 0: not used", at_least=0)
    vgg: str = setting("", "file with VGG19 weights, or random (untrained); default: torchvision's weights")
    vgg_layer: str = setting("relu5_1", "VGG19 layer for the perceptual loss")
    segmentation_weights: str = setting(
        "",
        "deepliif: comma-separated weights for the segmentations from the input and each modality; must sum to 1",
    )
    generator_weights: str = setting(
        "", "deepliif: comma-separated weights of the panels in the generators' loss; must sum to 1"
    )
    discriminator_weights: str = setting(
        "", "deepliif: comma-separated weights of the panels in the discriminators' loss; must sum to 1"
    )


class Translation(Recipe):
    """Two groups of networks: generators and discriminators. Each group is trained in one phase."""

    Settings = TranslationSettings
    evaluation = Evaluation("translation", best="validation/psnr")
    weights = Weights("deepliif", must_match=("norm", "batchnorm"))
    defaults = {
        "data": "panels",
        "batch_size": "1",
        "reference_batch": 1,
        "epochs": 200,
        "optimizer": "adam",
        "lr": 2e-4,
        "beta1": 0.5,
        "beta2": 0.999,
        "schedule": "linear",
        "hold": "50%",
    }
    presets = {
        # For a first run on a CPU: narrow networks on the bundled tissue images.
        "quick": {
            "ngf": 8,
            "ndf": 8,
            "d_layers": 2,
            "generator": "resnet_6",
            "segmentation_generator": "unet_32",
            "dropout": 0.0,
            "batch_size": "4",
            "lr": 1e-3,
            "epochs": 40,
        },
        # The networks and losses of DeepLIIF and pix2pix, for those projects' data.
        "deepliif": {
            "model": "deepliif",
            "generator": "resnet_9",
            "segmentation_generator": "unet_512",
            "panels": "image,hematoxylin,dapi,lap2,marker,segmentation",
            "modalities": 4,
            "batchnorm": "instance",
            "crop": 512,
        },
        "pix2pix": {
            "model": "pix2pix",
            "generator": "unet_256",
            "panels": "image,target",
            "distance": "l1",
            "padding": "reflect",
            "batchnorm": "instance",
            "crop": 256,
        },
    }
    small = {
        "generator": "resnet_6",
        "segmentation_generator": "unet_32",
        "ngf": 2,
        "ndf": 2,
        "d_layers": 1,
        "crop": 32,
        "batch_size": "4",
    }
    phases = (Phase("generators", "generators"), Phase("discriminators", "discriminators"))
    ema = ("generators",)

    @classmethod
    def check(cls, settings: TranslationSettings) -> None:
        """Raise UserError if VGG19 weights are needed but cannot be loaded."""
        if settings.perceptual:
            Features(settings.vgg, settings.vgg_layer).load()

    def __init__(self, settings: TranslationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.evaluation = replace(self.evaluation, best="")  # PSNR favours blurred panels: the last checkpoint is best
        self.plan = _plan(settings, spec)
        kind, segmentation_kind = _generator_kinds(settings, spec, segmented=bool(self.plan.fusion))
        self.multiple_px = max(multiple_px(kind), multiple_px(segmentation_kind) if self.plan.fusion else 1)
        num_layers = settings.d_layers or (4 if settings.model == "deepliif" else 3)
        check_discriminator(num_layers, spec)

        def generator(kind: str) -> nn.Module:
            ngf, norm, dropout, padding = settings.ngf, settings.norm, settings.dropout, settings.padding
            return make_generator(kind, spec.channels, ngf, norm, dropout, padding)

        def discriminator() -> nn.Module:
            return PatchDiscriminator(2 * spec.channels, settings.ndf, num_layers, settings.norm)

        self.generators = nn.ModuleDict()
        self.discriminators = nn.ModuleDict()
        for number, _ in enumerate(self.plan.modalities, start=1):
            self.generators[f"G{number}"] = generator(kind)
            self.discriminators[f"D{number}"] = discriminator()
        for number in self.plan.segmenters():
            self.generators[f"GS{number}"] = generator(segmentation_kind)
            self.discriminators[f"DS{number}"] = discriminator()
        if settings.norm == "batch" and settings.batchnorm == "instance":
            self.window_px = spec.height, spec.width
            normalise_by_image(self.generators)
        self.objectives = dict.fromkeys(self.plan.modalities, OBJECTIVES[settings.gan])
        if self.plan.fusion:
            self.objectives[SEGMENTATION] = OBJECTIVES[settings.segmentation_gan]
        self.distance = F.smooth_l1_loss if settings.distance == "smooth_l1" else F.l1_loss
        self.distance_weight, self.perceptual = settings.distance_weight, settings.perceptual
        self.features = Features(settings.vgg, settings.vgg_layer) if self.perceptual else None
        if self.perceptual:
            check_colours(f"perceptual={self.perceptual:g}", "VGG19", spec.channels)

    def translate(self, image: Tensor) -> dict[str, Tensor]:
        """Return every panel generated from the input, with values in [-1, 1]."""
        panels = {
            name: self.generators[f"G{number}"](image) for number, name in enumerate(self.plan.modalities, start=1)
        }
        if self.plan.fusion:
            bases = (image, *panels.values())
            panels[SEGMENTATION] = self._fuse({i: self.generators[f"GS{i}"](bases[i]) for i in self.plan.segmenters()})
        return panels

    def generators_loss(self, batch: Batch) -> Loss:
        """Generated panels should score as real and match their targets."""
        made = self.translate(batch["image"])
        terms: dict[str, Tensor] = {}
        for name, panel in made.items():
            weight = self.plan.generator_weights[name]
            logits = self._discriminate(name, panel, batch)
            terms[f"{name}_adversarial"] = weight * self.objectives[name].generator(logits).mean()
            terms[f"{name}_distance"] = weight * self.distance_weight * self.distance(panel, batch[name])
            if self.features:
                terms[f"{name}_perceptual"] = weight * self.perceptual * self._feature_distance(panel, batch[name])
        return Loss(terms, shared={f"made_{name}": panel for name, panel in made.items()})

    def discriminators_loss(self, batch: Batch) -> Loss:
        """Real panels should score as real, generated panels as fake."""
        terms: dict[str, Tensor] = {}
        for name in self.plan.panels:
            weight, objective = self.plan.discriminator_weights[name] / 2, self.objectives[name]
            # Use two passes, so that real and generated panels have separate BatchNorm statistics.
            fake = self._discriminate(name, batch[f"made_{name}"], batch)
            terms[f"{name}_fake"] = weight * objective.fake(fake).mean()
            real = self._discriminate(name, batch[name], batch)
            terms[f"{name}_real"] = weight * objective.real(real).mean()
        return Loss(terms)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return every panel generated from the input, which may have any size."""
        return in_windows(self._translate_any_size, batch["image"], self.window_px)

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Return every panel by name; a single panel is called "image"."""
        panels = self._translate_any_size(images)
        return panels if len(panels) > 1 else {"image": next(iter(panels.values()))}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return the input, followed by the generated and the real image for each panel."""
        images = {"input": batch["image"]}
        for name, panel in self.predict(batch).items():
            images |= {name: panel, f"real {name}": batch[name]}
        return images

    def _discriminate(self, name: str, panel: Tensor, batch: Batch) -> Tensor:
        """Return the logits of a panel's discriminators, each conditioned on the input or on a modality."""
        if name in self.plan.modalities:
            number = self.plan.modalities.index(name) + 1
            logits: Tensor = self.discriminators[f"D{number}"](batch["image"], panel)
            return logits
        conditions = (batch["image"], *(batch[modality] for modality in self.plan.modalities))
        return self._fuse({i: self.discriminators[f"DS{i}"](conditions[i], panel) for i in self.plan.segmenters()})

    def _fuse(self, parts: dict[int, Tensor]) -> Tensor:
        """Return the weighted sum of the outputs for the input and for each modality."""
        weighted = [self.plan.fusion[number] * part for number, part in parts.items()]
        return weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum(0)

    def _feature_distance(self, panel: Tensor, target: Tensor) -> Tensor:
        assert self.features
        with torch.no_grad():
            target_features = self.features(target)
        return F.l1_loss(self.features(panel), target_features)

    def _translate_any_size(self, image: Tensor) -> dict[str, Tensor]:
        """Pad the image to a size that the generators accept, and crop the panels to the original size."""
        height, width = image.shape[-2:]
        right, below = -width % self.multiple_px, -height % self.multiple_px
        padded = F.pad(image, (0, right, 0, below), mode="replicate") if right or below else image
        return {name: panel[..., :height, :width] for name, panel in self.translate(padded).items()}


def _plan(settings: TranslationSettings, spec: DataSpec) -> Plan:
    """Return the panels to generate and their weights; raise UserError for settings that the model does not use."""
    if not spec.panels:
        raise UserError("translation needs data with panels in addition to the input: use --data panels")
    if settings.model == "pix2pix":
        for name in ("modalities", "segmentation_weights", "generator_weights", "discriminator_weights"):
            if getattr(settings, name):
                raise UserError(
                    f"{name}={getattr(settings, name)}: only for model=deepliif; pix2pix generates only one panel"
                )
        return plan_pix2pix(spec, settings.target)
    if settings.target:
        raise UserError(f"target={settings.target}: only for model=pix2pix; deepliif generates every panel")
    weights = settings.segmentation_weights, settings.generator_weights, settings.discriminator_weights
    return plan_deepliif(spec, settings.modalities, *weights)


def _generator_kinds(settings: TranslationSettings, spec: DataSpec, segmented: bool) -> tuple[str, str]:
    """Return the generators for panels and for segmentations; raise UserError if one does not fit the images."""
    largest = largest_fitting_unet(spec)
    usual = "resnet_9" if settings.model == "deepliif" else largest
    kind = usual if settings.generator == "auto" else settings.generator
    segmentation_kind = largest if settings.segmentation_generator == "auto" else settings.segmentation_generator
    check_generator("generator", kind, spec)
    if segmented:
        check_generator("segmentation_generator", segmentation_kind, spec)
    return kind, segmentation_kind


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
        count = len(names) + 1
        usual = PAPERS_FUSION if count == len(PAPERS_FUSION) else (1 / count,) * count
        weights = _weights("segmentation_weights", fusion, ("the input", *names)) or usual
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


def _weights(name: str, text: str, of: tuple[str, ...]) -> tuple[float, ...]:
    """Parse comma-separated weights, one for each name in `of`; return () for an empty string."""
    if not text.strip():
        return ()
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"{name}={text}: expected numbers separated by commas") from None
    if len(weights) != len(of):
        raise UserError(f"{name}={text}: has {len(weights)} weights; expected {len(of)} ({', '.join(of)})")
    if not all(0 <= weight <= 1 for weight in weights):
        raise UserError(f"{name}={text}: weights must be between 0 and 1")
    if not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise UserError(f"{name}={text}: sums to {sum(weights):g}, but must sum to 1")
    if name != "segmentation_weights" and 0 in weights:
        raise UserError(
            f"{name}={text}: {of[weights.index(0)]!r} has weight 0 and would not be trained; remove it from panels=…"
        )
    return weights


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
