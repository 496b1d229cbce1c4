"""Qwen3-VL, dense and as a mixture of experts, and the text-only Qwen3 that is its dense decoder alone."""

from mmvllm.models.qwen3_vl.family import FAMILY

__all__ = ["FAMILY"]
