"""Settings, defaults, networks and loss terms of recipes that restore or upscale images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.resolve import Arguments
from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Evaluation, Loss, Phase, Recipe
from paceline.core.errors import UserError, unknown
from paceline.core.types import SettingValues
from paceline.images.rectangles import in_windows
from paceline.images.resample import bicubic, bicubic_as_saved, cut_to_multiple
from paceline.models.features import Features, check_lpips, lpips_loss
from paceline.models.layers import in_full_precision
from paceline.models.losses import OBJECTIVES, fft_loss, ssim_loss
from paceline.models.networks import NetworkChoice, NetworkTask, make_network


def check_colours(setting_text: str, network: str, channels: int) -> None:
    """Raise UserError if a network that was trained on photographs cannot process images with these channels."""
    if channels not in (1, 3):
        name = setting_text.partition("=")[0]
        raise UserError(
            f"{setting_text}: {network} takes images with 1 or 3 channels, not {channels}; use --set {name}=0"
        )


# What the presets for a first run on a CPU, with the bundled photographs, have in common.
QUICK: SettingValues = {
    "crop": 48,
    "lr": 2e-3,
    "images": 8000,
    "evaluate_every": "25%",
    "sample_every": "25%",
    "save_every": "25%",
}
CHARBONNIER_EPSILON = 1e-3  # for differences well below this, the loss is quadratic


@dataclass(frozen=True)
class RestorationLossSettings:
    """Settings for the loss terms and the discriminator."""

    content: Literal["mse", "l1", "charbonnier"] = setting("mse", "pixel loss")
    pixel: float = setting(1.0, "weight of the pixel loss", at_least=0)
    perceptual: float = setting(
        0.006, "weight of the perceptual loss (distance between VGG19 features); 0: VGG19 is not needed", at_least=0
    )
    adversarial: float = setting(1e-3, "weight of the adversarial loss", at_least=0)
    tv: float = setting(
        2e-8, "weight of the total variation loss (squared differences between adjacent pixels)", at_least=0
    )
    objective: Literal["bce", "hinge", "lsgan"] = setting("bce", "adversarial loss")
    vgg: str = setting(
        "", "file with VGG19 weights, or random for an untrained network; default: download torchvision's weights"
    )
    vgg_layer: str = setting(
        "conv5_4",
        "VGG19 layer for the perceptual loss, or several with weights: conv4_4:0.5,conv5_4; relu5_4 is conv5_4 after "
        "its activation",
    )
    perceptual_distance: Literal["mse", "l1"] = setting("mse", "how VGG19 features are compared")
    fft: float = setting(0.0, "weight of the L1 loss between Fourier coefficients", at_least=0)
    ssim: float = setting(
        0.0, "weight of the structural loss, 1 − SSIM; images must have 11×11 pixels or more", at_least=0
    )
    lpips: float = setting(0.0, "weight of the LPIPS distance; needs the package lpips", at_least=0)
    d_width: int = setting(
        64, "channels in the discriminator's first feature map; the last has 8 times as many", at_least=1
    )
    d_norm: Literal["batch", "none"] = setting("batch", "normalisation layers in the discriminator")


class RestorationRecipe(Recipe):
    """A network that restores images, evaluated by PSNR, and an optional discriminator."""

    discriminator: nn.Module | None
    relativistic = False  # whether the discriminator compares each target with its restored version

    evaluation = Evaluation("restoration", best="validation/psnr")
    defaults: ClassVar[SettingValues] = {
        "crop": 96,
        "batch_size": "16",
        "reference_batch": 16,
        "optimizer": "adam",
        "rot90": "on",
        "epochs": 1000,
    }
    small: ClassVar[SettingValues] = {
        "num_blocks": 2,
        "width": 4,
        "d_width": 4,
        "vgg": "random",
        "crop": 32,
        "batch_size": "8",
    }

    def __init__(self, settings: RestorationLossSettings, spec: DataSpec, *, is_adversarial: bool = True) -> None:
        """Create the losses; without `is_adversarial`, only those that compare pixels.

        The subclass creates the restoring network, and calls `add_discriminator` if the weight `adversarial` is not 0.
        """
        super().__init__(settings, spec)
        self.content_loss = ContentLoss(settings, perceptual=is_adversarial)
        self.objective, self.adversarial = OBJECTIVES[settings.objective], settings.adversarial * is_adversarial
        check_weights(self.content_loss, self.adversarial, spec.channels)
        self.discriminator = None

    def add_discriminator(self, discriminator: nn.Module) -> None:
        """Add the network that distinguishes real images from restored ones, and its phase."""
        self.discriminator = discriminator
        self.phases += (Phase("discriminator", "discriminator"),)

    def loss_of_restored(self, restored: Tensor, target: Tensor) -> Loss:
        """Restored images should match their targets and, with a discriminator, score as real."""
        terms = self.content_loss(restored, target)
        if self.discriminator is None:
            return Loss(terms)
        fake = logits = self.discriminator(restored)
        if self.relativistic:
            with torch.no_grad():
                real = self.discriminator(target)
            logits = fake - real
        terms["adversarial"] = self.adversarial * self.objective.generator(logits).mean()
        return Loss(terms, shared={"fake": restored}, signals={"fake_score": self.objective.score(fake)})

    def loss_of_discriminator(self, target: Tensor, restored: Tensor) -> Loss:
        """Targets should score as real and restored images as fake or, if relativistic, targets as more real.

        The relativistic loss compares pairs (Jolicoeur-Martineau 2018). ESRGAN compares with the mean of a batch
        instead, which would depend on how the batch is split across devices.
        """
        assert self.discriminator is not None
        # Use two passes, so that real and restored images have separate BatchNorm statistics.
        real, fake = self.discriminator(target), self.discriminator(restored)
        if self.relativistic:
            terms = {"relativistic": self.objective.real(real - fake).mean()}
        else:
            terms = {"real": self.objective.real(real).mean(), "fake": self.objective.fake(fake).mean()}
        return Loss(terms, signals=self.objective.scores(real, fake))

    @classmethod
    def check(cls, settings: RestorationLossSettings) -> None:
        """Raise UserError if the weights of VGG19 or LPIPS are needed but cannot be loaded."""
        if settings.perceptual:
            Features(settings.vgg, *parse_layers(settings.vgg_layer)).load()
        if settings.lpips:
            check_lpips()


def charbonnier(restored: Tensor, target: Tensor) -> Tensor:
    """Return the mean of √(d² + ε²): an L1 loss that is smooth at zero."""
    return ((restored - target).square() + CHARBONNIER_EPSILON**2).sqrt().mean()


PIXEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "charbonnier": charbonnier,
}


def total_variation(images: Tensor) -> Tensor:
    """Return the sum of squared differences between adjacent pixels in an image, averaged over images."""
    rows, columns = images.diff(dim=-2).square().sum(), images.diff(dim=-1).square().sum()
    return (rows + columns) / len(images)


def parse_layers(text: str) -> dict[str, float]:
    """Return the weight of each VGG19 layer in a list such as conv4_4:0.5,conv5_4; the default weight is 1."""
    layers = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        try:
            layers[name] = float(weight) if weight else 1.0
        except ValueError:
            raise UserError(f"vgg_layer={text}: {weight!r} is not a number; use for example conv5_4:0.5") from None
    return layers


class ContentLoss:
    """The terms that compare a restored image with its target: pixels, features, frequencies, structure."""

    def __init__(self, settings: RestorationLossSettings, *, perceptual: bool = True) -> None:
        self.pixel, self.tv = settings.pixel, settings.tv
        self.perceptual = settings.perceptual if perceptual else 0.0
        self.pixel_loss = PIXEL_LOSSES[settings.content]
        self.layer_weights = parse_layers(settings.vgg_layer)
        self.features = Features(settings.vgg, *self.layer_weights)
        self.feature_loss = PIXEL_LOSSES[settings.perceptual_distance]
        self.others = {
            name: (weight, loss)
            for name, weight, loss in (
                ("fft", settings.fft, fft_loss),
                ("ssim", settings.ssim, ssim_loss),
                ("lpips", settings.lpips, lpips_loss),
            )
            if weight
        }

    def __bool__(self) -> bool:
        """Return whether a term other than the total variation has a weight."""
        return bool(self.pixel or self.perceptual or self.others)

    def __call__(self, restored: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the weighted terms; those with weight 0 are not computed."""
        terms = {}
        if self.pixel:
            terms["pixel"] = self.pixel * self.pixel_loss(restored, target)
        if self.perceptual:
            terms["perceptual"] = self.perceptual * self._compare_features(restored, target)
        for name, (weight, loss) in self.others.items():
            terms[name] = weight * loss(restored, target)
        if self.tv:
            terms["tv"] = self.tv * total_variation(restored)
        return terms

    def _compare_features(self, restored: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            of_target = [in_full_precision(features) for features in self.features.all(target)]
        of_restored = [in_full_precision(features) for features in self.features.all(restored)]
        first, *others = (
            weight * self.feature_loss(*pair)
            for weight, *pair in zip(self.layer_weights.values(), of_restored, of_target, strict=True)
        )
        return sum(others, first)


def check_weights(content: ContentLoss, adversarial: float, channels: int) -> None:
    """Raise UserError if all loss weights are zero, or if a network in the loss cannot process the images."""
    if content.perceptual:
        check_colours(f"perceptual={content.perceptual:g}", "VGG19", channels)
    if "lpips" in content.others:
        check_colours(f"lpips={content.others['lpips'][0]:g}", "LPIPS", channels)
    if not (content or adversarial):
        raise UserError("pixel=0: all loss weights are zero; make at least one of them positive, e.g. pixel=1")


def make_image_network(
    name: str, arguments: Arguments, task: NetworkTask, built_in: Mapping[str, Callable[[], nn.Module]]
) -> nn.Module:
    """Return the recipe's network of this name, or else the network `PROVIDER:NAME` with these arguments."""
    if ":" in name:
        return make_network(NetworkChoice(name, arguments), task)
    if name not in built_in:
        raise UserError(f"network={name}: {unknown('network', name, built_in)} Networks from spandrel: spandrel:NAME")
    if arguments:
        first = next(iter(arguments))
        raise UserError(f"network_args.{first}: only for networks from spandrel, not for network={name}; leave it out")
    return built_in[name]()


@dataclass(frozen=True)
class UpscalingSettings(RestorationLossSettings):
    """The stage, the scale and the loss terms."""

    stage: Literal["pretrain", "adversarial", "both"] = setting(
        "pretrain",
        "pretrain: pixel loss only; adversarial: also a discriminator and VGG19; both: pretrain, then adversarial",
    )
    scale: Literal["2", "3", "4", "8"] = setting("4", "upscaling factor for height and width")


class UpscalingRecipe(RestorationRecipe):
    """A generator that upscales images by `output_scale` and, in the adversarial stage, a discriminator."""

    generator: nn.Module

    stages = {"both": ("pretrain", "adversarial")}
    rejected_fields = {"target": "restoration"}
    phases = (Phase("generator", "generator"),)
    ema = ("generator",)

    @classmethod
    def check(cls, settings: RestorationLossSettings) -> None:
        """Raise UserError if a stage needs weights of VGG19 or LPIPS that cannot be loaded."""
        assert isinstance(settings, UpscalingSettings)
        if settings.stage != "pretrain":
            super().check(settings)
        elif settings.lpips:
            check_lpips()

    def __init__(self, settings: UpscalingSettings, spec: DataSpec) -> None:
        if settings.stage in self.stages:
            raise UserError(
                f"stage={settings.stage}: consists of several runs; choose {' or '.join(self.stages[settings.stage])}"
            )
        if spec.scale not in (0, int(settings.scale)):
            raise UserError(
                f"scale={settings.scale}: the low-resolution files are smaller by a factor of {spec.scale}; "
                "set scale to this factor, or use different files"
            )
        check_sides(spec, int(settings.scale), f"scale={settings.scale}")
        is_adversarial = settings.stage == "adversarial"
        super().__init__(settings, spec, is_adversarial=is_adversarial)
        self.output_scale, self.pixels = int(settings.scale), spec.pixel_format
        if is_adversarial:
            self.evaluation = replace(
                self.evaluation, best=""
            )  # sharper images have a lower PSNR: the last one is best

    def generator_loss(self, batch: Batch) -> Loss:
        """Upscaled images should match the originals and, with a discriminator, score as real."""
        return self.loss_of_restored(self.generator(self.low_resolution(batch)), batch["image"])

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Real images should score as real, upscaled images as fake."""
        return self.loss_of_discriminator(batch["image"], batch["fake"])

    def degrade(self, high: Tensor, batch: Batch) -> Tensor:
        """Return low-resolution images, rounded as in a file; by default, downsampled (bicubic)."""
        height, width = high.shape[-2:]
        return bicubic_as_saved(high, height // self.output_scale, width // self.output_scale, self.pixels)

    def low_resolution(self, batch: Batch) -> Tensor:
        """Return the generator's input: the source's low-resolution images, or images from `degrade`."""
        if "low" in batch:
            return batch["low"]
        return self.degrade(cut_to_multiple(batch["image"], self.output_scale), batch)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the upscaled image, the original, and the bicubic upscaling of the same low-resolution image."""
        low, target = self.low_resolution(batch), cut_to_multiple(batch["image"], self.output_scale)
        upscaled = in_windows(lambda part: {"image": self.generator(part)}, low, self.window_px, self.output_scale)
        return {**upscaled, "target": target, "bicubic": bicubic(low, *target.shape[-2:])}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return the low-resolution image (enlarged), the bicubic upscaling, the restored image and the target."""
        prediction = self.predict(batch)
        low = F.interpolate(self.low_resolution(batch), scale_factor=self.output_scale, mode="nearest")
        return {
            "low": low,
            "bicubic": prediction["bicubic"],
            "restored": prediction["image"],
            "target": prediction["target"],
        }

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Return images `output_scale` times as high and wide."""
        return {"image": self.generator(images).clamp(-1, 1)}


def check_sides(spec: DataSpec, multiple: int, reason: str) -> None:
    """Raise UserError unless both sides of the training images are multiples of a number."""
    if spec.height % multiple or spec.width % multiple:
        raise UserError(
            f"the training images are {spec.width}×{spec.height} pixels, but both sides must be multiples of "
            f"{multiple} for {reason}: use --crop 96"
        )
