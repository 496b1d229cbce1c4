"""Prometheus metrics, under mmvllm's names and vLLM's."""
