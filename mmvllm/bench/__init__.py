"""`mmvllm bench`: workloads, the same requests in transformers, the host's work, errors of kernels."""
