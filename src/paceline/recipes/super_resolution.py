"""Super-resolution: a network learns to enlarge photographs 2, 4 or 8 times.

Stage `pretrain` is SRResNet, which learns from pixels. Stage `adversarial` is SRGAN, which goes on from such
weights (`--init-from`) with a discriminator and VGG19's features; `both` is the one, then the other. The small pictures
are read from files where the source has them, else made of the training crop by bicubic filtering on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.images.resample import bicubic, bicubic_as_saved, cut_to_multiple
from paceline.models.srresnet import Discriminator, SRResNet
from paceline.recipes.parts.restoration import RestorationTerms, Terms, check_features


@dataclass(frozen=True)
class SuperResolutionSettings(RestorationTerms):
    """The stage, the networks and the terms of their losses."""

    stage: Literal["pretrain", "adversarial", "both"] = setting(
        "pretrain", "pretrain learns from pixels, adversarial from a discriminator and VGG19 too; both is one by one"
    )
    scale: Literal["2", "4", "8"] = setting("4", "how many times as high and wide pictures become")
    blocks: Literal["separate", "shared"] = setting(
        "separate", "shared gives all blocks one block's weights, and all doublings one doubling's"
    )
    num_blocks: int = setting(16, "residual blocks of the generator", at_least=1)
    width: int = setting(64, "channels of the generator", at_least=1)
    norm: Literal["batch", "none"] = setting("batch", "normalisation layers of the generator")
    output: Literal["tanh", "residual"] = setting(
        "residual", "residual adds what the network computes to the bicubic enlargement; tanh is SRGAN's own"
    )


class SuperResolution(Recipe):
    """A generator, and in the adversarial stage a discriminator after it."""

    Settings = SuperResolutionSettings
    stages: ClassVar[dict[str, tuple[str, ...]]] = {"both": ("pretrain", "adversarial")}
    evaluator = "restoration"
    refuses: ClassVar[dict[str, str]] = {"target": "restoration"}
    best = ("validation/psnr", "max")
    ema = ("generator",)
    must_match_weights = ("scale", "blocks", "num_blocks", "output")
    defaults: ClassVar[dict[str, Any]] = {
        "data": "photos",
        "crop": 96,
        "batch_size": "16",
        "reference_batch": 16,
        "optimizer": "adam",
        "lr": 1e-4,
        "rot90": "on",
        "epochs": 1000,
        "evaluate_every": "5%",
        "sample_every": "5%",
        "save_every": "5%",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # A first look on a CPU, with the photographs inside scikit-image.
        "quick": {
            "scale": "2",
            "num_blocks": 3,
            "width": 16,
            "norm": "none",
            "content": "l1",
            "tv": 0.0,
            "crop": 48,
            "lr": 2e-3,
            "schedule": "cosine",
            "images": 8000,
            "evaluate_every": "25%",
            "sample_every": "25%",
            "save_every": "25%",
        },
        # The networks, losses and settings of the distributed SRGAN project, which trains on DIV2K.
        "reference": {
            "blocks": "shared",
            "norm": "batch",
            "output": "tanh",
            "content": "mse",
            "vgg_layer": "relu5_4",
            "crop": 128,
            "flip": "off",
            "rot90": "off",
            "batch_size": "128",
            "reference_batch": 128,
            "lr": 1e-4,
            "epochs": 100,
        },
        # A good SRResNet ×4 from a few hundred photographs within minutes on a large GPU: no normalisation, a linear
        # output on top of the bicubic enlargement, L1, a rate that falls to zero.
        "train291": {
            "norm": "none",
            "output": "residual",
            "content": "l1",
            "tv": 0.0,
            "crop": 128,
            "rot90": "on",
            "flip": "on",
            "batch_size": "32",
            "reference_batch": 32,
            "lr": 4e-4,
            "schedule": "cosine",
            "warmup": "1%",
            "images": 3_000_000,
            "validation": 0.02,
        },
    }
    small: ClassVar[dict[str, Any]] = {
        "scale": "2",
        "num_blocks": 2,
        "width": 4,
        "d_width": 4,
        "vgg": "random",
        "crop": 32,
        "batch_size": "8",
    }

    @classmethod
    def check(cls, settings: SuperResolutionSettings) -> None:
        if settings.stage != "pretrain":
            check_features(settings)

    def __init__(self, settings: SuperResolutionSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        if settings.stage in self.stages:
            raise UserError(f"stage={settings.stage}: this is several runs in a row; choose one of them here")
        self.output_scale = int(settings.scale)
        if spec.scale not in (0, self.output_scale):
            raise UserError(f"scale={settings.scale}: the files of small pictures are smaller by {spec.scale}")
        if spec.height % self.output_scale or spec.width % self.output_scale:
            raise UserError(
                f"the training pictures have {spec.width}×{spec.height} pixels, which is no multiple of "
                f"scale={settings.scale}: use --crop 96"
            )
        self.generator = SRResNet(
            scale=self.output_scale,
            channels=spec.channels,
            width=settings.width,
            num_blocks=settings.num_blocks,
            shared=settings.blocks == "shared",
            norm=settings.norm,
            output=settings.output,
        )
        self.terms = Terms(settings, pixels_only=settings.stage == "pretrain")
        self.discriminator: Discriminator | None = None
        self.phases = (Phase("generator", "generator"),)
        if settings.stage == "adversarial":
            self.best = ("", "max")  # sharper pictures have a lower PSNR: the last weights are the ones that are meant
        if self.terms.adversarial:
            self.discriminator = self.terms.make_discriminator(spec.channels)
            self.phases += (Phase("discriminator", "discriminator"),)

    def generator_loss(self, batch: Batch) -> Loss:
        """Enlarged pictures near the real ones; the discriminator then learns from the same ones."""
        return self.terms.generator_loss(self.generator(self._low(batch)), batch["image"], self.discriminator)

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Real pictures told from enlarged ones."""
        assert self.discriminator is not None
        return self.terms.discriminator_loss(self.discriminator, batch["image"], batch["fake"])

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The enlarged picture, the real one, and the bicubic enlargement of the same small picture."""
        low, target = self._low(batch), cut_to_multiple(batch["image"], self.output_scale)
        return {"image": self.generator(low), "target": target, "bicubic": bicubic(low, *target.shape[-2:])}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """The small picture with its pixels enlarged, bicubic, restored, target."""
        made = self.predict(batch)
        low = F.interpolate(self._low(batch), scale_factor=self.output_scale, mode="nearest")
        return {"low": low, "bicubic": made["bicubic"], "restored": made["image"], "target": made["target"]}

    def image_to_image(self, pictures: Tensor) -> dict[str, Tensor]:
        """Pictures `enlarges` times as high and wide."""
        return {"image": self.generator(pictures).clamp(-1, 1)}

    def _low(self, batch: Batch) -> Tensor:
        """The small pictures: those of the source, or made of its pictures as files would hold them."""
        if "low" in batch:
            return batch["low"]
        high = cut_to_multiple(batch["image"], self.output_scale)
        height, width = high.shape[-2:]
        return bicubic_as_saved(high, height // self.output_scale, width // self.output_scale)
