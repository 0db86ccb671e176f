"""MNIST: 70,000 handwritten digits of 28×28 pixels."""

from paceline.data.torchvision_source import TorchvisionSource


class Mnist(TorchvisionSource):
    """Grey, 28×28, ten digits."""

    dataset = "MNIST"
    expected = "MNIST/raw/ with train- and t10k-images-idx3-ubyte, train- and t10k-labels-idx1-ubyte"
    class_names = tuple("0123456789")
    flip_allowed = False
