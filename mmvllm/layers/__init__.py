"""Attention backends, linear layers, norms and experts, and `Batch`, the tensors of one forward pass."""
