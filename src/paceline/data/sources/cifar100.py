"""CIFAR-100: 60,000 colour images of 32×32 pixels in 100 classes."""

from paceline.data.torchvision_source import TorchvisionSource


class Cifar100(TorchvisionSource):
    """Colour images of 32×32 pixels in 100 classes. The 20 superclasses are not used."""

    dataset = "CIFAR100"
    expected = "cifar-100-python/ with train, test and meta"
