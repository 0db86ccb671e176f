"""SVHN: 99,289 colour images of house numbers, 32×32 pixels, labelled with the digit in the middle."""

from paceline.data.torchvision_source import TorchvisionSource


class Svhn(TorchvisionSource):
    """Colour images of the ten digits, 32×32 pixels."""

    dataset = "SVHN"
    expected = "train_32x32.mat and test_32x32.mat"
    has_split_argument = True
    channels_first = True
    class_names = tuple("0123456789")
    flip_allowed = False
    package = "scipy"
    extra = "svhn"
