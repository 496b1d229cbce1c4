"""`mmvllm bench`: workloads, comparisons with other engines, the host's work, errors of kernels."""
