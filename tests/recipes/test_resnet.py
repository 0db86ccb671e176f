import pytest
import torch
import torchvision
from torch import nn

from paceline.models.resnet import ResNet


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def with_meta_weights(make, **settings) -> nn.Module:
    """Return a network on the meta device, which allocates no memory for weights."""
    with torch.device("meta"):
        return make(**settings)


def test_resnet18_for_cifar100_has_the_expected_number_of_parameters():
    network = with_meta_weights(ResNet, depth=18, num_classes=100, stem="small")
    assert num_parameters(network) == 11_220_132


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_plain_resnets_have_the_same_parameter_names_and_shapes_as_in_torchvision(depth):
    ours = with_meta_weights(ResNet, depth=depth, num_classes=1000)
    theirs = with_meta_weights(getattr(torchvision.models, f"resnet{depth}"))
    assert num_parameters(ours) == num_parameters(theirs)
    shapes = [{name: tensor.shape for name, tensor in network.state_dict().items()} for network in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("depth", [18, 50])
def test_plain_resnets_with_torchvision_weights_compute_the_same_outputs(depth):
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).eval()
    ours = ResNet(depth, num_classes=7).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize(("stem", "side_px"), [("small", 32), ("plain", 8)])
def test_the_small_stem_keeps_the_image_size_and_the_plain_stem_divides_it_by_four(stem, side_px):
    network = ResNet(18, num_classes=5, in_channels=1, stem=stem, width=4)
    sides = []
    network.layer1.register_forward_hook(lambda module, inputs, output: sides.append(output.shape[-1]))
    assert network(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    assert sides == [side_px]


def test_a_network_without_normalisation_has_biases_and_no_buffers():
    network = ResNet(18, num_classes=5, norm="none", width=4, stem="small")
    assert not list(network.buffers())
    assert all(module.bias is not None for module in network.modules() if isinstance(module, nn.Conv2d))


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_every_residual_branch_of_an_untrained_network_outputs_zero(norm):
    torch.manual_seed(0)
    network = ResNet(18, num_classes=5, norm=norm, width=4, stem="small")
    features = torch.rand(2, 4, 8, 8)
    assert torch.equal(network.layer1(features), features)


@pytest.mark.parametrize("norm", ["batch", "none"])
@pytest.mark.parametrize("depth", [18, 50])
def test_a_network_can_overfit_a_few_images(depth, norm):
    torch.manual_seed(0)
    network = ResNet(depth, num_classes=4, norm=norm, width=8, stem="small")
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for _ in range(60):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2


def test_dropout_changes_the_output_only_in_training_mode():
    torch.manual_seed(0)
    network = ResNet(18, num_classes=5, width=4, stem="small", dropout=0.5)
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))
