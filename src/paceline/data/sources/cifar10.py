"""CIFAR-10: 60,000 colour images of 32×32 pixels in 10 classes."""

from paceline.data.torchvision_source import TorchvisionSource


class Cifar10(TorchvisionSource):
    """Colour images of 32×32 pixels in ten classes of animals and vehicles."""

    dataset = "CIFAR10"
    expected = "cifar-10-batches-py/ with data_batch_1 … data_batch_5, test_batch and batches.meta"
