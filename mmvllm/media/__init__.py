"""Fetch untrusted images and videos, and decode them in worker processes, within the limits of a policy."""

from mmvllm.media.policy import MediaPolicy

__all__ = ["MediaPolicy"]
