"""Fashion-MNIST: 70,000 images of clothes of 28×28 pixels."""

from paceline.data.torchvision_source import TorchvisionSource


class FashionMnist(TorchvisionSource):
    """Grey, 28×28, ten kinds of clothes."""

    dataset = "FashionMNIST"
    expected = "FashionMNIST/raw/ with train- and t10k-images-idx3-ubyte, train- and t10k-labels-idx1-ubyte"
