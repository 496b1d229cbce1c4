"""Qwen3-VL, dense and as a mixture of experts, and text-only Qwen3, which is its dense decoder."""

from mmvllm.models.qwen3_vl.family import FAMILY

__all__ = ["FAMILY"]
