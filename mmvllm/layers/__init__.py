"""Attention backends, linear layers, norms, experts; `Batch`, the tensors of one forward pass."""
