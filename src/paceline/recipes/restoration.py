"""Paired restoration: a network learns to remove blur, noise, rain or compression artefacts from images.

A sample consists of a degraded image ("image") and the clean original ("target"). The loss compares pixels. It also
uses VGG19 features and a discriminator if the weights of their terms are not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from paceline.config.resolve import Arguments
from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss, Phase, Weights
from paceline.images.degradation.operations import add_gaussian_noise
from paceline.models.losses import OBJECTIVES
from paceline.models.networks import NetworkTask
from paceline.models.srresnet import Discriminator, SRResNet
from paceline.models.unet import UNet
from paceline.recipes.parts.restoration import (
    ContentLoss,
    RestorationLossSettings,
    RestorationRecipe,
    check_weights,
    make_image_network,
)


@dataclass(frozen=True)
class RestorationSettings(RestorationLossSettings):
    """The network and its loss terms."""

    network: str = setting(
        "unet",
        "architecture: unet (several resolutions), residual (a stack of blocks at full resolution), or spandrel:NAME",
    )
    network_args: Arguments = setting(Arguments(), "arguments of a network from spandrel, e.g. network_args.width=32")
    width: int = setting(32, "channels in the first feature map", at_least=1)
    depth: int = setting(3, "number of times that network=unet halves the resolution", at_least=1)
    num_blocks: int = setting(8, "number of blocks in network=residual", at_least=1)
    content: Literal["mse", "l1", "charbonnier"] = setting("charbonnier", "pixel loss")
    perceptual: float = setting(
        0.0, "weight of the perceptual loss (distance between VGG19 features); 0: VGG19 is not needed", at_least=0
    )
    adversarial: float = setting(0.0, "weight of the adversarial loss; 0: no discriminator", at_least=0)
    tv: float = setting(
        0.0, "weight of the total variation loss (squared differences between adjacent pixels)", at_least=0
    )
    fresh_noise: float = setting(
        0.0,
        "add new Gaussian noise with this standard deviation (on a scale from 0 to 255, for any pixel type) to the "
        "targets at every step, and train on the result instead of the data's input images; 0: off",
        at_least=0,
    )


class Restoration(RestorationRecipe):
    """A restoration network and, if the weight of the adversarial loss is not 0, a discriminator."""

    Settings = RestorationSettings
    required_fields = ("target",)
    weights = Weights("recognised", network_settings=("network", "network_args"))
    ema = ("restorer",)
    defaults = {
        **RestorationRecipe.defaults,
        "data": "degraded",
        "lr": 2e-4,
        "schedule": "cosine",
        "protocol": "rgb",
    }
    presets = {
        # For a first run on a CPU: removes noise from the bundled photographs.
        "quick": {
            "width": 12,
            "depth": 2,
            "crop": 48,
            "lr": 2e-3,
            "images": 8000,
            "evaluate_every": "25%",
            "sample_every": "25%",
            "save_every": "25%",
        },
        # Removes noise with NAFNet, trained for about a quarter of an hour on a large GPU.
        "nafnet": {
            "network": "spandrel:NAFNet",
            "network_args": {
                "width": 32,
                "enc_blk_nums": [2, 2, 4, 8],
                "middle_blk_num": 4,
                "dec_blk_nums": [2, 2, 2, 2],
            },
            "fresh_noise": 25.0,
            "crop": 128,
            "batch_size": "32",
            "reference_batch": 32,
            "optimizer": "adamw",
            "lr": 1e-3,
            "beta2": 0.9,
            "weight_decay": 0.0,
            "schedule": "cosine",
            "warmup": "1%",
            "clip": 1.0,
            "ema_half_life": "20000 images",
            "images": 2_000_000,
        },
    }
    small = {**RestorationRecipe.small, "depth": 2}

    def __init__(self, settings: RestorationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.restorer = make_image_network(
            settings.network,
            settings.network_args,
            NetworkTask(spec.channels, spec.height, spec.width, out_channels=spec.channels),
            {
                "unet": lambda: UNet(spec.channels, settings.width, settings.depth),
                "residual": lambda: SRResNet(
                    1, spec.channels, settings.width, settings.num_blocks, norm="none", output="residual"
                ),
            },
        )
        self.fresh_noise, self.pixels = settings.fresh_noise, spec.pixel_format
        if self.fresh_noise:
            self.draws = {"noise_seeds": Draw((2,), "uniform")}
        self.content_loss = ContentLoss(settings)
        self.objective, self.adversarial = OBJECTIVES[settings.objective], settings.adversarial
        check_weights(self.content_loss, self.adversarial, spec.channels)
        self.discriminator = None
        self.phases = (Phase("restorer", "restorer"),)
        if self.adversarial:
            self.discriminator = Discriminator(spec.channels, settings.d_width, settings.d_norm)
            self.phases += (Phase("discriminator", "discriminator"),)

    def restorer_loss(self, batch: Batch) -> Loss:
        """Restored images should match their targets and, with a discriminator, score as real."""
        restored = self.restorer(self._input(batch))
        terms = self.content_loss(restored, batch["target"])
        if self.discriminator is None:
            return Loss(terms)
        logits = self.discriminator(restored)
        terms["adversarial"] = self.adversarial * self.objective.generator(logits).mean()
        return Loss(terms, shared={"fake": restored}, signals={"fake_score": self.objective.score(logits)})

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Targets should score as real, restored images as fake."""
        assert self.discriminator is not None
        # Use two passes, so that real and restored images have separate BatchNorm statistics.
        real, fake = self.discriminator(batch["target"]), self.discriminator(batch["fake"])
        terms = {"real": self.objective.real(real).mean(), "fake": self.objective.fake(fake).mean()}
        return Loss(terms, signals=self.objective.scores(real, fake))

    def _input(self, batch: Batch) -> Tensor:
        """Return the images to restore during training."""
        if not self.fresh_noise:
            return batch["image"]
        return add_gaussian_noise(batch["target"], batch["noise_seeds"], self.fresh_noise, self.pixels)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the restored image, its target and the input."""
        return {"image": self.restorer(batch["image"]), "target": batch["target"], "input": batch["image"]}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return the input, the restored image and the target."""
        made = self.predict(batch)
        return {"input": made["input"], "restored": made["image"], "target": made["target"]}

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Return restored images of the same size."""
        return {"image": self.restorer(images).clamp(-1, 1)}
