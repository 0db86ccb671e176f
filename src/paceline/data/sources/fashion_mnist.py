"""Fashion-MNIST: 70,000 grey images of clothing, 28×28 pixels, in 10 classes."""

from paceline.data.torchvision_source import TorchvisionSource


class FashionMnist(TorchvisionSource):
    """Grey images of 28×28 pixels that show ten kinds of clothing."""

    dataset = "FashionMNIST"
    expected = (
        "FashionMNIST/raw/ with train-images-idx3-ubyte, train-labels-idx1-ubyte, "
        "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
    )
