"""Qwen2-VL, and text-only Qwen2, which is its decoder."""

from mmvllm.models.qwen2_vl.family import FAMILY

__all__ = ["FAMILY"]
