"""The device: weights, KV cache, what is kept there of sequences, CUDA graphs; tensor parallel ranks."""
