"""Networks from spandrel on one GPU: a captured step equals an eager step, and tiles equal the whole image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_on_one_gpu import trained

from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.inference.trained import TrainedModel, build
from paceline.training.graph import GraphedStep

pytest.importorskip("spandrel")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NAFNET = {"width": 8, "enc_blk_nums": [1, 1], "middle_blk_num": 1, "dec_blk_nums": [1, 1]}
SWINIR = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "mlp_ratio": 2.0}
CASES = [
    ("restoration", "NAFNet", NAFNET, {}),
    ("restoration", "SwinIR", SWINIR, {"crop": 24}),
    ("super_resolution", "SwinIR", SWINIR, {"scale": "2"}),
    ("super_resolution", "HAT", {**SWINIR, "compress_ratio": 2, "squeeze_factor": 4}, {"scale": "2"}),
    ("super_resolution", "SPAN", {"feature_channels": 8}, {"scale": "2"}),
    ("super_resolution", "RCAN", {"n_resgroups": 1, "n_resblocks": 2, "n_feats": 16}, {"scale": "4"}),
    ("super_resolution", "ESRGAN", {"num_filters": 8, "num_blocks": 1}, {"scale": "4"}),
]


@pytest.mark.parametrize(("recipe", "network", "arguments", "more"), CASES, ids=str)
def test_a_captured_step_is_bit_identical_to_an_eager_step(
    recipe: str, network: str, arguments: dict[str, Any], more: dict[str, Any]
) -> None:
    settings = {"network": f"spandrel:{network}", "network_args": arguments, **more}
    eager, graphed = trained(recipe, graph="off", **settings), trained(recipe, graph="on", **settings)
    assert isinstance(graphed.run_step, GraphedStep) and graphed.run_step.captured, "nothing was captured"
    ours, theirs = graphed.recipe.state_dict(), eager.recipe.state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_the_halo_measured_on_the_gpu_equals_that_on_the_cpu() -> None:
    settings = {"network": "spandrel:SwinIR", "network_args": SWINIR, "scale": "2"}
    config, spec = configure("super_resolution", settings, small=True), DataSpec(3, 64, 64)
    models = [TrainedModel(build(config, spec), config, spec, "") for _ in range(2)]
    models[1].recipe.load_state_dict(models[0].recipe.state_dict())
    assert models[1].receptive_field.is_measurable  # traced before the weights move to the GPU
    models[1].recipe.cuda()
    halos = [model.tiled_field.tiled_halo_px for model in models]
    assert halos[0] == halos[1] and not models[1].tiled_field.obstacles
