"""Qwen2-VL, and the text-only Qwen2 that is its decoder alone."""

from mmvllm.models.qwen2_vl.family import FAMILY

__all__ = ["FAMILY"]
