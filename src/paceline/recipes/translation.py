"""Image translation: what a picture would look like in another modality, learned from aligned pairs or panels.

`pix2pix` makes one panel of the input (Isola et al. 2017). `deepliif` makes several modalities and a segmentation,
fused from one that is made of the input and one of each modality (Ghahremani et al. 2022). All generators learn
together in one phase, since the segmentation's loss reaches through the modalities; all discriminators in a second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.models.features import Features
from paceline.models.losses import BCE, SQUARES, Objective
from paceline.models.patchgan import PatchDiscriminator, smallest_side_px
from paceline.models.resnet_generator import MULTIPLE_PX, ResnetGenerator
from paceline.models.unet_generator import UnetGenerator
from paceline.recipes.parts.translation_plan import SEGMENTATION, Plan, plan_deepliif, plan_pix2pix

OBJECTIVES: dict[str, Objective] = {"vanilla": BCE, "lsgan": SQUARES}
UNETS_PX = (512, 256, 128, 64, 32)


@dataclass(frozen=True)
class TranslationSettings:
    """The networks, what they learn, and how much each part counts."""

    model: Literal["deepliif", "pix2pix"] = setting("deepliif", "several panels and a segmentation, or one panel")
    target: str = setting("", "pix2pix: the panel to learn, where there are several")
    modalities: int = setting(0, "deepliif: how many the data must have; 0 takes what it has", at_least=0)
    generator: Literal["auto", "resnet_9", "resnet_6", "unet_512", "unet_256", "unet_128", "unet_64", "unet_32"] = (
        setting(
            "auto",
            "makes a panel of the input; auto is resnet_9 for deepliif, and the largest U-Net that fits for pix2pix",
        )
    )
    segmentation_generator: Literal[
        "auto", "resnet_9", "resnet_6", "unet_512", "unet_256", "unet_128", "unet_64", "unet_32"
    ] = setting("auto", "makes a segmentation; auto is the largest U-Net that fits")
    ngf: int = setting(64, "channels of the generators' first features", at_least=1)
    ndf: int = setting(64, "channels of the discriminators' first features", at_least=1)
    d_layers: int = setting(
        0, "layers of the discriminators; 0 is 4 for deepliif and 3 for pix2pix", at_least=0, at_most=6
    )
    norm: Literal["batch", "instance", "none"] = setting("batch", "normalisation layers")
    dropout: float = setting(0.5, "chance that a feature of a generator is dropped", at_least=0, below=1)
    padding: Literal["reflect", "zero"] = setting("zero", "what residual blocks see beyond the border")
    gan: Literal["vanilla", "lsgan"] = setting("vanilla", "what generators and discriminators compete for")
    segmentation_gan: Literal["vanilla", "lsgan"] = setting("lsgan", "the same, for the segmentation")
    distance: Literal["smooth_l1", "l1"] = setting("smooth_l1", "between a panel and what it should be")
    distance_weight: float = setting(100.0, "of that distance, against the discriminators", at_least=0)
    perceptual: float = setting(0.0, "weight of the distance between VGG19's features; 0 has none", at_least=0)
    vgg: str = setting("", "file with VGG19's weights, or random; default: torchvision's, downloaded")
    vgg_layer: str = setting("relu5_1", "layer of VGG19 that perceptual compares")
    segmentation_weights: str = setting(
        "", "deepliif: of the segmentations from the input and from each modality, with commas; they sum to 1"
    )
    generator_weights: str = setting("", "deepliif: of each panel in the generators' loss, with commas; they sum to 1")
    discriminator_weights: str = setting("", "deepliif: the same in the discriminators' loss")


class Translation(Recipe):
    """Two groups of networks, two phases."""

    Settings = TranslationSettings
    evaluator = "translation"
    best = ("validation/psnr", "max")
    defaults: ClassVar[dict[str, Any]] = {
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
        "evaluate_every": "5%",
        "sample_every": "5%",
        "save_every": "5%",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # A first look on a CPU: narrow networks on the embedded tissue.
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
        # The networks and terms of DeepLIIF and of pix2pix, on rows of their own.
        "deepliif": {
            "model": "deepliif",
            "generator": "resnet_9",
            "segmentation_generator": "unet_512",
            "panels": "image,hematoxylin,dapi,lap2,marker,segmentation",
            "modalities": 4,
            "crop": 512,
        },
        "pix2pix": {
            "model": "pix2pix",
            "generator": "unet_256",
            "panels": "image,target",
            "distance": "l1",
            "padding": "reflect",
            "crop": 256,
        },
    }
    small: ClassVar[dict[str, Any]] = {
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
    must_match_weights = ("norm",)

    @classmethod
    def check(cls, settings: TranslationSettings) -> None:
        if settings.perceptual:
            Features(settings.vgg, settings.vgg_layer).load()

    def __init__(self, settings: TranslationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.plan = _plan(settings, spec)
        make, segment = _choose_generators(settings, spec, segmented=bool(self.plan.fusion))
        num_layers = _num_layers(settings, spec)
        self.multiple_px = max(_multiple_px(make), _multiple_px(segment) if self.plan.fusion else 1)
        self.generators = nn.ModuleDict()
        self.discriminators = nn.ModuleDict()
        for number, _ in enumerate(self.plan.modalities, start=1):
            self.generators[f"G{number}"] = _make_generator(make, settings, spec)
            self.discriminators[f"D{number}"] = _make_discriminator(num_layers, settings, spec)
        for number in self.plan.segmenters():
            self.generators[f"GS{number}"] = _make_generator(segment, settings, spec)
            self.discriminators[f"DS{number}"] = _make_discriminator(num_layers, settings, spec)
        self.objectives = dict.fromkeys(self.plan.modalities, OBJECTIVES[settings.gan])
        if self.plan.fusion:
            self.objectives[SEGMENTATION] = OBJECTIVES[settings.segmentation_gan]
        self.distance = F.smooth_l1_loss if settings.distance == "smooth_l1" else F.l1_loss
        self.distance_weight, self.perceptual = settings.distance_weight, settings.perceptual
        self.see = Features(settings.vgg, settings.vgg_layer) if self.perceptual else None

    def translate(self, image: Tensor) -> dict[str, Tensor]:
        """Every panel, in -1…1, made of the input."""
        panels = {
            name: self.generators[f"G{number}"](image) for number, name in enumerate(self.plan.modalities, start=1)
        }
        if self.plan.fusion:
            bases = (image, *panels.values())
            panels[SEGMENTATION] = self._fused({i: self.generators[f"GS{i}"](bases[i]) for i in self.plan.segmenters()})
        return panels

    def generators_loss(self, batch: Batch) -> Loss:
        """Panels that the discriminators take for real and that are near to what they should be."""
        made = self.translate(batch["image"])
        terms: dict[str, Tensor] = {}
        for name, panel in made.items():
            weight = self.plan.generator_weights[name]
            logits = self._judge(name, panel, batch)
            terms[f"{name}_adversarial"] = weight * self.objectives[name].generator(logits).mean()
            terms[f"{name}_distance"] = weight * self.distance_weight * self.distance(panel, batch[name])
            if self.see:
                terms[f"{name}_perceptual"] = weight * self.perceptual * self._perceived(panel, batch[name])
        return Loss(terms, {f"made_{name}": panel for name, panel in made.items()})

    def discriminators_loss(self, batch: Batch) -> Loss:
        """Real panels told from those that were made; they pass separately, each with statistics of its own."""
        terms: dict[str, Tensor] = {}
        for name in self.plan.panels:
            weight, objective = self.plan.discriminator_weights[name] / 2, self.objectives[name]
            terms[f"{name}_fake"] = weight * objective.fake(self._judge(name, batch[f"made_{name}"], batch)).mean()
            terms[f"{name}_real"] = weight * objective.real(self._judge(name, batch[name], batch)).mean()
        return Loss(terms)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Every panel of the input, whatever its size."""
        return self._translate_any_size(batch["image"])

    def image_to_image(self, pictures: Tensor) -> dict[str, Tensor]:
        """Every panel of pictures by name; "image" where there is only one."""
        panels = self._translate_any_size(pictures)
        return panels if len(panels) > 1 else {"image": next(iter(panels.values()))}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """The input, and each panel as it was made beside the real one."""
        pictures = {"input": batch["image"]}
        for name, panel in self.predict(batch).items():
            pictures |= {name: panel, f"real {name}": batch[name]}
        return pictures

    def _judge(self, name: str, panel: Tensor, batch: Batch) -> Tensor:
        """What the discriminators of a panel say of one that is real or made."""
        if name in self.plan.modalities:
            number = self.plan.modalities.index(name) + 1
            return self.discriminators[f"D{number}"](batch["image"], panel)
        conditions = (batch["image"], *(batch[modality] for modality in self.plan.modalities))
        return self._fused({i: self.discriminators[f"DS{i}"](conditions[i], panel) for i in self.plan.segmenters()})

    def _fused(self, parts: dict[int, Tensor]) -> Tensor:
        weighted = [self.plan.fusion[number] * part for number, part in parts.items()]
        return weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum(0)

    def _perceived(self, panel: Tensor, target: Tensor) -> Tensor:
        assert self.see
        with torch.no_grad():
            wanted = self.see(target)
        return F.l1_loss(self.see(panel), wanted)

    def _translate_any_size(self, image: Tensor) -> dict[str, Tensor]:
        """Pads to the sides that the generators can halve, and cuts the panels back."""
        height, width = image.shape[-2:]
        right, below = -width % self.multiple_px, -height % self.multiple_px
        padded = F.pad(image, (0, right, 0, below), mode="replicate") if right or below else image
        return {name: panel[..., :height, :width] for name, panel in self.translate(padded).items()}


def _plan(settings: TranslationSettings, spec: DataSpec) -> Plan:
    if settings.model == "pix2pix":
        for name in ("modalities", "segmentation_weights", "generator_weights", "discriminator_weights"):
            if getattr(settings, name):
                raise UserError(f"{name}={getattr(settings, name)}: is for model=deepliif; pix2pix learns one panel")
        return plan_pix2pix(spec, settings.target)
    if settings.target:
        raise UserError(f"target={settings.target}: is for model=pix2pix; deepliif learns every panel")
    return plan_deepliif(
        spec,
        settings.modalities,
        settings.segmentation_weights,
        settings.generator_weights,
        settings.discriminator_weights,
    )


def _choose_generators(settings: TranslationSettings, spec: DataSpec, segmented: bool) -> tuple[str, str]:
    """The kinds of generators for panels and for segmentations, which must fit the pictures."""
    fitting = [f"unet_{side}" for side in UNETS_PX if spec.height % side == spec.width % side == 0]
    largest = fitting[0] if fitting else "resnet_9"
    make, segment = settings.generator, settings.segmentation_generator
    chosen = (
        ("resnet_9" if settings.model == "deepliif" else largest) if make == "auto" else make,
        largest if segment == "auto" else segment,
    )
    used = {"generator": chosen[0]} | ({"segmentation_generator": chosen[1]} if segmented else {})
    for setting_name, name in used.items():
        multiple = _multiple_px(name)
        if spec.height % multiple or spec.width % multiple:
            raise UserError(
                f"{setting_name}={name}: needs sides that are multiples of {multiple}, and training sees "
                f"{spec.width}×{spec.height} pixels: change --crop, or choose another generator"
            )
    return chosen


def _multiple_px(generator: str) -> int:
    kind, _, number = generator.partition("_")
    return int(number) if kind == "unet" else MULTIPLE_PX


def _make_generator(name: str, settings: TranslationSettings, spec: DataSpec) -> nn.Module:
    kind, _, number = name.partition("_")
    channels, dropout, norm = spec.channels, settings.dropout, settings.norm
    if kind == "unet":
        return UnetGenerator(channels, channels, settings.ngf, int(number).bit_length() - 1, norm, dropout)
    return ResnetGenerator(channels, channels, settings.ngf, int(number), norm, dropout, settings.padding)


def _num_layers(settings: TranslationSettings, spec: DataSpec) -> int:
    num_layers = settings.d_layers or (4 if settings.model == "deepliif" else 3)
    if min(spec.height, spec.width) < smallest_side_px(num_layers):
        raise UserError(
            f"d_layers={num_layers}: needs {smallest_side_px(num_layers)} pixels, and training sees "
            f"{spec.width}×{spec.height}: use fewer layers (--set d_layers=1) or a larger --crop"
        )
    return num_layers


def _make_discriminator(num_layers: int, settings: TranslationSettings, spec: DataSpec) -> nn.Module:
    return PatchDiscriminator(2 * spec.channels, settings.ndf, num_layers, settings.norm)
