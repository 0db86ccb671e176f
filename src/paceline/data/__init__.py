"""Sources, loaders and transforms: how samples are read and moved to the device."""
