"""Image degradations on the device: blur, resizing, noise and JPEG compression, with parameters drawn per sample."""
