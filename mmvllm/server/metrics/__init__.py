"""Prometheus metrics, by mmvllm's names or by vLLM's."""
