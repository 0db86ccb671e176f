"""The Inception of 2015 as our own network: what a TorchScript file of the same names computes, in all arithmetics."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.evaluation import _inception
from paceline.evaluation._feature_network import FeatureNetwork, computing_in
from paceline.evaluation._inception import FoldedInception, ScriptedInception
from paceline.evaluation._inception_network import ConvReLU, in_float16, inception_network

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NARROW = 8  # channels of all layers but the last block's


class Layer(nn.Module):
    """Convolution, BatchNorm without a scale, ReLU, as a file has them."""

    def __init__(
        self, channels: int, kernel: tuple[int, int], stride: int = 1, *, padded: bool = True, out: int = NARROW
    ) -> None:
        super().__init__()
        var = torch.rand(out) + 0.01
        spread = (3 * var / (channels * kernel[0] * kernel[1])).sqrt()  # what comes out is neither lost nor huge
        for name, value in {
            "weight": torch.randn(out, channels, *kernel) * spread[:, None, None, None],
            "beta": torch.randn(out) / 4,
            "mean": torch.randn(out) * var.sqrt() / 4,
            "var": var,
        }.items():
            self.register_buffer(name, value)
        self.stride, self.padding = stride, (kernel[0] // 2, kernel[1] // 2) if padded and stride == 1 else (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, None, self.stride, self.padding)
        return F.batch_norm(x, self.mean, self.var, None, self.beta, False, 0.1, 0.001).relu()


class Block(nn.Module):
    """Its children side by side, as channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([child(x) for child in self.children()], dim=1)


class LastBlock(nn.Module):
    """One whose towers fork."""

    def __init__(self, channels: int, pool: nn.Module, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = Layer(channels, (1, 1), out=widths[0])
        self.tower_conv = Layer(channels, (1, 1))
        self.tower_mixed_conv = Layer(NARROW, (1, 3), out=widths[1])
        self.tower_mixed_conv_1 = Layer(NARROW, (3, 1), out=widths[1])
        self.tower_1_conv = Layer(channels, (1, 1))
        self.tower_1_conv_1 = Layer(NARROW, (3, 3))
        self.tower_1_mixed_conv = Layer(NARROW, (1, 3), out=widths[1])
        self.tower_1_mixed_conv_1 = Layer(NARROW, (3, 1), out=widths[1])
        self.tower_2_pool = pool
        self.tower_2_conv = Layer(channels, (1, 1), out=widths[2])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.tower_conv(x), self.tower_1_conv_1(self.tower_1_conv(x))
        towers = [self.tower_mixed_conv(a), self.tower_mixed_conv_1(a)]
        towers += [self.tower_1_mixed_conv(b), self.tower_1_mixed_conv_1(b)]
        return torch.cat([self.conv(x), *towers, self.tower_2_conv(self.tower_2_pool(x))], dim=1)


def named(parent: nn.Module, **children: nn.Module) -> nn.Module:
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def tower(channels: int, *kernels: tuple[int, int], stride: int = 1) -> nn.Module:
    layers = {}
    for number, kernel in enumerate(kernels):
        last = stride if number == len(kernels) - 1 else 1
        layers[f"conv_{number}" if number else "conv"] = Layer(NARROW if number else channels, kernel, last)
    return named(nn.Sequential(), **layers)


def file_network(*, padding_counts: bool) -> nn.Module:
    """A narrow network with the names of the file; with padding in its averages it is another network."""

    def average() -> nn.Module:
        return nn.AvgPool2d(3, 1, 1, count_include_pad=padding_counts)

    def mixed(channels: int, first: list[tuple[int, int]], second: list[tuple[int, int]]) -> nn.Module:
        pooled = named(nn.Sequential(), pool=average(), conv=Layer(channels, (1, 1)))
        towers = {"tower": tower(channels, *first), "tower_1": tower(channels, *second), "tower_2": pooled}
        return named(Block(), conv=Layer(channels, (1, 1)), **towers)

    one, three, five, flat, high = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)
    wide = 4 * NARROW  # what four branches make
    after_3, after_8 = 2 * NARROW + wide, 2 * NARROW + wide
    blocks = {
        "conv": Layer(3, three, 2),
        "conv_1": Layer(NARROW, three, padded=False),
        "conv_2": Layer(NARROW, three),
        "pool0": nn.MaxPool2d(3, 2),
        "conv_3": Layer(NARROW, one),
        "conv_4": Layer(NARROW, three, padded=False),
        "pool1": nn.MaxPool2d(3, 2),
        **{
            f"mixed{suffix}": mixed(NARROW if not suffix else wide, [one, five], [one, three, three])
            for suffix in ("", "_1", "_2")
        },
        "mixed_3": named(
            Block(),
            conv=Layer(wide, three, 2),
            tower=tower(wide, one, three, three, stride=2),
            pool=nn.MaxPool2d(3, 2),
        ),
        **{
            f"mixed_{n}": mixed(after_3 if n == 4 else wide, [one, flat, high], [one, high, flat, high, flat])
            for n in range(4, 8)
        },
        "mixed_8": named(
            Block(),
            tower=tower(wide, one, three, stride=2),
            tower_1=tower(wide, one, flat, high, three, stride=2),
            pool=nn.MaxPool2d(3, 2),
        ),
        "mixed_9": LastBlock(after_8, average(), (NARROW, NARROW, NARROW)),
        "mixed_10": LastBlock(6 * NARROW, nn.MaxPool2d(3, 1, 1), (320, 384, 192)),
        "pool2": nn.AvgPool2d(8),
        "flat": nn.Flatten(),
    }
    net = named(nn.Module(), layers=named(nn.Sequential(), **blocks))
    net.forward = net.layers.forward  # type: ignore[method-assign]
    return named(nn.Sequential(), net=net)


def opened(
    folder: Path, patch: pytest.MonkeyPatch, device: torch.device = CPU, *, padding_counts: bool = False
) -> tuple[FeatureNetwork, nn.Module]:
    """What a file is opened as, and the network that it was made of."""
    torch.manual_seed(0)
    network, path = file_network(padding_counts=padding_counts), folder / "narrow.pt"
    trial = _inception.enlarged(_inception.trial_picture(CPU))
    with computing_in("fp32"):  # a trace keeps, for ever, whether its convolutions may be in TF32
        torch.jit.trace(network, trial).save(str(path))
    digest = sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match="not the Inception of 2015: it sees other features"):
        _inception.load_inception(str(path), digest, CPU)
    patch.setattr(_inception, "ANSWER", tuple(network(trial)[0, :8].tolist()))  # now this one is the Inception
    return _inception.load_inception(str(path), digest, device), network


def folded_beside(scripted: FeatureNetwork, folder: Path, device: torch.device) -> str:
    """Why our own network was not taken, for a failure's message; raises where it cannot be run at all."""
    trial = _inception.trial_picture(device)
    weights = _inception.load_script(str(folder / "narrow.pt"), device).state_dict()
    answer, found = (
        network(trial, "fp32").features for network in (scripted, FoldedInception(inception_network(weights), ""))
    )
    return (
        f"differs by {(found - answer).abs().max():.1e} of {answer.max():.1e} at most, {answer.mean():.1e} on average"
    )


def some_pictures() -> Tensor:
    """Smooth ones, and noise."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(0, 256, (2, 3, 4, 4), generator=generator, dtype=torch.uint8)
    noise = torch.randint(0, 256, (2, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return torch.cat([coarse.repeat_interleave(8, 2).repeat_interleave(8, 3), noise])


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=[pytest.mark.gpu, no_gpu])], ids=str)
@torch.no_grad()
def test_our_network_sees_what_the_file_sees_in_every_arithmetic(tmp_path, monkeypatch, device):
    ours, file = opened(tmp_path, monkeypatch, device)
    assert isinstance(ours, FoldedInception), folded_beside(ours, tmp_path, device)
    wanted = file(_inception.enlarged(some_pictures()))
    assert wanted.shape == (4, 2048) and (wanted[0] - wanted[1]).abs().max() > 0.1, "pictures can be told apart"
    tf32 = 1e-5 if device == CPU else 3e-3
    for arithmetic, within in (("fp32", 1e-5), ("tf32", tf32), ("fp16", 2e-3)):
        features = ours(some_pictures().to(device), arithmetic).features.cpu()
        assert features.dtype == torch.float32 and features.isfinite().all()
        assert (features - wanted).abs().max() < within * wanted.max(), arithmetic
    assert ours.networks["fp16"][0].high.dtype == torch.float16
    assert ours.networks["fp32"][0].weight.dtype == torch.float32, "fp16 has weights of its own"


def test_weights_lose_next_to_nothing_in_fp16():
    weight = torch.randn(8, 8, 3, 3) / 10
    layer = in_float16(ConvReLU(weight, torch.randn(8), 1, (1, 1)))
    one, two = weight.half().double(), layer.high.double() + layer.low.double()
    assert (two - weight).abs().max() < (one - weight).abs().max() / 100


@torch.no_grad()
def test_fp16_is_refused_where_it_sees_other_features(tmp_path, monkeypatch):
    ours, _ = opened(tmp_path, monkeypatch)
    monkeypatch.setattr(_inception, "in_float16", lambda network: lambda x: network(x) + 1)
    with pytest.raises(UserError, match=r"judge_precision=fp16: this GPU computes other features"):
        ours(some_pictures(), "fp16")


def test_a_file_of_the_same_names_that_computes_otherwise_is_run_as_it_is(tmp_path, monkeypatch):
    network, file = opened(tmp_path, monkeypatch, padding_counts=True)
    assert isinstance(network, ScriptedInception)
    wanted = file(_inception.enlarged(some_pictures()))
    assert torch.allclose(network(some_pictures(), "fp32").features, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="judge_precision=fp16: only the Inception of a known file has it"):
        network.require("fp16", GPU)


def test_fp16_is_for_gpus():
    network = FoldedInception(nn.Identity(), "")
    network.require("fp16", GPU)
    with pytest.raises(UserError, match=r"judge_precision=fp16 is for GPUs.* take judge_precision=fp32"):
        network.require("fp16", CPU)


def test_enlarging_by_two_matrices_is_enlarging_pixel_by_pixel():
    pictures = torch.rand(2, 3, 5, 7) * 255
    enlarged = _inception.resize_like_tensorflow(pictures, 12)
    for row, column in ((0, 0), (1, 11), (6, 5), (11, 3), (11, 11)):
        y, x = row * 5 / 12, column * 7 / 12
        top, left = int(y), int(x)
        bottom, right = min(top + 1, 4), min(left + 1, 6)
        upper = pictures[..., top, left] * (1 - x + left) + pictures[..., top, right] * (x - left)
        lower = pictures[..., bottom, left] * (1 - x + left) + pictures[..., bottom, right] * (x - left)
        wanted = upper * (1 - y + top) + lower * (y - top)
        assert torch.allclose(enlarged[..., row, column], wanted, rtol=1e-5, atol=1e-4)
