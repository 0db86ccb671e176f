"""STL-10: 13,000 labelled colour images of 96×96 pixels in 10 classes."""

from paceline.data.torchvision_source import TorchvisionSource


class Stl10(TorchvisionSource):
    """Colour images of 96×96 pixels in ten classes of animals and vehicles. The unlabelled images are not used."""

    dataset = "STL10"
    expected = "stl10_binary/ with train_X.bin, train_y.bin, test_X.bin, test_y.bin and unlabeled_X.bin"
    has_split_argument = True
    channels_first = True
    class_names = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
