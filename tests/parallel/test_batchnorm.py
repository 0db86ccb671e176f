"""Our synchronised BatchNorm matches torch's in float32, even for numerically difficult inputs."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from paceline.models.resnet import ResNet
from paceline.parallel import batchnorm
from paceline.parallel.batchnorm import SynchronizedBatchNorm, leave_batchnorm_eager, sum_over_processes, synchronize
from paceline.parallel.torch_internals import local_collectives

pytestmark = pytest.mark.usefixtures("one_process")


def test_batchnorm_keeps_the_dtype_names_and_values_of_the_module_it_replaces() -> None:
    plain = nn.BatchNorm2d(3).bfloat16().eval()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    norm = synchronize(plain, ours=True)
    assert not norm.training and norm.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    normal = norm.train()(torch.randn(4, 3, 5, 5).bfloat16())
    normal.float().square().sum().backward()
    assert normal.dtype == norm.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (10.0, 0.01), (100.1, 0.0), (300.0, 0.1), (1000.0, 1.0)])
def test_batchnorm_matches_torch_for_inputs_far_from_zero(mean: float, std: float) -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(3)
    ours = synchronize(nn.BatchNorm2d(3), ours=True)
    assert isinstance(ours, SynchronizedBatchNorm)
    images = mean + std * torch.randn(8, 3, 5, 5)
    exact = nn.BatchNorm2d(3).double()(images.double())
    theirs(images)
    of_the_mean = 2 * torch.finfo(torch.float32).eps * mean / max(std, theirs.eps**0.5)  # rounding error of float32
    allowed = of_the_mean + 1e-5
    assert (ours(images).double() - exact).abs().max() <= allowed
    assert torch.allclose(ours.running_mean, theirs.running_mean, rtol=1e-5)
    assert torch.allclose(ours.running_var, theirs.running_var, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("layout", ["plain", "channels last", "cut from a larger one"])
@pytest.mark.parametrize("affine", [True, False])
def test_batchnorm_gradients_match_those_from_torch(affine: bool, layout: str) -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(3, affine=affine).double()
    if affine:
        nn.init.normal_(theirs.weight)
        nn.init.normal_(theirs.bias)
    ours = synchronize(deepcopy(theirs), ours=True)
    images = 5 + torch.randn(4, 3, 5, 6, dtype=torch.float64)
    if layout == "channels last":
        images = images.to(memory_format=torch.channels_last)
    images = (images[..., 1:] if layout == "cut from a larger one" else images).requires_grad_()
    weights = torch.randn(images.shape, dtype=torch.float64)
    for our, their in zip(gradients(ours, images, weights), gradients(theirs, images, weights), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)


def test_each_layer_needs_one_collective_forward_and_one_backward() -> None:
    network = synchronize(ResNet(18, num_classes=2, stem="small", width=2), ours=True)
    num_layers = sum(isinstance(layer, SynchronizedBatchNorm) for layer in network.modules())
    with local_collectives() as collectives:
        network(torch.randn(2, 3, 32, 32)).sum().backward()
    assert (num_layers, len(collectives)) == (20, 40)


def gradients(norm: nn.Module, images: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((norm(images) * weights).square().sum(), [images, *norm.parameters()])


def test_batchnorm_can_be_differentiated_twice() -> None:
    norm = synchronize(nn.BatchNorm1d(2).double(), ours=True)
    assert torch.autograd.gradgradcheck(norm, torch.randn(5, 2, dtype=torch.float64, requires_grad=True))


def test_batchnorm_without_a_bias_has_the_same_gradients_as_in_torch() -> None:
    theirs = nn.BatchNorm2d(3).double()
    nn.init.normal_(theirs.weight)
    theirs.bias = None
    ours = synchronize(deepcopy(theirs), ours=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    for norm in (ours, theirs):
        (slope,) = torch.autograd.grad(norm(images).pow(3).sum(), images, create_graph=True)
        slope.square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-10, atol=1e-12)


def test_batchnorm_can_be_frozen_between_the_forward_pass_and_the_second_derivative() -> None:
    images = torch.randn(4, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    found = []
    for norm in (nn.BatchNorm2d(3).double(), synchronize(nn.BatchNorm2d(3).double(), ours=True)):
        cubes = norm(images).pow(3).sum()
        norm.requires_grad_(False)
        (slope,) = torch.autograd.grad(cubes, images, create_graph=True)
        found += torch.autograd.grad(slope.square().sum(), images)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_the_output_of_batchnorm_may_be_modified_in_place_but_not_its_input() -> None:
    norm = synchronize(nn.BatchNorm2d(3), ours=True)
    images = torch.randn(4, 3, 5, 5, requires_grad=True)
    norm(images).relu_().sum().backward()
    doubled = 2 * images
    normal = norm(doubled)
    doubled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normal.square().sum().backward()


class NormThenActivation(nn.BatchNorm2d):
    """A BatchNorm that also applies an activation, like timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.PReLU(channels, init=0.1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(input))


@pytest.mark.parametrize("ours", [True, False])
def test_a_batchnorm_with_an_activation_keeps_it_when_it_is_synchronised(ours: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), NormThenActivation(4))
    changed = synchronize(deepcopy(plain), ours=ours)
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert type(changed[1]).forward is not type(plain[1]).forward
    images = torch.randn(8, 3, 6, 6)
    if ours:  # torch's version needs a GPU in training mode
        assert torch.allclose(changed(images), plain(images), atol=1e-5)
    assert torch.allclose(changed.eval()(images), plain.eval()(images), atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        normal = self.norm(self.first(images).relu())
        result: torch.Tensor = self.second(normal).relu()
        return result


def test_a_synchronised_batchnorm_runs_eagerly_inside_a_compiled_network() -> None:
    torch.manual_seed(0)
    network = synchronize(Block(), ours=True)
    images = torch.randn(2, 3, 8, 8)
    expected = deepcopy(network)(images)
    leave_batchnorm_eager(network)
    leave_batchnorm_eager(network)  # a second call changes nothing
    assert isinstance(network.norm, SynchronizedBatchNorm)
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(network, backend=keep, dynamic=False)
    assert torch.allclose(compiled(images), expected)
    assert len(graphs) == 2, "one before the BatchNorm and one after it"


def test_a_copy_of_a_batchnorm_that_runs_eagerly_has_its_own_statistics() -> None:
    norm = synchronize(nn.BatchNorm2d(3), ours=True)
    leave_batchnorm_eager(norm)
    copy = deepcopy(norm)
    copy(1 + torch.randn(2, 3, 4, 4))
    assert norm.num_batches_tracked == 0 and copy.num_batches_tracked == 1


class Frozen(nn.BatchNorm2d):
    """A BatchNorm that stays in eval mode during training."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


@pytest.mark.parametrize("ours", [True, False])
def test_a_frozen_batchnorm_stays_as_it_is(ours: bool) -> None:
    frozen = Frozen(3)
    network = synchronize(nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(frozen)).eval(), ours=ours)
    assert isinstance(network[0], SynchronizedBatchNorm if ours else nn.SyncBatchNorm) and network[1][0] is frozen
    assert not network.train()[1][0].training and network[0].training
    assert synchronize(frozen, ours=ours) is frozen


@pytest.mark.parametrize("ours", [True, False])
def test_a_batchnorm_with_several_names_is_synchronised_under_each_of_them(ours: bool) -> None:
    norm, other = nn.BatchNorm2d(3), nn.Module()
    network = nn.Module()
    network.first = network.second = other.third = norm
    network.other = other
    synchronize(network, ours=ours)
    assert isinstance(network.first, SynchronizedBatchNorm if ours else nn.SyncBatchNorm)
    assert network.first is network.second is other.third
    network.eval().first(torch.randn(2, 3, 4, 4))


def test_a_sum_across_processes_has_no_gradient() -> None:
    assert not sum_over_processes(torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize("few_bytes", [0, 2**16])
def test_a_sum_across_processes_keeps_the_shape_and_dtype(few_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batchnorm, "SMALL_BYTES", few_bytes)
    for own in (torch.tensor(2), torch.tensor([1, 2], dtype=torch.int32), torch.rand(2, 3), torch.zeros(0)):
        total = sum_over_processes(own.clone())
        assert total.dtype == own.dtype and torch.equal(total, own)
