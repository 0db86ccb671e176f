"""Inference with trained models: tiling, image files, ONNX export."""
