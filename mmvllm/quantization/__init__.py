"""Quantized checkpoints and linear layers: `quantization_config`, tensor layouts, linear methods of each device."""
