"""Networks from spandrel accept images of any size, train completely, and are recognised from their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.errors import UserError
from paceline.models.networks import NetworkChoice, NetworkTask, make_network, recognise

pytest.importorskip("spandrel")
pytestmark = pytest.mark.extras

WINDOWED = {"embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 8, "mlp_ratio": 2.0}
# Small arguments for each network, and the scale.
NETWORKS: dict[str, tuple[dict[str, Any], int]] = {
    "NAFNet": ({"width": 4, "enc_blk_nums": [1, 1], "middle_blk_num": 1, "dec_blk_nums": [1, 1]}, 1),
    "SwinIR": (WINDOWED, 4),
    "RCAN": ({"n_resgroups": 1, "n_resblocks": 2, "n_feats": 16}, 3),
    "ESRGAN": ({"num_filters": 8, "num_blocks": 1}, 4),
    "SPAN": ({"feature_channels": 8}, 2),
    "Compact": ({"num_feat": 8, "num_conv": 2}, 4),
    "Swin2SR": (WINDOWED, 2),
    "HAT": ({**WINDOWED, "compress_ratio": 2, "squeeze_factor": 4}, 2),
    "DAT": ({"embed_dim": 32, "depth": [2], "num_heads": [2], "split_size": [4, 8], "expansion_factor": 2.0}, 2),
    "SCUNet": ({"config": [1, 1, 1, 1, 1, 1, 1], "dim": 64}, 1),
}
MORE_ARGUMENTS = [
    ("ESRGAN", {"num_filters": 8, "num_blocks": 1, "shuffle_factor": 2}, 2),
    ("ESRGAN", {"num_filters": 8, "num_blocks": 1, "shuffle_factor": 4}, 1),
    ("SwinIR", {**WINDOWED, "upsampler": "pixelshuffledirect"}, 2),
    ("SwinIR", {**WINDOWED, "upsampler": "nearest+conv"}, 4),
    ("SwinIR", WINDOWED, 1),
]


def build(name: str, arguments: dict[str, Any], scale: int, channels: int = 3, side: int = 32) -> torch.nn.Module:
    torch.manual_seed(0)
    task = NetworkTask(channels, side, side, out_channels=channels, scale=scale)
    return make_network(NetworkChoice(f"spandrel:{name}", arguments), task)


def lively(network: torch.nn.Module) -> torch.nn.Module:
    """Give zero parameters small random values, so that every part of the network affects the output."""
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.02)
    return network


EVERY = [*((name, *rest) for name, rest in NETWORKS.items()), *MORE_ARGUMENTS]


@pytest.mark.parametrize(("name", "arguments", "scale"), EVERY, ids=str)
def test_every_trainable_parameter_gets_a_gradient(name: str, arguments: dict[str, Any], scale: int) -> None:
    network = lively(build(name, arguments, scale)).train()
    result = network(torch.rand(2, 3, 32, 32) * 2 - 1)
    assert result.shape == (2, 3, 32 * scale, 32 * scale)
    result.square().mean().backward()
    assert [key for key, one in network.named_parameters() if one.requires_grad and one.grad is None] == []


@pytest.mark.parametrize(("name", "arguments", "scale"), EVERY, ids=str)
def test_the_result_equals_that_of_spandrel_for_images_of_any_size(
    name: str, arguments: dict[str, Any], scale: int
) -> None:
    from spandrel import ModelLoader

    network = lively(build(name, arguments, scale)).eval()
    found = recognise({key.removeprefix("network."): value for key, value in _full_state(network).items()}, "x.pth")
    assert found is not None
    assert found.network == f"spandrel:{name}" and (found.channels, found.scale) == (3, scale)
    theirs = ModelLoader().load_from_state_dict(_full_state(network)).eval()
    for size in ((37, 29), (9, 17)):
        images = torch.rand(1, 3, *size)
        with torch.no_grad():
            ours = network(images * 2 - 1) * 0.5 + 0.5
        assert ours.shape[-2:] == (size[0] * scale, size[1] * scale)
        assert (ours.clamp(0, 1) - theirs(images)).abs().max() < 1e-5


def _full_state(network: Any) -> dict[str, torch.Tensor]:
    """Return a state_dict as in a public file, with the tensors that Paceline leaves out."""
    state = {key.removeprefix("network."): value.clone() for key, value in network.state_dict().items()}
    for name in network._merged:
        weight = network.network.get_submodule(name).sk.weight
        out, into = weight.shape[:2]
        state |= {f"{name}.eval_conv.weight": torch.zeros(out, into, 3, 3), f"{name}.eval_conv.bias": torch.zeros(out)}
    masks = dict(network.network.named_buffers())
    return state | {key: mask for key, mask in masks.items() if key.rpartition(".")[2].startswith("attn_mask")}


def test_tensors_that_are_computed_when_needed_are_not_stored() -> None:
    span, swin = build("SPAN", *NETWORKS["SPAN"]), build("SwinIR", *NETWORKS["SwinIR"])
    assert not [key for key in (*span.state_dict(), *swin.state_dict()) if "eval_conv" in key or "attn_mask" in key]
    larger = build("SwinIR", *NETWORKS["SwinIR"], side=48)
    larger.load_state_dict(swin.state_dict())  # the weights do not depend on the training size


@pytest.mark.parametrize("name", ["SwinIR", "Swin2SR", "HAT"])
def test_windows_are_shifted_even_if_training_images_have_the_size_of_one_window(name: str) -> None:
    small, large = (build(name, *NETWORKS[name], side=side).eval() for side in (8, 32))
    large.load_state_dict(small.state_dict())
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        assert torch.equal(small(images), large(images))
        assert small(images[..., :8, :8]).isfinite().all()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_data_determines_the_channels(channels: int) -> None:
    network = build("NAFNet", *NETWORKS["NAFNet"], channels=channels)
    assert network(torch.zeros(1, channels, 8, 8)).shape == (1, channels, 8, 8)


BAD_INPUT: list[tuple[str, dict[str, Any], int, str]] = [
    ("NAFnet", {}, 1, "did you mean spandrel:NAFNet"),
    ("Nothing", {}, 1, "spandrel has no network of this name"),
    ("NAFNet", {"widht": 4}, 1, "cannot be built with network_args widht=4 .*unexpected keyword argument 'widht'"),
    ("NAFNet", {"width": "many"}, 1, "cannot be built with network_args width=many"),
    ("NAFNet", {"img_channel": 3}, 1, "the data determines it"),
    ("SwinIR", {"upscale": 2}, 2, "use --set scale=N"),
    ("SwinIR", {"img_size": 64}, 2, "use --crop"),
    ("NAFNet", {}, 4, "at scale 1, but this run needs 3 to 3 channels at scale 4"),
    ("GFPGAN", {}, 1, "faces"),
    ("LaMa", {}, 1, "needs a mask"),
    ("DRUNet", {}, 1, "needs a map of the noise level"),
]


@pytest.mark.parametrize(("name", "arguments", "scale", "message"), BAD_INPUT)
def test_bad_names_and_arguments_are_rejected_in_one_line(
    name: str, arguments: dict[str, Any], scale: int, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(name, arguments, scale)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_windows_of_uformer_do_not_depend_on_the_size_of_the_training_images() -> None:
    arguments = {"embed_dim": 8, "depths": [2] * 9}
    small, large = (lively(build("Uformer", arguments, 1, side=side)).eval() for side in (64, 256))
    state = {key.removeprefix("network."): value for key, value in small.state_dict().items()}
    large.load_state_dict(small.state_dict())
    images = torch.rand(1, 3, 100, 70) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(small(images), large(images))
    found = recognise(state, "x.pth")
    assert found is not None and found.network == "spandrel:Uformer"


def test_weights_of_an_unknown_network_are_not_recognised() -> None:
    assert recognise({"stem.weight": torch.zeros(3, 3)}, "x.pth") is None


def test_incomplete_weights_of_a_known_network_are_rejected() -> None:
    state = {
        key.removeprefix("network."): value for key, value in build("NAFNet", *NETWORKS["NAFNet"]).state_dict().items()
    }
    del state["ending.bias"]
    with pytest.raises(UserError, match=r"x\.pth: looks like NAFNet, but does not fit it"):
        recognise(state, "x.pth")
