"""Untrusted images and videos: what may be fetched and decoded, and in which processes."""

from mmvllm.media.policy import MediaPolicy

__all__ = ["MediaPolicy"]
