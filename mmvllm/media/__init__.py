"""Fetch and decode untrusted images and videos within the limits of a policy, in worker processes."""

from mmvllm.media.policy import MediaPolicy

__all__ = ["MediaPolicy"]
