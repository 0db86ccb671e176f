"""SVHN: 99,289 house numbers, one digit in the middle, of 32×32 pixels."""

from paceline.data.torchvision_source import TorchvisionSource


class Svhn(TorchvisionSource):
    """Colour, 32×32, ten digits."""

    dataset = "SVHN"
    expected = "train_32x32.mat and test_32x32.mat"
    says_split = True
    channels_first = True
    class_names = tuple("0123456789")
    flip_allowed = False
    package = "scipy"
    extra = "svhn"
