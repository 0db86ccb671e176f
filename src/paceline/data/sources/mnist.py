"""MNIST: 70,000 grey images of handwritten digits, 28×28 pixels."""

from paceline.data.torchvision_source import TorchvisionSource


class Mnist(TorchvisionSource):
    """Grey images of the ten digits, 28×28 pixels."""

    dataset = "MNIST"
    expected = (
        "MNIST/raw/ with train-images-idx3-ubyte, train-labels-idx1-ubyte, "
        "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
    )
    class_names = tuple("0123456789")
    flip_allowed = False
