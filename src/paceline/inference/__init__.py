"""Trained models in use: tiles, images, ONNX."""
