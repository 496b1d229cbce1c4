"""Sequences and beams, who computes what in a step, KV blocks, the encoder cache, stop strings."""
