"""Sources, loaders and transforms: how samples are read and brought to the device."""
