"""Quantized checkpoints and weights: `quantization_config`, layouts, forms of weights for each device."""
