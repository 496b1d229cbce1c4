"""Qwen2.5-VL."""

from mmvllm.models.qwen2_5_vl.family import FAMILY

__all__ = ["FAMILY"]
