"""Recognises well-known networks by the names of their tensors, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from paceline.core.errors import UserError

NUM_KEYS = 4  # tensors listed in a message

# A network is recognised if each pattern matches the beginning of a tensor's name. The first match counts.
ARCHITECTURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("RRDBNet (ESRGAN, Real-ESRGAN; try --recipe esrgan)", (r"(RRDB_trunk|body)\.0\.(RDB|rdb)1\.conv1\.",)),
    ("RRDBNet (ESRGAN; try --recipe esrgan)", (r"model\.1\.sub\.0\.RDB1\.",)),
    ("HAT", (r"layers\.0\.residual_group\.blocks\.0\.conv_block\.",)),
    ("SwinIR", (r"layers\.0\.residual_group\.blocks\.0\.attn\.",)),
    ("RCAN", (r"body\.0\.body\.0\.body\.0\.", r"body\.0\.body\.0\.body\.3\.")),
    ("EDSR", (r"head\.0\.weight", r"body\.0\.body\.0\.weight", r"tail\.")),
    ("EDSR or MSRResNet (BasicSR)", (r"conv_first\.", r"body\.0\.conv1\.", r"conv_last\.")),
    ("SRVGGNetCompact (Real-ESRGAN)", (r"body\.0\.weight", r"body\.1\.weight", r"body\.2\.weight")),
    ("NAFNet", (r"intro\.weight", r"encoders\.0\.0\.", r"ending\.weight")),
    ("Restormer", (r"patch_embed\.proj\.weight", r"encoder_level1\.0\.attn\.")),
    ("a pix2pix or CycleGAN generator (try --recipe translation)", (r"model\.model\.\d|model\.\d+\.conv_block\.",)),
    ("StyleGAN", (r"(.*\.)?(synthesis\.b4|mapping\.fc0|g_mapping|style\.1)\.",)),
    ("a diffusion U-Net", (r"down_blocks\.0\.resnets\.|input_blocks\.0\.0\.|model\.diffusion_model\.",)),
    ("a vision transformer", (r"(cls_token|class_token|pos_embed)$",)),
    ("a ResNet classifier (timm or torchvision)", (r"layer1\.0\.conv1\.", r"layer4\.0\.")),
    ("a VGG classifier", (r"features\.0\.weight", r"classifier\.0\.weight")),
)


def check_architecture(keys: Iterable[str], path: Path, supported: str) -> None:
    """Raise UserError with the hint `supported` if the tensors belong to a known network that an importer rejects."""
    keys = list(keys)
    for name, patterns in ARCHITECTURES:
        if all(any(re.match(pattern, key) for key in keys) for pattern in patterns):
            raise UserError(f"{path}: contains {name}; {supported}")


def first_keys(keys: Iterable[str]) -> str:
    """Return the names of a few tensors, for a message."""
    keys = list(keys)
    return f"(its tensors: {', '.join(keys[:NUM_KEYS])}{', …' * (len(keys) > NUM_KEYS)})"
