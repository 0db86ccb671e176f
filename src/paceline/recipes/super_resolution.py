"""Super-resolution: a network learns to upscale photographs 2, 4 or 8 times.

Ledig et al., Photo-Realistic Single Image Super-Resolution Using a Generative Adversarial Network (2017). Stage
`pretrain` trains SRResNet with a pixel loss. Stage `adversarial` trains SRGAN: it starts from pretrained weights
(`--init-from`) and adds a discriminator and VGG19 features. `both` runs the two stages in sequence. If the source has
low-resolution files, they are used. Otherwise, the training crop is downsampled on the device (bicubic).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.resolve import Arguments
from paceline.config.settings import setting
from paceline.contracts.recipe import DataSpec, Weights
from paceline.core.errors import UserError
from paceline.core.types import SettingValues
from paceline.models.layers import normalise_by_image
from paceline.models.networks import NetworkTask
from paceline.models.srresnet import SCALES, Discriminator, SRResNet
from paceline.recipes.parts.restoration import QUICK, UpscalingRecipe, UpscalingSettings, make_image_network

FEW_HUNDRED_PHOTOGRAPHS: SettingValues = {  # what the presets for training on 291 photographs have in common
    "content": "l1",
    "tv": 0.0,
    "rot90": "on",
    "flip": "on",
    "batch_size": "32",
    "reference_batch": 32,
    "lr": 4e-4,
    "schedule": "cosine",
    "warmup": "1%",
    "validation": 0.02,
}


@dataclass(frozen=True)
class SuperResolutionSettings(UpscalingSettings):
    """The stage, the networks and their loss terms."""

    network: str = setting("srresnet", "architecture of the generator: srresnet or spandrel:NAME")
    network_args: Arguments = setting(
        Arguments(), "arguments of a network from spandrel, e.g. network_args.embed_dim=60"
    )
    blocks: Literal["separate", "shared"] = setting(
        "separate", "shared: all residual blocks use the same weights, and so do all upsampling blocks"
    )
    num_blocks: int = setting(16, "number of residual blocks in the generator", at_least=1)
    width: int = setting(64, "feature channels in the generator", at_least=1)
    norm: Literal["batch", "none"] = setting("batch", "normalisation layers in the generator")
    batchnorm: Literal["running", "instance"] = setting(
        "running",
        "with norm=batch, normalise new images using training-set statistics (running) or each image's own (instance)",
    )
    prelu: Literal["shared", "channel"] = setting(
        "shared", "slopes of each PReLU: one for all channels (shared), or one per channel (channel)"
    )
    output: Literal["tanh", "residual"] = setting(
        "residual",
        "residual: add the output to the bicubically upscaled image; tanh: apply tanh to the output, as in SRGAN",
    )


class SuperResolution(UpscalingRecipe):
    """A generator and, in the adversarial stage, a discriminator."""

    Settings = SuperResolutionSettings
    weights = Weights(
        "srgan",
        network_settings=("network", "network_args", "scale"),
        must_match=("scale", "blocks", "num_blocks", "output", "batchnorm"),
    )
    defaults = {**UpscalingRecipe.defaults, "data": "photos", "lr": 1e-4}
    presets = {
        "quick": {
            **QUICK,
            "scale": "2",
            "num_blocks": 3,
            "width": 16,
            "norm": "none",
            "content": "l1",
            "tv": 0.0,
            "schedule": "cosine",
        },
        # The networks, losses and settings from the distributed SRGAN project, which trains on DIV2K.
        "reference": {
            "blocks": "shared",
            "norm": "batch",
            "prelu": "channel",
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
        # Trains a good SRResNet ×4 on a few hundred photographs within minutes on a large GPU: no normalisation, a
        # linear output added to the bicubic upscaling, an L1 loss, and a learning rate that decays to zero.
        "train291": {
            **FEW_HUNDRED_PHOTOGRAPHS,
            "norm": "none",
            "output": "residual",
            "crop": 128,
            "images": 3_000_000,
        },
        # The same data and loss with residual groups and channel attention: RCAN with a quarter of its usual blocks.
        # Larger crops would exclude more of the 291 photographs, of which 264 have at least 160 pixels.
        "rcan291": {
            **FEW_HUNDRED_PHOTOGRAPHS,
            "network": "spandrel:RCAN",
            "network_args": {"n_resgroups": 5, "n_resblocks": 10, "norm": False},
            "crop": 160,
            "lr": 2e-4,  # 4e-4 diverged once, for a short time
            "swap_colours": "on",
            "ema_half_life": "20000 images",
            "images": 1_500_000,
        },
    }
    small = {**UpscalingRecipe.small, "scale": "2"}

    def __init__(self, settings: SuperResolutionSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        low_px = spec.height // self.output_scale, spec.width // self.output_scale
        self.generator = make_image_network(
            settings.network,
            settings.network_args,
            NetworkTask(spec.channels, *low_px, out_channels=spec.channels, scale=self.output_scale),
            {"srresnet": lambda: _make_srresnet(settings, spec.channels)},
        )
        if isinstance(self.generator, SRResNet) and settings.norm == "batch" and settings.batchnorm == "instance":
            self.window_px = low_px
            normalise_by_image(self.generator)
        if self.adversarial:
            self.add_discriminator(Discriminator(spec.channels, settings.d_width, settings.d_norm))


def _make_srresnet(settings: SuperResolutionSettings, channels: int) -> SRResNet:
    scale = int(settings.scale)
    if scale not in SCALES:
        raise UserError(f"scale={scale}: not supported by network=srresnet; use 2, 4 or 8, or a network from spandrel")
    return SRResNet(
        scale=scale,
        channels=channels,
        width=settings.width,
        num_blocks=settings.num_blocks,
        shared=settings.blocks == "shared",
        norm=settings.norm,
        output=settings.output,
        prelu=settings.prelu,
    )
